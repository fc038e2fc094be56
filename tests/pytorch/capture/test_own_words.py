"""Modules of one's own: what a card's name, a batch, a mask, formats side by side and samples mean in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command_line import document, typed

WIDTH, ROWS, RANK = 512, 64, 8
TEXT = f"""
import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
net = nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.Tanh(), nn.Linear({WIDTH}, 4)).to(device)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
scaler = torch.amp.GradScaler("cuda")

def its_own(x, y):
    with torch.autocast("cuda", torch.float16):
        loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

def on_card():
    return nn.Linear({WIDTH}, 4).cuda()

labelled = lambda b: (torch.randn(b, {WIDTH}, device="cuda"), torch.randint(0, 4, (b,)).to(device))
batch = labelled

class Masked(nn.Linear):
    def forward(self, x, attn_mask=None):
        return super().forward(x) if attn_mask is None else super().forward(x) * attn_mask

def masked():
    return Masked({WIDTH}, 4)

class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        layers = [nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range(4)]
        self.base = nn.Sequential(*layers).to(base).requires_grad_(False)
        self.down, self.up = nn.Linear({WIDTH}, {RANK}, bias=False), nn.Linear({RANK}, {WIDTH}, bias=False)

    def forward(self, x):
        return (self.base(x.to(self.base[0].weight.dtype)).float() + self.up(self.down(x))).pow(2).mean()

def narrow():
    return Adapted(torch.bfloat16)

def wide():
    return Adapted(torch.float32)

def rows(n_rays=16):
    return torch.randn(n_rays, {WIDTH})

def graph(nodes=300):
    return torch.randn(nodes, {WIDTH})

def pictures():
    return nn.Sequential(*[nn.Conv2d(64, 64, 3, padding=1) for _ in range(4)])

def of_pictures(b):
    return torch.randn(b, 64, 64, 64)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("words") / "own_words.py"
    place.write_text(TEXT)
    return place


def line(script: Path, command: str, target: str, more: str = "", rows: int = ROWS) -> str:
    return f"{command} {script}:{target} --gpu a100-sxm4-80gb --micro-batch {rows} {more}"


def said(script: Path, target: str, inputs: str = "", more: str = "", rows: int = ROWS) -> dict[str, Any]:
    where = f"--inputs {script}:{inputs}" if inputs else ""
    return document(line(script, "estimate", target, f"{where} {more}", rows))


def test_what_a_script_puts_on_its_card_lies_on_the_card(script: Path) -> None:
    """A step may take its batch alone, and train what the script made; what is compiled for no card runs all the same."""
    weights = 4 * (WIDTH * WIDTH + WIDTH + WIDTH * 4 + 4)
    step = document(line(script, "capture", "net", f"--step {script}:its_own"))
    assert step["parameters"] == weights / 4
    assert 2.4 * weights < step["peak"] < 3 * weights  # weights, their gradients, and those in 16 bits
    for target in ("net", "on_card"):
        assert "the cross entropy" in said(script, target)["assumed"]["model"]


def test_labels_are_no_mask(script: Path) -> None:
    assert "the cross entropy" in said(script, "masked")["assumed"]["model"]


def test_a_frozen_base_in_16_bits_beside_adapters_in_float32(script: Path) -> None:
    narrow, wide = (said(script, target, "rows", rows=4096) for target in ("narrow", "wide"))
    base, adapters = 4 * WIDTH * WIDTH, 2 * RANK * WIDTH
    largest = {part: narrow["memory"]["largest"][part]["bytes"] for part in ("weights", "gradients", "optimizer")}
    assert largest == {"weights": 2 * base + 4 * adapters, "gradients": 4 * adapters, "optimizer": 8 * adapters}
    asked = said(script, "narrow", "rows", "--precision bf16", rows=4096)["memory"]["largest"]
    assert asked["weights"]["bytes"] == largest["weights"]
    assert wide["memory"]["largest"]["weights"]["bytes"] == 4 * (base + adapters)
    assert narrow["time"]["parts"]["forward"] < 0.5 * wide["time"]["parts"]["forward"]  # 312 TFLOP/s in place of 19.5


def test_one_sample_has_its_own_bytes_and_time(script: Path) -> None:
    """Whatever was asked for before it."""
    several, alone = said(script, "pictures", "of_pictures", rows=32), said(script, "pictures", "of_pictures", rows=1)
    kept = [result["memory"]["largest"]["activations"]["bytes"] for result in (several, alone)]
    assert kept[0] == pytest.approx(32 * kept[1], rel=0.01)
    assert alone["time"]["step"] < 0.5 * several["time"]["step"]


def test_convolutions_in_float32_are_measured_by_what_runs_them(script: Path) -> None:
    time = said(script, "pictures", "of_pictures", rows=64)["time"]
    assert time["mfu"] == pytest.approx(time["model_tflops_per_gpu"] / 156, rel=1e-3)  # TF32, as cuDNN runs them
    linear = said(script, "wide", "rows", rows=4096)["time"]
    assert linear["mfu"] == pytest.approx(linear["model_tflops_per_gpu"] / 19.5, rel=1e-3)


def test_samples_have_a_word_and_a_number(script: Path) -> None:
    text = typed(line(script, "estimate", "pictures", f"--inputs {script}:of_pictures", rows=64)).out
    assert "A step of 64 images" in text
    assert "images: 64; micro-batches" in text
    rays = [said(script, "wide", "rows", rows=rows)["flops"]["model_per_step"] for rows in (16, 64)]
    assert rays[1] == 4 * rays[0]
    assert "makes one batch" in typed(line(script, "estimate", "wide", f"--inputs {script}:graph")).err
