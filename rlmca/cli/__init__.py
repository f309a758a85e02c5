"""The command line: commands, launching, and nothing else that reads the environment."""
