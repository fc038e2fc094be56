"""CUDA's behaviour where PyTorch decides by the name of the device."""
