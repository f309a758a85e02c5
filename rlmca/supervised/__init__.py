"""Supervised stages: one loop over a shuffled data set."""
