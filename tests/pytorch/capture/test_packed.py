"""Packed sequences on the simulated device: what a step allocates, against PyTorch's own code as its profiler sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.profiler import profile

import loadgauge
from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.capture.capture import compare
from loadgauge.pytorch.capture.record import record

KNOWN = [60, 60, 41, 41, 7]


class Words(nn.Module):
    """Packs, multiplies the rows, and pads again."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.into, self.out, self.batch_first = nn.Linear(16, 32), nn.Linear(32, 8), batch_first

    def forward(self, x: Any, lengths: Any) -> Any:
        packed = pack_padded_sequence(self.into(x), lengths, batch_first=self.batch_first)
        rows = packed._replace(data=self.out(packed.data))
        return pad_packed_sequence(rows, batch_first=self.batch_first)[0]


class Reader(nn.Module):
    """Two recurrent layers over packed sequences in any order; the last state and all outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.out = nn.LSTM(16, 24, num_layers=2, bidirectional=True, batch_first=True), nn.Linear(48, 3)

    def forward(self, x: Any, lengths: Any) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found, (last, _) = self.read(packed)
        return self.out(pad_packed_sequence(found, batch_first=True)[0]).sum(1) + self.out(last[-1].repeat(1, 2))


def step(net: Any, *given: Any) -> None:
    net(*given).sum().backward()
    net.zero_grad(set_to_none=True)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("lengths", [[60] * 5, KNOWN], ids=["equal", "unequal"])
def test_what_is_allocated_is_what_pytorch_allocates(lengths: list[int], batch_first: bool) -> None:
    def given(b: int, s: int) -> tuple[Any, ...]:
        return torch.zeros(b, s, 16) if batch_first else torch.zeros(s, b, 16), torch.tensor(lengths)

    sizes = {"b": 5, "s": 60}
    net = Words(batch_first)
    rows = given(**sizes)
    step(net, *rows)
    with profile(profile_memory=True) as seen:
        step(net, *rows)
    results: Any = seen.profiler
    theirs = [one.nbytes() for one in results.kineto_results.events() if one.name() == "[memory]"]
    run = record(loadgauge.capture(lambda: Words(batch_first), given, step=step).job, sizes)
    mine = run.changes[run.ops[run.second].events - 1 :]
    large = 8 * 60  # more than lists of lengths
    assert sorted(one for one in mine if abs(one) > large) == sorted(one for one in theirs if abs(one) > large)


def test_lengths_that_are_not_known_are_the_longest() -> None:
    captures = loadgauge.capture(Reader, lambda b, s: (torch.zeros(b, s, 16), torch.empty(b, dtype=torch.long)))
    found = captures.at(b=5, s=60)
    assert not found.plain
    said = [one for one in found.assumed if one.endswith("there are fewer rows")]
    assert len(said) == 1
    assert "test_packed.py" in said[0]
    for sizes in ({"b": 9, "s": 41}, {"b": 6, "s": 50}):
        compare(found, record(captures.job, sizes), sizes)
    whole = loadgauge.capture(Reader, lambda b, s: (torch.zeros(b, s, 16), torch.full((b,), s))).at(b=5, s=60)
    assert whole.flops(b=5, s=60) == found.flops(b=5, s=60)
    assert not any("fewer rows" in one for one in whole.assumed)


def test_known_lengths_have_their_rows() -> None:
    def given(b: int, s: int) -> tuple[Any, ...]:
        return torch.zeros(b, s, 16), torch.tensor(KNOWN)

    captures = loadgauge.capture(lambda: Words(True), given, optimizer="sgd")
    products = 6 * sum(KNOWN) * 32 * 8 + 4 * 5 * 60 * 16 * 32  # the first layer's input has no gradient
    assert captures.at(b=5, s=60).flops(b=5, s=60) == products
    with pytest.raises(ConfigError, match="5 lengths of 6 sequences"):
        captures.at(b=6, s=60)
