"""Requests for a capture: dtypes, kernels, what is trained, on which ranks."""
