"""Measured runs of post-training, and TRL's trainers as traced: converted, compared, and put on a page."""
