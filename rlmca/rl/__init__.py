"""Reinforcement learning: generate, score, advantages, update, sync."""
