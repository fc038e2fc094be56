"""Recorded operations as lists with formulas, and where they are stored."""
