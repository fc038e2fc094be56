"""The feed-forward half of a block: dense, and mixtures of experts."""
