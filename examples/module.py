"""A module of one's own. `loadgauge capture module.py:model --inputs module.py:batch` gives its training step as formulas."""

import torch


class Mixer(torch.nn.Module):
    """Mixes tokens, then channels."""

    def __init__(self, tokens: int = 256, width: int = 512) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.tokens = torch.nn.Sequential(torch.nn.Linear(tokens, 512), torch.nn.GELU(), torch.nn.Linear(512, tokens))
        self.channels = torch.nn.Sequential(torch.nn.Linear(width, 2048), torch.nn.GELU(), torch.nn.Linear(2048, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix images as patches, (batch, tokens, width), and return what is to be small."""
        x = x + self.tokens(self.norms[0](x).mT).mT
        return (x + self.channels(self.norms[1](x))).square().mean()


def model() -> torch.nn.Module:
    """The module whose training is captured."""
    return Mixer()


def batch(b: int) -> torch.Tensor:
    """What it is called with; the parameters name the sizes."""
    return torch.empty(b, 256, 512)
