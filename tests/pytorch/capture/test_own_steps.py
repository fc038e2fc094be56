"""A script's own step by name, and what a module needs to be made, found in its script."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from command_line import document
from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.capture.inputs.target import check_script
from loadgauge.pytorch.trace.programs.own_loops import OwnLoop, is_step, looped, settings
from loadgauge.pytorch.trace.programs.script import function, made

ROWS = 32
TEXT = """
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

args = SimpleNamespace(width=96)

@dataclass
class Config:
    width: int = 96

class Net(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, cfg.width), nn.GELU(), nn.Linear(cfg.width, 10))

    def forward(self, x):
        return self.net(x).square().mean()

class Bare(nn.Linear):
    def __init__(self, width, depth):
        super().__init__(width, depth)

def build(args):
    return Net(args)

def lined():
    rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Dropout(rate)) for rate in rates])

def empty():
    with torch.device("meta"):
        return Net(Config())

net = Net(Config())
optimizer = torch.optim.AdamW(net.parameters(), foreach=True)

def loss_of(x):
    return net(x)

def train_step(x):
    loss_of(x).backward()
    optimizer.step()
    optimizer.zero_grad()

def setup():
    own = Net(Config())
    return {"net": own, "optimizer": torch.optim.AdamW(own.parameters(), foreach=True)}

def train_once(made, x):
    made["net"](x).backward()
    made["optimizer"].step()
    made["optimizer"].zero_grad()

def make_batch(b):
    return torch.randn(b, 64)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(TEXT)
    return file


@pytest.mark.parametrize("target", ["train_step", pytest.param("build", marks=pytest.mark.thorough)])
def test_a_step_and_a_factory_need_as_much_as_their_module(script: Path, target: str) -> None:
    """The step is called by name with the batch that is found by itself; the factory takes what the script calls `args`."""

    def of(name: str) -> dict[str, object]:
        found = document(f"estimate {script}:{name} --micro-batch {ROWS} --gpu a100-sxm4-80gb")
        return {"memory": found["memory"]["parts"], "work": found["flops"]["hardware_per_step"]}  # type: ignore[index]

    own, plain = of(target), of("Net")
    assert own == plain


def test_what_a_maker_returns_is_trained_by_the_step_beside_it(script: Path) -> None:
    maker = function(f"{script}:setup")
    result = made(maker, "cpu")
    script.write_text(TEXT.replace("def train_step", "def ahead"))
    loop = looped(result, maker)
    assert isinstance(loop, OwnLoop)
    before = loop.net.net[0].weight.detach().clone()  # type: ignore[union-attr, index]
    assert sum(one.numel() for one in loop.parameters()) == 64 * 96 + 96 + 96 * 10 + 10
    loop.given = (maker.__globals__["train_once"], *loop.given[1:])
    loop.training_step(torch.ones(4, 64))
    assert not torch.equal(before, loop.net.net[0].weight)  # type: ignore[union-attr, index]

    def three(made: object, x: object, y: object, z: object) -> None: ...

    loop.given = (three, *loop.given[1:])
    with pytest.raises(ConfigError, match="three takes made, x, y, z, and the batch does not fit"):
        loop.training_step((torch.ones(4, 64), torch.ones(4)))


def test_a_step_knows_what_it_trains_through_the_functions_that_it_calls(script: Path) -> None:
    step = function(f"{script}:train_step")
    assert is_step(step)
    assert not is_step(function(f"{script}:build"))
    loop = looped(step, step)
    assert sorted(name for name, _ in loop.named_children()) == ["net"]
    assert [type(one) for one in loop.configure_optimizers()] == [torch.optim.AdamW]  # type: ignore[operator]


def test_what_is_needed_to_make_a_module_is_named(script: Path) -> None:
    assert settings(function(f"{script}:Net"))["cfg"].width == 96
    with pytest.raises(
        ConfigError, match=r"Bare needs width, depth: give them defaults, or name .*def model\(\): return Bare\("
    ):
        made(function(f"{script}:Bare"), "cpu")
    with pytest.raises(ConfigError, match="need a function train_step beside it"):
        looped([nn.Linear(2, 2), None], lambda: None)


def test_rates_read_off_a_line_and_weights_that_wait(script: Path) -> None:
    dropped = made(function(f"{script}:lined"), "meta")
    assert [block[1].p for block in dropped] == [0, 0.25, 0.5]
    assert {one.device.type for one in dropped.parameters()} == {"meta"}
    assert {one.device.type for one in made(function(f"{script}:empty"), "cpu").parameters()} == {"cpu"}


def test_the_only_function_of_batches_is_found(script: Path) -> None:
    assert check_script(f"{script}:Net", "") == f"{script}:make_batch"
