"""Facts about the values of fake tensors."""
