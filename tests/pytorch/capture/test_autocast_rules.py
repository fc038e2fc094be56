"""CUDA's autocast, whose rules a captured module follows on any machine, beside a real step on the CPU under the same rules.

A CPU's own rules are others: norms and softmax stay in 16 bits there (`aten/src/ATen/autocast_mode.h`: the lists
AT_FORALL_FP32 and AT_FORALL_FP32_CPU), so that a step on a CPU keeps less than one on a GPU.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import loadgauge

WIDE = {"group": True, "layer": True, "softmax": True, "batch": False, "silu": False, "gelu": False}
"""What CUDA's autocast runs in float32."""


class Net(nn.Module):
    """Two convolutions, with something between them, in bfloat16 by autocast. wide: in float32 in between, by hand"""

    def __init__(self, kind: str, device: str, wide: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm = {"group": nn.GroupNorm(4, 16), "layer": nn.LayerNorm(32), "batch": nn.BatchNorm2d(16)}.get(kind)
        self.kind, self.device, self.wide = kind, device, wide

    def between(self, x: torch.Tensor) -> torch.Tensor:
        own = {"softmax": lambda x: x.softmax(-1), "silu": F.silu, "gelu": F.gelu}
        result: torch.Tensor = own[self.kind](x) if self.norm is None else self.norm(x)
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            y = self.first(x)
            if self.wide:
                with torch.autocast(self.device, enabled=False):
                    y = self.between(y.float())
            else:
                y = self.between(y)
            result: torch.Tensor = self.last(y).float().square().mean()
        return result


def kept(module: nn.Module) -> int:
    """Bytes that autograd keeps of a real forward on the CPU, beside parameters, copies of them and the input."""
    x = torch.randn(2, 16, 32, 32)
    given = {one.untyped_storage().data_ptr() for one in (x, *module.parameters(), *module.buffers())}
    sizes: dict[int, int] = {}
    holds = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        weights = tensor.shape == (16, 16, 3, 3)
        if storage.data_ptr() not in given and not weights and tensor.device.type == "cpu":
            sizes[storage.data_ptr()] = storage.nbytes()
        holds.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    return sum(sizes.values())


@pytest.mark.parametrize("kind", WIDE)
def test_what_autocast_keeps_is_what_cudas_rules_say(kind: str) -> None:
    captured = loadgauge.capture(lambda: Net(kind, "cuda"), lambda b: torch.empty(b, 16, 32, 32), optimizer="sgd").at(
        b=2
    )
    weights = 2 * 16 * 16 * 9 * 2  # copies of both filters in 16 bits
    of_rules, of_cpu = kept(Net(kind, "cpu", WIDE[kind])), kept(Net(kind, "cpu"))
    assert captured.kept_bytes(b=2) == of_rules + weights
    assert (of_cpu < of_rules) == WIDE[kind]
