"""CTC's loss on the simulated device: what a step allocates, against PyTorch's own kernel as its profiler sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import profile

import loadgauge
from loadgauge.pytorch.capture.capture import compare
from loadgauge.pytorch.capture.record import record


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 32)

    def forward(self, x: Any, targets: Any, given: Any, lengths: Any) -> Any:
        return functional.ctc_loss(self.out(x).log_softmax(-1), targets, given, lengths, zero_infinity=True)


def sounds(b: int, s: int, u: int) -> tuple[Any, ...]:
    return torch.zeros(s, b, 16), torch.ones(b, u, dtype=torch.long), torch.full((b,), s), torch.full((b,), u)


def step(net: Any, *given: Any) -> None:
    net(*given).backward()
    net.zero_grad(set_to_none=True)


def test_what_is_allocated_is_what_pytorch_allocates() -> None:
    """Sizes alone: PyTorch's kernel for CPUs makes the gradient before what backward needs beside it, CUDA's after."""
    sizes = {"b": 5, "s": 60, "u": 21}
    net, given = Speech(), sounds(**sizes)
    step(net, *given)
    with profile(profile_memory=True) as seen:
        step(net, *given)
    results: Any = seen.profiler
    theirs = [one.nbytes() for one in results.kineto_results.events() if one.name() == "[memory]"]
    run = record(loadgauge.capture(Speech, sounds, step=step).job, sizes)
    mine = run.changes[run.ops[run.second].events - 1 :]  # with what the first operation makes
    large = 4 * 5 * 16  # more than lists of lengths
    assert sorted(one for one in mine if abs(one) > large) == sorted(one for one in theirs if abs(one) > large)


def test_transcripts_are_as_long_as_they_can_be() -> None:
    captures = loadgauge.capture(Speech, sounds, optimizer="sgd")
    found = captures.at(b=5, s=60, u=21)
    assert str(found.kept_formula) == "8*b*u*s + 132*b*s + 9*b"  # 2 u + 1 numbers and 32 log-probabilities a position
    sizes = {"b": 9, "s": 40, "u": 7}
    compare(found, record(captures.job, sizes), sizes)
