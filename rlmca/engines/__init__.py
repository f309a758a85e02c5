"""A model on ranks: train a batch, give log-probabilities, hand out weights, save and load."""
