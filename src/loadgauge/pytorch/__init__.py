"""PyTorch: what a program allocates, saves, computes and sends, on a simulated device or a real one."""
