"""What a program reads of tensors: experts in a loop, masks of ones, branches; recurrent layers; steps and modules of one's own."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import loadgauge
from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.capture.capture import compare
from loadgauge.pytorch.capture.record import record
from loadgauge.pytorch.device.facts.fact_kinds import share
from loadgauge.pytorch.device.simulated import fake_tensors, simulated_device

OWN: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "own_modules.py"))


@pytest.mark.parametrize(("total", "of"), [(10, 4), (3, 8), (64, 8), (1000, 7)])
def test_shares_add_up(total: int, of: int) -> None:
    shares = [share(total, of, expert) for expert in range(of)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert share(total, of, of) == 0  # a class beyond the experts


class Routed(nn.Module):
    """Experts of which four ways of looping are known; `ids` overrides who is chosen, for a run with values."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.ids = way, None
        self.experts, self.router = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(0, 1)
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        ids = ids if self.ids is None else self.ids
        out = torch.zeros_like(x)
        if self.way == "lists":
            counts = torch.bincount(ids.flatten(), minlength=4).tolist()
            order = ids.flatten().argsort()
            parts = x[order // 2].split(counts)
            done = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
            return out.index_add(0, order // 2, done).square().mean()
        mask = F.one_hot(ids, 5).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero() if self.way == "hit" else torch.arange(4)[:, None]
        for number in hit:
            if self.way == "mask":
                rows = ids[:, 0] == number.item()
                out[rows] = self.experts[int(number)](x[rows])
                continue
            place, token = torch.where(mask[number[0]])
            out = out.index_add(0, token, self.experts[int(number)](x[token]) * weights[token, place, None])
        return out.square().mean()


class Counted(TorchDispatchMode):
    """FLOPs by PyTorch's formulas; its own counter follows modules too, which a penalty on gradients does not let it."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def routed(b: int, s: int) -> torch.Tensor:
    return torch.empty(b, s, 16)


@pytest.mark.parametrize("way", ["hit", "lists", "mask"])
def test_experts_in_a_loop(way: str) -> None:
    """Formulas are right where rows do not divide by experts; at b=6, s=4 they are a run's on a CPU with experts equally busy."""
    captures = loadgauge.capture(lambda: Routed(way), routed, optimizer="sgd")
    found = captures.at(b=5, s=33)
    assert not found.plain
    assert not found.values
    assert any("test_values_read.py" in line and "4 experts are equally busy" in line for line in found.assumed)
    sizes = {"b": 7, "s": 51}
    compare(found, record(captures.job, sizes), sizes)

    module = Routed(way)
    first = torch.arange(24) % 4
    module.ids = torch.stack([first, (first + 1) % 4], -1)
    with FlopCounterMode(display=False) as counter:
        module(torch.randn(6, 4, 16)).backward()
    assert found.flops(b=6, s=4) == counter.get_total_flops()


def test_what_no_one_knows_is_refused_with_its_line() -> None:
    class Positive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y[y > 0].mean()

    with pytest.raises(ConfigError, match=r"nonzero.* \(.*test_values_read.py:\d+\)"):
        loadgauge.capture(Positive, routed).at(b=2, s=8)


def test_facts_are_void_once_written_to() -> None:
    with fake_tensors() as mode:
        place = simulated_device()
        ones = torch.ones(4, 3, dtype=torch.bool, device=place)
        view = ones[:, 1]
        assert bool(ones.all())
        assert ones.nonzero().shape == (12, 2)
        assert torch.empty(4, 3, device=place)[~ones].shape == (0,)
        padded = F.pad((1 - ones.float()) * -4, (0, 2), value=-9)  # 0 or -9
        assert not bool((padded > 0).any())
        assert (padded < 1).nonzero().shape == (20, 2)
        assert mode.facts.of(padded < -1) is not None
        assert not mode.read.values
        view.copy_(torch.empty(4, device=place) > 0)
        assert mode.facts.of(ones) is None
        made_up = bool(ones.all())  # and said
        assert made_up
        assert len(mode.read.values) == 1


def test_a_branch_says_where_it_went_on() -> None:
    def model() -> nn.Module:
        return OWN["Branch"]()  # type: ignore[no-any-return]

    found = loadgauge.capture(model, OWN["tokens"]).at(b=2, s=8)
    (line,) = found.branches
    path, _, rest = line.partition(".py:")
    number, to = (int(word) for word in rest.split() if word.isdigit()) if rest else (0, 0)
    lines = Path(f"{path}.py").read_text(encoding="utf-8").splitlines()
    assert "if y.abs().max() > 4" in lines[number - 1]
    assert "self.more" in lines[to - 1]
    assert found.values == (f"{path}.py:{number}",)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LSTM", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
        ("LSTM", {"proj_size": 8}),
        ("GRU", {"num_layers": 2}),
        ("RNN", {"bias": False}),
    ],
)
def test_recurrent_layers(kind: str, settings: dict[str, Any]) -> None:
    """FLOPs are those of PyTorch's own loop over time on a CPU, shapes those of its results."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(16, 16), getattr(nn, kind)(16, 24, **settings)
            number = settings.get("num_layers", 1) * (1 + settings.get("bidirectional", False))
            widths = (settings.get("proj_size", 24), 24)[: 1 + (kind == "LSTM")]
            # States that are trained: a loop over time would leave out the gradient of those that are not, cuDNN does not.
            self.states = nn.ParameterList(nn.Parameter(torch.zeros(number, 1, width)) for width in widths)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.shape[0 if settings.get("batch_first") else 1]
            given = [one.expand(-1, rows, -1).contiguous() for one in self.states]
            out, last = self.layer(self.first(x), tuple(given) if kind == "LSTM" else given[0])
            shapes.append([tuple(one.shape) for one in (out, *(last if isinstance(last, tuple) else (last,)))])
            return out.square().mean()

    shapes: list[Any] = []
    captures = loadgauge.capture(Layer, routed, optimizer="sgd")
    found = captures.at(b=3, s=5)
    sizes = {"b": 6, "s": 9}
    compare(found, record(captures.job, sizes), sizes)
    assert not found.uncounted
    with FlopCounterMode(display=False) as counter, torch.backends.mkldnn.flags(enabled=False):
        Layer()(torch.randn(6, 9, 16)).backward()
    assert shapes[-1] == shapes[-2]  # of the plain run, and of real tensors
    assert found.flops(**sizes) == counter.get_total_flops()


def test_what_an_lstm_keeps() -> None:
    """Four gates, the cell's state and the lower layer's output, as PyTorch's fused cells do; with input, states and output."""
    found = loadgauge.capture(lambda: OWN["Recurrent"]("LSTM", num_layers=2), OWN["tokens"], optimizer="sgd").at(
        b=3, s=5
    )
    b, s, units = 3, 5, 32
    reserve = 4 * b * s * (2 * 5 * units + units)
    states, out, logits = 4 * b * units * 2 * 2, 4 * b * s * units, 4 * b * s * 8
    assert found.kept_bytes(b=b, s=s) in (reserve + states + out + logits, reserve + states // 2 + out + logits)


SMALL = ("U-Net with skips", "embedding bags")


@pytest.mark.parametrize("name", SMALL)
def test_own_modules(name: str) -> None:
    """docs/captured-accuracy.md has all of them."""
    make, inputs, step = OWN["MODULES"][name]
    captures = loadgauge.capture(make, inputs, **({"step": step} if step else {}))
    first, other = ({"b": 5, "s": 24, "side": 32, "n": 6}, {"b": 7, "s": 19, "side": 44, "n": 9})
    found = captures.at(**{name: first[name] for name in captures.job.names})
    sizes = {name: other[name] for name in captures.job.names}
    assert not found.plain
    compare(found, record(captures.job, sizes), sizes)


def test_a_step_of_ones_own_is_one_step() -> None:
    """Three backward calls and three optimizer steps of two optimizers: FLOPs are those counted on a CPU."""
    make, inputs, step = OWN["MODULES"]["GAN, two optimizers"]
    captures = loadgauge.capture(make, inputs, step=step)
    found = captures.at(b=6)
    compare(found, record(captures.job, {"b": 9}), {"b": 9})
    made = make()
    with Counted() as counter:
        step(made, torch.randn(6, 64))
    assert found.flops(b=6) == counter.flops
    assert sum(found.parameters.values()) == sum(
        one.numel() for part in ("make", "judge") for one in made[part].parameters()
    )


def test_a_step_needs_no_more() -> None:
    make, inputs, step = OWN["MODULES"]["GAN, two optimizers"]
    with pytest.raises(ConfigError, match="step"):
        loadgauge.capture(make, inputs, step=step, optimizer="sgd")
    nothing: Callable[[], Any] = lambda: 3  # noqa: E731
    with pytest.raises(ConfigError, match=r"must make a torch.nn.Module"):
        loadgauge.capture(nothing, inputs, step=step).at(b=2)


class Windows(nn.Module):
    """Pads a mask to a window, marks nothing in it, and asks for rows of a table in steps; `read`: the values it asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.read = nn.Embedding(6, 8), list[Any]()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        ids = F.pad(ids, (0, 16 - ids.shape[1]))
        mask = F.pad(torch.ones(ids.shape[0], 13, device=ids.device), (0, 3))
        rows = torch.arange(16, device=ids.device) + 0
        bias = torch.where((rows >= 0) & mask[torch.zeros_like(ids), rows].bool(), 0.0, -100.0)
        bias[mask == 2] = 100.0
        lengths = torch.empty(3, dtype=torch.int64)
        lengths[0], lengths[1:] = 4, torch.tensor([5, 7])
        self.read = [(bias > 0).any().item(), *lengths.tolist()]
        return self.table(ids).sum(-1) + bias


def test_values_through_windows_are_those_of_a_run_with_values() -> None:
    real, fake = Windows(), Windows()
    real(torch.zeros(2, 13, dtype=torch.int64))
    found = loadgauge.capture(
        lambda: fake.to(torch.get_default_device()), lambda b: torch.zeros(b, 13, dtype=torch.int64)
    ).at(b=2)
    assert fake.read == real.read
    assert not found.values


class Pictured(nn.Module):
    """Vectors of pictures in the place of some tokens, whose mask is given."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.tower = nn.Embedding(6, 8), nn.Linear(3, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
        out = self.table(ids)
        out[mask] = self.tower(pictures)
        return out.square()


def test_backward_of_rows_put_where_a_mask_is_true() -> None:
    """The gradient of the rows has as many rows, though the mask has no values."""

    def inputs(b: int) -> tuple[torch.Tensor, ...]:
        return torch.zeros(b, 12, dtype=torch.int64), torch.empty(b, 12, dtype=torch.bool), torch.empty(b * 5, 3)

    found = loadgauge.capture(Pictured, inputs).at(b=4)
    put = [one for one in found.operations[found.second :] if one.module.endswith("tower") and one.flops is not None]
    with FlopCounterMode(display=False) as counter:
        mask = torch.arange(12).expand(4, 12) < 5
        Pictured()(torch.zeros(4, 12, dtype=torch.int64), mask, torch.randn(20, 3)).mean().backward()
    assert sum(one.flops.at({"b": 4}) for one in put if one.flops is not None) == counter.get_total_flops()
    assert not found.plain


class Resized(nn.Module):
    """Takes one of several sizes at random, as detection's transforms do, and stops where something is wrong with its input."""

    def __init__(self, checks: bool = False) -> None:
        super().__init__()
        self.one, self.checks = nn.Linear(8, 8), checks

    def forward(self, x: Any) -> Any:
        if self.checks and (x < 0).any():
            return x[torch.where(x < 0)[0]].sum()
        sizes = (1, 2, 3)
        return self.one(x.repeat(sizes[int(torch.empty(1).uniform_(0, 3.0).item())], 1))


def test_a_number_that_is_drawn_is_taken_in_the_middle() -> None:
    found = loadgauge.capture(Resized, lambda b: torch.empty(b, 8), optimizer="sgd").at(b=5)
    assert any("between 0 and 3 is in the middle" in one for one in found.assumed)
    twice = loadgauge.capture(lambda: nn.Linear(8, 8), lambda b: torch.empty(2 * b, 8), optimizer="sgd")
    assert found.flops(b=5) == twice.at(b=5).flops(b=5) > 0


def test_what_decided_before_a_refusal_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"depends on values \(.*py:\d+; .*py:\d+ decided by a value that is not known\)"
    ):
        loadgauge.capture(lambda: Resized(True), lambda b: torch.empty(b, 8), optimizer="sgd").at(b=5)
