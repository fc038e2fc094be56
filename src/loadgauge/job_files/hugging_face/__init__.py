"""Dialects of Hugging Face's libraries and of what they hand their settings to."""
