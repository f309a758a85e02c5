"""Rollouts: prompts in, sampled replies with their log-probs out."""
