"""Weights, gradients and optimizer states: how many, how they are sharded, and what is held beside them."""
