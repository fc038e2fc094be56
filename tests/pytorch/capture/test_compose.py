"""Formulas at full depth from few layers, against plain runs of all of them at other sizes; and where they are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING

import loadgauge
from loadgauge.pytorch.capture import capture as capturing
from loadgauge.pytorch.capture.capture import compare
from loadgauge.pytorch.capture.lists.compose import Few, Uncomposed, compose
from loadgauge.pytorch.capture.record import Recorded, record
from loadgauge.pytorch.capture.symbols import symbolic

SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "intermediate_size": 96,
    "head_dim": 16,
}  # fmt: skip
KINDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"num_hidden_layers": 6}, {"optimizer": "adamw", "recompute": "full", "precision": "bf16-autocast"}),
    (
        "qwen2",
        {
            "num_hidden_layers": 8,
            "use_sliding_window": True,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
        {"optimizer": "sgd"},
    ),
    (
        "qwen3_moe",  # the first two layers are dense
        {
            "num_hidden_layers": 9,
            "mlp_only_layers": [0, 1],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
        {"optimizer": "sgd"},
    ),
]


class Told(list[Any]):
    """What `compose` was called with, and what came of it."""


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    said = Told()

    def call(run: Recorded, plain: Recorded, few: Few, value: Any) -> Recorded:
        try:
            said.append((run, compose(run, plain, few, value)))
        except Uncomposed as error:
            said.append((run, error))
            raise
        return said[-1][1]  # type: ignore[no-any-return]

    monkeypatch.setattr(capturing, "compose", call)
    return said


@pytest.mark.parametrize(("kind", "keys", "fields"), KINDS, ids=lambda one: one if isinstance(one, str) else "")
@pytest.mark.long
def test_all_layers_from_few(kind: str, keys: dict[str, Any], fields: dict[str, Any], told: Told) -> None:
    config = CONFIG_MAPPING[kind](**SMALL, **keys)
    captures = loadgauge.capture(config, **fields)
    found = captures.at(b=3, s=80)
    ((few, all_of_them),) = told
    assert len(few.ops) < 2 * len(all_of_them.ops) / 3
    assert not found.plain
    sizes = {"b": 5, "s": 208}
    compare(found, record(captures.job, sizes), sizes)
    # The configuration is as it was.
    assert config.num_hidden_layers == keys["num_hidden_layers"]
    assert len(getattr(config, "layer_types", None) or range(config.num_hidden_layers)) == config.num_hidden_layers


class Gathering(nn.Module):
    """Every block reads the results of all before it, so that what few blocks do says nothing of many."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = [x]
        for block in self.blocks:
            held.append(block(torch.cat(held).mean(0, keepdim=True) + x))
        return torch.stack(held).square().mean()


def rows(b: int, s: int) -> torch.Tensor:
    return torch.empty(b, s, 64)


def test_blocks_that_differ_by_their_number_are_not_composed(told: Told) -> None:
    captures = loadgauge.capture(Gathering, rows)
    found = captures.at(b=3, s=80)
    assert isinstance(told[0][1], Uncomposed)
    assert not found.plain
    sizes = {"b": 7, "s": 33}
    compare(found, record(captures.job, sizes), sizes)


class Blocks(Gathering):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x.square().mean()


def test_a_size_without_a_formula_is_refused(told: Told) -> None:
    captures = loadgauge.capture(Blocks, rows)
    captures.at(b=3, s=80)
    ((run, _),) = told
    sizes = {"b": 5, "s": 96}
    plain, few = record(captures.job, sizes), Few()
    with few.within(Blocks()):
        pass

    number = next(at for at, change in enumerate(run.changes) if not isinstance(change, int))
    symbols = sorted(run.changes[number].free_symbols, key=str)
    numbers = dict(zip(symbols, sizes.values(), strict=True))

    def at(size: Any) -> int:
        return int(size if isinstance(size, int) else size.subs(numbers))

    compose(run, plain, few, at)
    changes = [change + change // 100 if place == number else change for place, change in enumerate(run.changes)]
    with pytest.raises(Uncomposed):
        compose(msgspec.structs.replace(run, changes=changes, nbytes=[0] * len(run.nbytes)), plain, few, at)


def test_what_takes_too_long_as_symbols_is_run_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "MOST_OPERATIONS", 10)
    found = loadgauge.capture(Blocks, rows).at(b=3, s=80)
    assert found.plain.startswith("sizes as symbols take too long here: 6 operations")  # the second step has as many
    # The input of each layer but the first, which is the program's own; of ReLU the result, which is that; and the squared one.
    assert found.kept_bytes(b=3, s=80) == 6 * 4 * 3 * 80 * 64
