"""Softmax attention: full, latent, compressed, over context-parallel ranks, and its cache."""
