"""Numbers made of sizes, values of which one or the other is taken, and gradients of upsampling: as a run with values has them."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import loadgauge
from loadgauge.pytorch.capture.capture import Differs, capture, compare
from loadgauge.pytorch.capture.record import record
from loadgauge.pytorch.capture.symbols.symbolic import Symbols, symbolic_tensors

WIDTH = 16


class Chunks(nn.Module):
    """Reads a quarter of its length off a tensor, as Longformer does, and looks for a number above 0 where there is none."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chunks = torch.div(x.shape[1], 4, rounding_mode="trunc") - 1
        y = x[:, :4].mean(1, keepdim=True) + x.new_zeros((x.shape[0], chunks + 1, WIDTH))
        seen = torch.where(x[..., 0] > x[..., 1], torch.zeros(()), -1e9)
        if (seen > 0).any():
            y = self.other(y)
        return self.head(y).mean()


def inputs(b: int, s: int) -> torch.Tensor:
    return torch.empty(b, s, WIDTH)


def test_a_size_that_is_divided_by_torch_stays_a_symbol_and_where_takes_one_of_two_values() -> None:
    found = loadgauge.capture(Chunks, inputs, optimizer="sgd").at(b=3, s=48)
    assert not found.plain
    assert not found.values
    for sizes in ({"b": 3, "s": 48}, {"b": 5, "s": 83}):
        assert found.holds(**sizes)
        with FlopCounterMode(display=False) as counter:
            Chunks()(torch.rand(sizes["b"], sizes["s"], WIDTH)).backward()
        assert found.flops(**sizes) == counter.get_total_flops()


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        longest = (x[..., 0] > 0).sum(1).max()  # how many positive numbers a row has at most
        return self.head(x[:, :longest]).mean()


LINES = Path(__file__).read_text(encoding="utf-8").splitlines()
LINE = f"{Path(__file__).name}:{next(at for at, text in enumerate(LINES, 1) if ':longest]' in text)}"


def test_a_number_that_the_program_reads_is_stated_by_its_line() -> None:
    found = loadgauge.capture(Reads, inputs, optimizer="sgd", rows={LINE: 9}).at(b=3, s=48)
    x = torch.full((3, 48, WIDTH), -1.0)
    x[1, :9] = x[2, 4:10] = 1
    with FlopCounterMode(display=False) as counter:
        Reads()(x).backward()
    assert found.flops(b=3, s=48) == counter.get_total_flops()
    assert not found.values
    assert any("9 is what the program reads" in line for line in found.assumed)
    assert loadgauge.capture(Reads, inputs, optimizer="sgd").at(b=3, s=48).values


def test_releases_may_come_in_another_order_and_nothing_else_may() -> None:
    job = loadgauge.capture(Chunks, inputs, optimizer="sgd").job
    found = capture(job, "own", {"b": 3, "s": 48})
    plain = record(job, {"b": 3, "s": 48})
    changes = plain.changes

    def swapped(ok: Any) -> Any:
        at = next(at for at, (one, two) in enumerate(itertools.pairwise(changes)) if one != two and ok(one, two))
        other = [*changes[:at], changes[at + 1], changes[at], *changes[at + 2 :]]
        return msgspec.structs.replace(plain, changes=other)

    compare(found, swapped(lambda one, two: one < 0 and two < 0), {"b": 3, "s": 48})
    with pytest.raises(Differs):
        compare(found, swapped(lambda one, two: one < 0 < two), {"b": 3, "s": 48})
    at = next(at for at, change in enumerate(changes) if change < -100)
    more = msgspec.structs.replace(plain, changes=[*changes[:at], round(changes[at] * 1.01), *changes[at + 1 :]])
    with pytest.raises(Differs):
        compare(found, more, {"b": 3, "s": 48})


BACKWARD: dict[str, tuple[int, tuple[Any, ...]]] = {
    "linear1d": (1, (False, None)),
    "bilinear2d": (2, (False, None, None)),
    "bicubic2d": (2, (False, None, None)),
    "trilinear3d": (3, (False, None, None, None)),
}


@pytest.mark.parametrize("kind", BACKWARD)
@pytest.mark.parametrize("laid", ["contiguous", "channels last"])
def test_gradients_of_upsampling_lie_as_the_kernels_write_them(kind: str, laid: str) -> None:
    dims, more = BACKWARD[kind]
    func = getattr(torch.ops.aten, f"upsample_{kind}_backward").default
    formats = {1: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}
    layout = torch.contiguous_format if laid == "contiguous" else formats[dims]
    real = func(torch.zeros(2, 8, *[6] * dims).to(memory_format=layout), [6] * dims, [2, 8, *[4] * dims], *more)
    symbols = Symbols({"b": 2})
    with symbolic_tensors(symbols):
        b = symbols.sizes["b"]
        given = torch.empty(b, 8, *[6] * dims).to(memory_format=layout)
        made = func(given, [6] * dims, [b, 8, *[4] * dims], *more)
        assert [int(one) for one in made.stride()] == list(real.stride())
