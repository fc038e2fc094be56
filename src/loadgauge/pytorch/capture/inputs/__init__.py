"""Inputs that a captured model is run on: tokens, pictures, sounds, heads."""
