"""Sizes as symbols and formulas."""
