"""rlmca: large-scale reinforcement learning of language models on NVIDIA Megatron-Core."""

__version__ = "0.1.0"
