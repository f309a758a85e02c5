"""The project's own benchmarks and the demo."""
