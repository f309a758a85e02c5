"""Megatron-Core modules of a language model: layer parts, the policy model and its log-prob head."""
