"""Measurements of real steps: memory, time and FLOPs.

Needs the extra `torch`. Formulas live elsewhere; nothing here is calculated that can be observed.
"""
