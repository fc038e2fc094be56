"""Formulas of a captured step against plain runs, event by event, at sizes that were never captured; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CONFIG_MAPPING

import loadgauge
from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.pytorch.capture.capture import Captures, Differs, compare
from loadgauge.pytorch.capture.record import record

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "intermediate_size": 96,
}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"num_key_value_heads": 2}, {"optimizer": "sgd", "precision": "fp32", "global_batch": 2}),
    ("llama", {"num_key_value_heads": 2}, {"optimizer": "adamw", "precision": "bf16-autocast", "recompute": "full"}),
    (
        "gpt_oss",
        {"num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 16},
        {"optimizer": "sgd", "attention": "eager"},
    ),
]


def config_of(kind: str, keys: dict[str, Any]) -> Any:
    known = CONFIG_MAPPING[kind]().to_dict()
    return CONFIG_MAPPING[kind](**{key: value for key, value in SMALL.items() if key in known}, **keys)


@pytest.mark.parametrize(("kind", "keys", "fields"), CASES, ids=lambda one: one if isinstance(one, str) else "")
@pytest.mark.thorough
def test_models_of_transformers(kind: str, keys: dict[str, Any], fields: dict[str, Any]) -> None:
    captures = loadgauge.capture(config_of(kind, keys), **fields)
    found = captures.at(b=3, s=80)
    assert not found.plain
    # A length that no block of a kernel divides; and a sequence alone, which is captured apart, once.
    for sizes in ({"b": 7, "s": 50}, {"b": 1, "s": 96})[: 2 if kind == "gpt_oss" else 1]:
        plain = record(captures.job, sizes)
        there = captures.at(**sizes)
        assert not there.plain
        compare(there, plain, sizes)
        assert sum(there.parameters.values()) == sum(found.parameters.values())
    assert len(captures.known) <= 3


@pytest.mark.long
def test_encoder_and_decoder_have_a_length_each() -> None:
    keys = {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 1,
        "num_decoder_layers": 1,
        "num_heads": 4,
        "vocab_size": 320,
    }
    captures = loadgauge.capture(CONFIG_MAPPING["t5"](**keys), optimizer="sgd")
    found = captures.at(b=3, s=96, t=80)
    sizes = {"b": 5, "s": 160, "t": 32}
    assert found.holds(**sizes)
    compare(found, record(captures.job, sizes), sizes)
    assert not found.holds(b=3, s=100, t=80)  # a mask is padded where kernels want it aligned


def test_it_is_what_the_trace_says() -> None:
    config = config_of("llama", {})
    found = loadgauge.capture(config, optimizer="sgd").at(b=4, s=72)
    traced = loadgauge.trace(config, optimizer="sgd", micro_batch=4, seq_len=72)
    assert found.peak(b=4, s=72) == traced.peak.total
    assert found.kept_bytes(b=4, s=72) == traced.saved_nbytes
    assert found.flops(b=4, s=72) == traced.flops.total
    assert not found.uncounted


def test_a_wrong_formula_is_seen() -> None:
    captures = loadgauge.capture(lambda: nn.Linear(64, 64), lambda b: torch.empty(b, 64), optimizer="sgd")
    found, plain = captures.at(b=200), record(captures.job, {"b": 300})
    compare(found, plain, {"b": 300})
    number = next(at for at, (_, size) in enumerate(found.events) if any("b" in product for product, _ in size.terms))
    storage, size = found.events[number]
    more = msgspec.structs.replace(
        size, terms=tuple((product, factor + (factor // 100 or 1)) for product, factor in size.terms)
    )
    wrong = msgspec.structs.replace(
        found, events=(*found.events[:number], (storage, more), *found.events[number + 1 :])
    )
    with pytest.raises(Differs, match="bytes live with symbols"):
        compare(wrong, plain, {"b": 300})


# -- modules of one's own ----------------------------------------------------------------------------------------------


class Skips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 8, 2, 2), nn.BatchNorm2d(3)
        self.out = nn.Conv2d(11, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.relu(self.down(self.norm(x)))
        return self.out(torch.cat([x, self.up(low)], 1)).square().mean()


class Penalty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_(True)
        y = self.layers(x).sum()
        (slope,) = torch.autograd.grad(y, x, create_graph=True)
        return y + slope.square().sum()


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.empty(64, dtype=torch.cfloat)), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(self.linear(x), dim=1) * self.weight, n=x.shape[1], dim=1).square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        for place in range(x.shape[1]):
            state = torch.tanh(self.linear(x[:, place]) + state)
        return state.mean()


class Branch(Recurrent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (y * 2 if y.mean() > 0 else y).mean()


def rows(b: int, s: int) -> torch.Tensor:
    return torch.empty(b, s, 64)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 1)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [(Skips, lambda b, s: torch.empty(b, 3, s, s)), (Penalty, rows), (Spectral, rows), (encoder, rows)],
)
def test_modules_of_ones_own(make: Callable[[], nn.Module], inputs: Callable[..., Any]) -> None:
    captures = loadgauge.capture(make, inputs)
    captures.at(b=5, s=96)
    for sizes in ({"b": 4, "s": 90}, {"b": 1, "s": 128})[: 2 if make is Skips else 1]:
        found = captures.at(**sizes)
        assert not found.plain
        compare(found, record(captures.job, sizes), sizes)


def test_a_loop_over_time_holds_at_its_length_alone() -> None:
    captures = loadgauge.capture(Recurrent, rows)
    found = captures.at(b=4, s=12)
    assert found.guards == ("(s == 12)",)
    assert found.holds(b=9, s=12)
    with pytest.raises(NotModelled, match=r"captured where \(s == 12\), which b=4, s=13 is not"):
        found.peak(b=4, s=13)


def test_a_value_that_is_read_is_said_with_its_line() -> None:
    found = loadgauge.capture(Branch, rows).at(b=2, s=8)
    (line,) = found.values
    path, _, number = line.rpartition(":")
    assert "if y.mean() > 0" in Path(path).read_text(encoding="utf-8").splitlines()[int(number) - 1]


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must make a torch.nn.Module, made int"):
        loadgauge.capture(lambda: 3, rows).at(b=2, s=8)
    with pytest.raises(ConfigError, match="with inputs"):
        loadgauge.capture(nn.Linear(2, 2), rows, layers=2)


def test_captures_are_reused_within_their_guards() -> None:
    captures = loadgauge.capture(lambda: nn.Linear(64, 64), rows)
    assert captures.at(b=2, s=8) is captures.at(b=50, s=3000)
    assert captures.at(b=1, s=8) is not captures.at(b=2, s=8)
    assert isinstance(captures, Captures)
