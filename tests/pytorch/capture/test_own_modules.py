"""Modules of one's own as people write them, whose bytes plain arithmetic knows."""

from __future__ import annotations

from pathlib import Path

import pytest

import loadgauge
from command_line import document, typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.pytorch.capture.call import expressed, inputs_of
from loadgauge.pytorch.capture.inputs.target import check_script, usual_length
from loadgauge.pytorch.capture.lists import compose
from loadgauge.pytorch.capture.requests.list_request import list_request
from loadgauge.pytorch.capture.requests.regime import Document
from loadgauge.pytorch.trace import no_compiler
from loadgauge.pytorch.trace.programs.script import function
from loadgauge.pytorch.trace.subprocess import Request

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

net = nn.Linear({WIDTH}, 4)

class Kind(nn.Linear):
    def __init__(self, width={WIDTH}):
        super().__init__(width, 4)

class Trained(Kind):
    def training_step(self, batch, number):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

def long(batch_size):
    return rows(batch_size)

def labelled(b):
    return rows(b), torch.randint(0, 4, (b,))

class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])

    def forward(self, x, y=None):
        return self.body(x) if y is None else self.body(x) - self.body(y)

def pair(b):
    return torch.randn(b, 64), torch.randn(b, 64)

class Picks(nn.Linear):
    def forward(self, x):
        return super().forward(x[x[:, 0] > 0])
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


def kept(script: Path, target: str, inputs: str) -> int:
    """Bytes that one step of a module with ROWS rows keeps, beside weights and inputs."""
    make = function(f"{script}:{target}")
    found = loadgauge.capture(make, inputs_of(make, f"{script}:{target}", inputs), optimizer="sgd")
    sizes = dict.fromkeys(found.job.names, ROWS)
    return found.at(**sizes).kept_bytes(**sizes)


@pytest.mark.parametrize(
    ("target", "inputs", "rows"),
    [
        ("net", "FILE:rows", 0),
        ("net", f"randn(b, {WIDTH})", 0),
        ("Kind", "FILE:long", 0),
        ("Kind", f"torch.randn(batch_size, {WIDTH}, dtype=torch.float32)", 0),
        ("Trained", "FILE:labelled", 4 * ROWS * 4 + 4),  # the logarithms of 4 classes, and the rows that count
        ("Trained", f"randn(b, {WIDTH}), randint(0, 4, (b,))", 4 * ROWS * 4 + 4),
    ],
)
def test_modules_are_made_and_called_as_people_write_them(script: Path, target: str, inputs: str, rows: int) -> None:
    assert kept(script, target, inputs.replace("FILE", str(script))) == rows


def test_what_is_compiled_runs_as_it_is() -> None:
    assert no_compiler._eager(kept) is kept
    assert no_compiler._eager(mode="max-autotune")(kept) is kept


@pytest.mark.parametrize(
    "text", ["__import__('os').getcwd()", "b.shape", "randn(b).cuda()", "(lambda: b)()", "randn(", "f(b)"]
)
def test_only_tensors_of_sizes_are_expressed(text: str) -> None:
    with pytest.raises(ConfigError, match="must be such as randn"):
        expressed(text)


def test_all_that_is_missing_is_asked_for_at_once(tmp_path: Path) -> None:
    place = tmp_path / "net.py"
    place.write_text("def model():\n    pass\n")
    with pytest.raises(ConfigError, match=r"needs --inputs: .*randn\(b, 3, 224, 224\).*def batch\(b\)"):
        check_script(f"{place}:model", "")
    place.write_text("def model():\n    pass\ndef batch(b: int, seq_len: int = 96, other=3):\n    pass\n")
    assert check_script(f"{place}:model", "") == f"{place}:batch"
    assert [usual_length(text) for text in (f"{place}:batch", f"{place}:model", "randn(b)")] == [96, None, None]


def listed(script: Path, target: str, inputs: str, regime: int = 4) -> Document:
    request = Request(Job(f"{script}:{target}"))
    return list_request(request, {"weight": regime}, f"{script}:{inputs}", {"b": ROWS, "s": 1})


def test_few_layers_say_what_all_do(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = listed(script, "Twins", "pair").listings[0], listed(script, "linears", "rows").listings[0]
    assert [len(one.blocks) for one in found] == [1, LAYERS]  # what is called twice has no order of blocks
    assert [found[0].plain, found[1].plain] == ["", ""]
    monkeypatch.setattr(compose, "_chosen", lambda pattern: tuple(range(len(pattern))))
    whole = listed(script, "linears", "rows").listings[0]
    assert whole.blocks == found[1].blocks
    assert (whole.entry, whole.exit, whole.guards) == (found[1].entry, found[1].exit, found[1].guards)


def test_rows_that_data_chooses_are_as_many_as_there_are(script: Path) -> None:
    script.write_text(f"{script.read_text()}\ndef picks():\n    return Picks({WIDTH}, 4)\n")
    told = listed(script, "picks", "rows").listings[0].assumed
    assert any("as many" in line for line in told), told
