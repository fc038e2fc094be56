"""Encoders, and language models with towers beside them."""
