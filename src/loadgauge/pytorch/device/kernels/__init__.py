"""What CUDA's kernels do where PyTorch decides by the name of the device."""
