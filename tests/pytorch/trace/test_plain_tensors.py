"""What a step allocates, event by event, against PyTorch itself as its profiler sees it.

Operations are those whose kernels for a CPU make what CUDA's do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile

import loadgauge
from loadgauge.pytorch.capture.record import record


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
    def __init__(self, rest: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.first, self.others, self.rest = nn.Linear(16, 50), nn.ModuleList(nn.Linear(50, 50) for _ in range(3)), rest

    def forward(self, x: Any, places: Any) -> Any:
        return self.rest(self, self.first(x), places).sum()


def retained(net: Any, y: Any, places: Any) -> Any:
    y.retain_grad()
    return torch.tanh(y) * torch.sigmoid(y)


def zeros(y: Any) -> Any:
    return torch.zeros_like(y)


CASES: dict[str, Callable[[Any, Any, Any], Any]] = {
    # Gradients that come together.
    "products": lambda net, y, at: torch.tanh(y) * torch.sigmoid(y) * y,
    "slices": lambda net, y, at: y[:3].tanh().sum() + y[3:7].sin().sum() + y[7:].cos().sum(),
    "views of products": lambda net, y, at: sum(torch.tanh(other(y)) for other in net.others),
    "a residual": lambda net, y, at: torch.tanh(net.others[1](y + torch.tanh(net.others[0](y))) + y),
    "one operation twice": lambda net, y, at: torch.sin(y * y),
    "held": retained,
    "a function's own sum": lambda net, y, at: Square.apply(y) * torch.cos(y),  # type: ignore[no-untyped-call]
    "an operation's own sum": lambda net, y, at: torch.atan2(y, y.cos()).tanh(),
    "joined": lambda net, y, at: torch.cat([y, y.sin(), y], -1).tanh(),
    # Zeros, of which some become numbers.
    "gather": lambda net, y, at: y.log_softmax(-1).gather(-1, at),
    "take_along_dim": lambda net, y, at: torch.take_along_dim(y, at, -1).tanh(),
    "index_select": lambda net, y, at: y.index_select(1, torch.arange(3)).tanh(),
    "index": lambda net, y, at: y[:, torch.tensor([0, 2, 2])].tanh(),
    "index of rows": lambda net, y, at: y[at[:, 0, 0], at[:, 1, 0]].tanh(),
    "max": lambda net, y, at: y.max(-1).values.tanh(),
    "topk": lambda net, y, at: y.topk(20, -1).values.tanh(),
    "sort": lambda net, y, at: y.sort(-1).values.tanh(),
    "scatter": lambda net, y, at: torch.zeros(10, 6, 90).scatter(-1, at.expand(-1, -1, 50), y).tanh(),
    "index_put": lambda net, y, at: torch.zeros(10, 6, 50).index_put((torch.arange(10),), y).tanh(),
    # A bias.
    "linear of columns": lambda net, y, at: net.others[0](y.transpose(0, 1)).tanh(),
    "linear of a slice": lambda net, y, at: net.others[0](y[:, 1:]).tanh(),
    # Within one operation.
    "mse": lambda net, y, at: F.mse_loss(y, zeros(y)),
    "mse of each": lambda net, y, at: F.mse_loss(y, zeros(y), reduction="none"),
    "smooth l1": lambda net, y, at: F.smooth_l1_loss(y, zeros(y)),
    "huber": lambda net, y, at: F.huber_loss(y, zeros(y)),
    "binary cross-entropy": lambda net, y, at: F.binary_cross_entropy(y.sigmoid(), zeros(y)),
    "logsumexp": lambda net, y, at: y.logsumexp(-1).tanh(),
    "entropy": lambda net, y, at: torch.distributions.Categorical(logits=y).entropy(),
}


def step(net: Any, *given: Any) -> None:
    net(*given).backward()
    net.zero_grad(set_to_none=True)


@pytest.mark.parametrize("name", CASES)
def test_what_is_allocated_is_what_pytorch_allocates(name: str) -> None:
    def given(b: int) -> tuple[Any, ...]:
        return torch.zeros(b, 6, 16), torch.zeros(b, 6, 1, dtype=torch.long)

    net, rows = Net(CASES[name]), given(10)
    step(net, *rows)
    with profile(profile_memory=True) as seen:
        step(net, *rows)
    results: Any = seen.profiler
    theirs = [one.nbytes() for one in results.kineto_results.events() if one.name() == "[memory]"]
    run = record(loadgauge.capture(lambda: Net(CASES[name]), given, step=step).job, {"b": 10})
    mine = run.changes[run.ops[run.second].events - 1 :]
    large = 8 * 10 * 6  # more than one number of each row
    assert sorted(one for one in mine if abs(one) > large) == sorted(one for one in theirs if abs(one) > large)
