"""Layers without padding: attention, mixers, masks and boundaries of sequences."""
