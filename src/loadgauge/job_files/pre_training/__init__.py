"""Dialects of pre-training frameworks."""
