"""What PyTorch itself keeps, allocates and computes: traced without a GPU, or measured around a real step.

Needs the extra `torch`. Formulas live elsewhere; nothing here is calculated that can be observed.
"""
