"""Layers of experts as their libraries write them, run on the simulated device and compared with the list of operations."""
