"""Random spaces, narrowed down by bounds: the best, their order and the front are those of a loop of single estimates."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import msgspec
import pytest

from loadgauge import training
from loadgauge.core.base.errors import NothingFits
from loadgauge.core.definitions.hardware.hardware import with_memory
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.plan.batch.best import SLOWEST
from loadgauge.core.plan.search import Case, search
from spaces import case, ends, every_layout

MODELS = (
    "gpt2", "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "deepseek-v2-lite", "gemma-3-27b", "qwen3-30b-a3b",
)  # fmt: skip
CARDS = ("h100-sxm5-80gb", "a100-sxm4-80gb", "h200-sxm-141gb", "b200-sxm-180gb")
POLICIES = ("none", "selective", "full", "full:every=2", "full:layers=2")
AXES = {
    "tp": (1, 2, 4), "pp": (1, 2, 4), "cp": (1, 2), "ep": (1, 2, 4), "etp": (1, 2), "vpp": (1, 2, 4), "zero": (0, 1, 2, 3),
    "replicas": (1, 2), "micro_batch": (1, 2, 4), "sequence_parallel": (False, True),
    "schedule": ("1f1b", "interleaved", "gpipe", "zb-h1", "dualpipe"), "recompute": tuple(map(RecomputePolicy.parse, POLICIES)),
}  # fmt: skip
MOST = 60
"""Layouts of a space, each of which the loop estimates alone."""


def layouts_of(given: Case) -> Iterator[Layout]:
    """The layouts that a search has: shards have whole replicas, and interleaved micro-batches come in groups of pp."""
    for layout in every_layout(given):
        groups = layout.schedule != "interleaved" or layout.num_microbatches % layout.pp == 0
        if layout.dp % layout.replicas == 0 and groups:
            yield layout


def drawn(seed: int) -> Case:
    """A space of a few layouts, on cards that hold some of them."""
    pick = random.Random(seed)
    while True:
        axes = {
            name: tuple(sorted(pick.sample(every, pick.choice((1, 1, 2, 3)[: len(every)])), key=every.index))
            for name, every in AXES.items()
        }
        name, framework = pick.choice(MODELS), pick.choice(("megatron", "megatron", "torchtitan", "deepspeed"))
        if name not in ("mixtral-8x7b", "deepseek-v2-lite", "qwen3-30b-a3b"):
            axes |= {"ep": (1,), "etp": (1,)}
        size = pick.choice((2, 4, 6, 8, 16, 24)), pick.choice((8, 16, 24, 64)), pick.choice((512, 2048, 8192))
        given = case(name, *size, kind=training(framework), card=pick.choice(CARDS), **axes)
        count = sum(1 for _ in itertools.islice(layouts_of(given), MOST + 1))
        if 1 < count <= MOST:
            break
    needs = sorted(high for _, high, _ in (ends(given, layout) for layout in layouts_of(given)))
    room = pick.choice((needs[0] * 0.9, needs[len(needs) // 3] * 1.01, needs[-1] * 1.01))
    card = with_memory(given.cluster.gpu, f"{max(room, 2.0**31) / 2**30:.6f}GiB")
    return msgspec.structs.replace(given, cluster=msgspec.structs.replace(given.cluster, gpu=card))


def same_as_the_loop(seed: int) -> bool:
    """Compare a search with the loop; returns whether something fits."""
    given = drawn(seed)
    room = given.cluster.gpu.capacity
    rows = [ends(given, layout) for layout in layouts_of(given)]
    # Sums of floats in another order differ in the last bits, so seconds are compared to eleven digits.
    rows = sorted((float(f"{step:.11g}"), memory, high) for memory, high, step in rows)
    sure = [(step, memory) for step, memory, high in rows if memory <= room and high <= room]
    tight = [(step, memory) for step, memory, high in rows if memory <= room < high]
    try:
        result = search([given], top=15)
    except NothingFits:
        assert sure == tight == []
        return False
    expected = sure or tight
    assert result.valid == len(rows)
    alone = search([given], top=15, front=False)
    assert [each.layout for each in alone.layouts] == [each.layout for each in result.layouts]
    assert len(alone.pareto) == 0
    steps = [each.time.step for each in result.layouts if each.time]
    assert steps == pytest.approx([step for step, _ in expected[: len(steps)]], rel=1e-9)
    assert len(steps) == min(15, len(expected))
    front: list[tuple[float, float]] = []
    for step, memory in expected:
        if (not front or memory < front[-1][1] * (1 - 1e-9)) and step <= SLOWEST * expected[0][0]:
            front.append((step, memory))
    shown = [(each.time.step, each.memory.total) for each in result.pareto if each.time]
    # Of equal seconds, to these digits, the one that takes less.
    later = [*(step for step, _ in shown[1:]), math.inf]
    shown = [row for row, after in zip(shown, later, strict=True) if after > row[0] * (1 + 1e-9)]
    assert shown == [pytest.approx(row, rel=1e-9) for row in front]
    return True


@pytest.mark.parametrize(
    "first", [pytest.param(0, id="0"), *(pytest.param(n, marks=pytest.mark.thorough) for n in range(10, 300, 10))]
)
def test_the_answer_is_that_of_a_loop_of_estimates(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten spaces at a time: all are narrowed down, and combinations that look good are tried before."""
    monkeypatch.setattr("loadgauge.core.plan.space.space.SMALL", 0)
    monkeypatch.setattr("loadgauge.core.plan.batch.evaluate.FEW", 0)
    fitting = sum(same_as_the_loop(seed) for seed in range(first, first + 10))
    assert fitting >= 3
