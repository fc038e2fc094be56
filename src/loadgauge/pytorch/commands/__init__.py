"""The commands that run PyTorch."""
