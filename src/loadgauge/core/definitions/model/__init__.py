"""Models, their adapters, and the kernels that carry out their operations."""
