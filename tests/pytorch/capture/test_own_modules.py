"""Modules of one's own as people write them, whose bytes plain arithmetic knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import document, typed

WIDTH, LAYERS, ROWS = 1024, 10, 8
TEXT = f"""
import copy
import torch
from torch import nn

def linears():
    return nn.Sequential(*[nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})])

def half():
    return linears().to(torch.bfloat16)

def rows(b):
    return torch.randn(b, {WIDTH})

def half_rows(b):
    return torch.randn(b, {WIDTH}, dtype=torch.bfloat16)

class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range(4)])

    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.layers(x).float()

class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm2d(16)
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3), norm, copy.deepcopy(norm), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.last = nn.BatchNorm1d(16)

    def forward(self, x):
        return self.last(self.layers(x))

def cast():
    return Cast()

def pooled():
    return Pooled()

def pictures(b, side=34):
    return torch.randn(b, 3, side, side)
"""
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    place = tmp_path / "own.py"
    place.write_text(TEXT)
    return place


def parts(script: Path, target: str, inputs: str, more: str = "") -> dict[str, float]:
    words = f"estimate {script}:{target} --inputs {script}:{inputs} --micro-batch {ROWS} {more}"
    return document(words)["memory"]["parts"]


def captured(script: Path, target: str, inputs: str, more: str = "") -> float:
    words = f"capture {script}:{target} --inputs {script}:{inputs} --micro-batch {ROWS} --json {more}"
    return document(words)["memory"]["total"]


@pytest.mark.parametrize("more", ["", "--optimizer adamw"])
def test_adamw_runs_as_pytorch_runs_it_on_cuda(script: Path, more: str) -> None:
    """In lists: weights, gradients, two moments, and a list of the second's roots, all of 4 bytes."""
    found = parts(script, "linears", "rows", more)
    outside = found.pop("outside")
    assert sum(found.values()) == pytest.approx(5 * 4 * PARAMETERS, rel=0.001)
    assert outside > 0


def test_a_module_in_16_bits_trains_in_16_bits(script: Path) -> None:
    found = parts(script, "half", "half_rows")
    assert [found[part] for part in ("weights", "optimizer")] == [
        2 * PARAMETERS,
        pytest.approx(4 * PARAMETERS, rel=1e-3),
    ]
    for target, inputs, precision, words in (
        ("half", "half_rows", "fp32", "bfloat16: bf16-pure"),
        ("linears", "rows", "bf16-pure", "float32: fp32 or bf16-autocast"),
    ):
        told = typed(f"estimate {script}:{target} --inputs {script}:{inputs} --precision {precision}")
        assert (told.code, words in told.err) == (2, True)


def test_autocast_of_cuda_inside_forward_is_in_force(script: Path) -> None:
    """Each layer keeps its input in 16 bits, and a copy of its weight; nothing is kept in float32 but the first input."""
    found = parts(script, "cast", "rows", "--optimizer sgd")
    kept = 4 * 2 * ROWS * WIDTH + 4 * 2 * WIDTH * WIDTH
    assert found["weights"] == 4 * 4 * WIDTH * WIDTH
    assert (
        found["activations"] + found["transient"] + found["gradients"]
        < kept + 4 * 4 * WIDTH * WIDTH + 2 * 4 * WIDTH * WIDTH
    )
    told = typed(f"estimate {script}:cast --inputs {script}:rows --micro-batch {ROWS}")
    assert "autocast" not in told.err


@pytest.mark.long
def test_other_sizes_of_a_batch_are_at_their_defaults_and_rows_may_be_two_at_least(script: Path) -> None:
    """Batch norm of pooled rows refuses one, which is no reason to refuse eight."""
    found = parts(script, "pooled", "pictures", "--optimizer sgd")
    map_ = ROWS * 16 * 32 * 32 * 4
    assert found["activations"] + found["transient"] > 3 * map_
    told = typed(f"estimate {script}:pooled --inputs {script}:pictures --micro-batch 1")
    assert (told.code, "Expected more than 1 value per channel" in told.err) == (2, True)
    side = {size: captured(script, "pooled", "pictures", f"--size side={size}") for size in (34, 66)}
    assert side[66] / side[34] == pytest.approx(4, rel=0.05)
    assert captured(script, "pooled", "pictures") == side[34]
