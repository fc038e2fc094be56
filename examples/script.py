"""A training step of one's own. `loadgauge trace script.py:train` runs it on tensors without memory."""

import torch


def train() -> None:
    """One step of a small network."""
    model = torch.nn.Sequential(torch.nn.Linear(4096, 16384), torch.nn.GELU(), torch.nn.Linear(16384, 4096)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2048, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
