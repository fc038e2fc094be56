"""Dialects of trainers that generate their answers."""
