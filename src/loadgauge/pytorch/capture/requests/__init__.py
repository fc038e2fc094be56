"""What is asked of a capture: dtypes, kernels, what is trained, on which ranks."""
