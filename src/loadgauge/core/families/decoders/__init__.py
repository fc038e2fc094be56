"""Decoders with attention and an MLP in each block."""
