"""Gradients of one tensor that come from several operations: what their sums allocate, against PyTorch as its profiler sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile

import loadgauge
from loadgauge.capture.record import record


class Square(torch.autograd.Function):
    """One that adds by itself, too: its own sum is a new tensor."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        part = grads[0] * x
        return part + part


class Net(nn.Module):
    def __init__(self, rest: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.first, self.others, self.rest = nn.Linear(16, 50), nn.ModuleList(nn.Linear(50, 50) for _ in range(3)), rest

    def forward(self, x: Any) -> Any:
        return self.rest(self, self.first(x)).sum()


def retained(net: Any, y: Any) -> Any:
    y.retain_grad()
    return torch.tanh(y) * torch.sigmoid(y)


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "products": lambda net, y: torch.tanh(y) * torch.sigmoid(y) * y,
    "slices": lambda net, y: y[:3].tanh().sum() + y[3:7].sin().sum() + y[7:].cos().sum(),
    "views of products": lambda net, y: sum(torch.tanh(other(y)) for other in net.others),
    "a residual": lambda net, y: torch.tanh(net.others[1](y + torch.tanh(net.others[0](y))) + y),
    "one operation twice": lambda net, y: torch.sin(y * y),
    "held": retained,
    "a function's own sum": lambda net, y: Square.apply(y) * torch.cos(y),  # type: ignore[no-untyped-call]
    "joined": lambda net, y: torch.cat([y, y.sin(), y], -1).tanh(),
}


def step(net: Any, x: Any) -> None:
    net(x).backward()
    net.zero_grad(set_to_none=True)


@pytest.mark.parametrize("name", CASES)
def test_sums_are_in_place_where_they_are(name: str) -> None:
    net, x = Net(CASES[name]), torch.zeros(10, 6, 16)
    step(net, x)
    with profile(profile_memory=True) as seen:
        step(net, x)
    results: Any = seen.profiler
    theirs = [one.nbytes() for one in results.kineto_results.events() if one.name() == "[memory]"]
    run = record(
        loadgauge.capture(lambda: Net(CASES[name]), lambda b: (torch.zeros(b, 6, 16),), step=step).job, {"b": 10}
    )
    mine = run.changes[run.ops[run.second].events - 1 :]
    large = 4 * 10 * 6  # more than a sum of the loss
    assert sorted(one for one in mine if abs(one) > large) == sorted(one for one in theirs if abs(one) > large)
