"""Dialects of fine-tuning tools."""
