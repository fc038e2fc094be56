"""Facts about masks that go together, about tokens that pictures stand at, and values that are read as an array."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loadgauge.pytorch.capture.inputs.tokens import watch
from loadgauge.pytorch.capture.symbols.values import KeptValues, known
from loadgauge.pytorch.device.simulated import fake_tensors, simulated_device


def _inverted(device: str) -> torch.Tensor:
    """As LED makes its mask: above 0 nowhere, as what is filled is what is padded."""
    mask = F.pad(torch.ones((2, 5), device=device), (0, 3), value=0.0)
    inverted = 1.0 - mask[:, None, :].expand(2, 4, 8)
    return inverted.masked_fill(inverted.bool(), -3.0) * inverted > 0


def _turned(device: str) -> torch.Tensor:
    """The same values at other places do not go together: here one is padding where the other is not."""
    mask = F.pad(torch.ones((4, 3), device=device), (0, 1), value=0.0)
    return mask * (1.0 - mask.t()) > 0


@pytest.mark.parametrize("mask", [_inverted, _turned])
def test_masks_that_go_together(mask: Callable[[str], torch.Tensor]) -> None:
    with fake_tensors():
        found = bool(mask(simulated_device()).any())
    assert found == bool(mask("cpu").any())


def test_what_is_computed_of_known_numbers_is_read_as_an_array() -> None:
    def plan(device: str) -> torch.Tensor:
        ideal = torch.linspace(0, 3, 4, device=device)
        return (ideal[:, None] - torch.tensor([0.5, 2.9], device=device).log()).abs()

    real = plan("cpu").numpy().tolist()
    with fake_tensors(), KeptValues():
        assert plan("cpu").cpu().numpy().tolist() == real
        assert known([2, 3], simulated_device()).cpu().numpy().tolist() == [2, 3]
        with pytest.raises(RuntimeError, match="numpy"):
            torch.rand(3).numpy()
    assert "numpy" not in vars(torch._subclasses.fake_tensor.FakeTensor)


class Seeing(nn.Module):
    """Adds vectors of a picture to those of its tokens, in a layer, where its mask is true."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def get_placeholder_mask(self, ids: torch.Tensor, *, image_features: torch.Tensor) -> torch.Tensor:
        return (ids == 7).unsqueeze(-1)

    def forward(self, ids: torch.Tensor, x: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        mask = self.get_placeholder_mask(ids, image_features=vectors)
        there = x[mask.squeeze(-1)] + vectors
        self.rows.append(there.shape[0])
        return x.masked_scatter(mask, there.view(-1))


def test_layers_look_again_where_pictures_are() -> None:
    ids = torch.tensor([[7, 7, 7, 1, 2, 3]] * 2)
    real = Seeing()
    real(ids, torch.zeros(2, 6, 4), torch.ones(6, 4))
    with fake_tensors():
        place = simulated_device()
        module = Seeing()
        watch(module, 6, 2)
        x = torch.zeros(2, 6, 4, device=place, requires_grad=True)
        module(torch.empty((2, 6), dtype=torch.long, device=place), x, torch.ones(6, 4, device=place)).sum().backward()
    assert module.rows == real.rows
