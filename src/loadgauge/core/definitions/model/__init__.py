"""What a model is, its adapters, and the kernels that carry out its operations."""
