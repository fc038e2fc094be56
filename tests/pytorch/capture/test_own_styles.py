"""Modules and steps of one's own in the styles in which people write them, whose bytes the other road or plain arithmetic knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command_line import document

WIDTH, ROWS = 256, 8
TEXT = f"""
import torch
from torch import nn
from torch.nn import functional as F

net = nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.Tanh(), nn.Linear({WIDTH}, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.1)

def made_before():
    return net

def rows(b):
    return torch.randn(b, {WIDTH})

def its_step(net, x):
    net(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def several():
    first, second = nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, 1)
    return first, second, torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)

def of_several(first, second, optimizer, x):
    second(torch.tanh(first(x))).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()

class Agent:
    def __init__(self):
        self.actor, self.critic, self.optimizer = several()

def of_agent(agent, x):
    of_several(agent.actor, agent.critic, agent.optimizer, x)

class Next(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(512, 64), nn.Linear(64, 512)
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])

    def forward(self, ids):
        x = self.layers(self.embed(ids[:, :-1]))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())

def ids(b, s):
    return torch.randint(0, 512, (b, s))

class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn({WIDTH}, {WIDTH // 2 + 1}, dtype=torch.cfloat))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight[: x.shape[0]]).pow(2).mean()

class Trained(nn.Linear):
    def __init__(self):
        super().__init__({WIDTH}, 4)

    def training_step(self, batch, number):
        x, y = batch
        self.log("rate", self._trainer.optimizers[0].param_groups[0]["lr"])
        torch.bincount(y, minlength=9)
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        steps = self._trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]

def labelled(b):
    return rows(b), torch.randint(0, 4, (b,))

class Graph(nn.Linear):
    def __init__(self):
        super().__init__({WIDTH}, 4)

    def forward(self, nodes, edges):
        return torch.zeros(len(nodes), 4).index_add_(0, edges[0], super().forward(nodes)[edges[1]])

def graph(nodes=300, edges=2000):
    return torch.randn(nodes, {WIDTH}), torch.randint(0, nodes, (2, edges))

class Tokens(nn.Embedding):
    def __init__(self):
        super().__init__(512, 4)

    def forward(self, text, lengths):
        return super().forward(text).sum(1)

def pairs(b, s):
    return (ids(b, s), torch.full((b,), s)), torch.randint(0, 4, (b,))

class Cells(nn.Linear):
    def __init__(self):
        super().__init__({WIDTH}, 4)

    def forward(self, x, objects):
        out = super().forward(x)
        return F.mse_loss(out[objects == 1], out[objects == 1].detach()) + out[objects == 0].mean()

def cells(b):
    return rows(b), torch.zeros(b)
"""
SEQUENCE = 48


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("styles") / "styles.py"
    place.write_text(TEXT)
    return place


def said(script: Path, command: str, target: str, inputs: str, more: str = "") -> dict[str, Any]:
    length = f"--seq-len {SEQUENCE}" if inputs in ("ids", "pairs") else ""
    batch = "" if inputs == "graph" else f"--micro-batch {ROWS}"
    return document(f"{command} {script}:{target} --inputs {script}:{inputs} {batch} {length} --json {more}")


def tensors(result: dict[str, Any]) -> float:
    """Bytes at the peak beside what lies outside of PyTorch's tensors."""
    return result["memory"]["total"] - result["memory"]["parts"]["outside"]


@pytest.mark.parametrize(
    ("target", "step"), [("made_before", "its_step"), ("several", "of_several"), ("Agent", "of_agent")]
)
def test_a_step_gets_what_was_made_as_it_asks_for_it(script: Path, target: str, step: str) -> None:
    result = said(script, "capture", target, "rows", f"--step {script}:{step}")
    weights = 4 * (WIDTH * WIDTH + WIDTH + WIDTH + 1)
    assert 2 * weights < result["peak"] < 2.1 * weights
    assert result["parameters"] == weights / 4


@pytest.mark.parametrize(
    ("target", "inputs"),
    [("Next", "ids"), ("Waves", "rows"), ("Trained", "labelled"), ("Graph", "graph"), ("Tokens", "pairs"), ("Cells", "cells")],
)  # fmt: skip
def test_an_estimate_has_the_peak_of_the_run(script: Path, target: str, inputs: str) -> None:
    """Also of sizes such as s - 1, whose formulas begin with what is taken off."""
    way = "" if target == "Trained" else "--optimizer adamw-foreach"
    estimated, captured = said(script, "estimate", target, inputs, way), said(script, "capture", target, inputs, way)
    assert tensors(estimated) == pytest.approx(captured["peak"], rel=0.005)


def test_complex_weights_are_two_numbers_each(script: Path) -> None:
    parts = said(script, "estimate", "Waves", "rows")["memory"]["largest"]
    numbers = 2 * WIDTH * (WIDTH // 2 + 1)
    assert [parts[part]["bytes"] for part in ("weights", "gradients", "optimizer")] == [
        4 * numbers,
        4 * numbers,
        8 * numbers,
    ]


def test_a_lightning_module_has_the_optimizer_that_it_configures(script: Path) -> None:
    result = said(script, "estimate", "Trained", "labelled")
    assert result["training"]["optimizer"] == "sgd-momentum"
    assert result["memory"]["largest"]["optimizer"]["bytes"] == 4 * (WIDTH * 4 + 4)
    assert (
        said(script, "estimate", "Trained", "labelled", "--optimizer adamw")["training"]["optimizer"] == "adamw-foreach"
    )


def test_what_is_taken_for_granted_is_said(script: Path) -> None:
    taken = {target: said(script, "estimate", target, inputs)["assumed"]["model"]
             for target, inputs in (("Graph", "graph"), ("Trained", "labelled"))}  # fmt: skip
    assert "makes one batch, whatever --micro-batch is" in taken["Graph"]
    assert "lies on the card" in taken["Graph"]
    assert "what is counted lies below 9" in taken["Trained"]
