"""The array reading is the reading of whole numbers: the same layouts, bytes and seconds, one by one."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from loadgauge import training
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.plan.batch.bounds import Filling
from loadgauge.core.plan.batch.classes import key_of
from loadgauge.core.plan.batch.step_time import Step, finish
from loadgauge.core.plan.batch.types import untimed
from spaces import CASES, POLICIES, alone, case, ends, every_layout, read, some


@functools.cache
def read_of(name: str) -> dict[Layout, tuple[float, float]]:
    return read(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_the_layouts_are_those_that_are_valid_one_by_one(name: str) -> None:
    assert set(read_of(name)) == set(every_layout(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_memory_and_time_are_those_of_each_alone(name: str) -> None:
    given = CASES[name]
    found = read_of(name)
    upper = {
        batch.grid.layout(batch.structure, int(place)): high
        for batch in given.batches(None, untimed)
        for place, high in zip(batch.places, batch.high, strict=True)
    }
    for layout in some(list(found), 40):
        memory, high, step = ends(given, layout)
        assert found[layout][0] == pytest.approx(memory, abs=0.5), layout
        assert found[layout][1] == pytest.approx(step, rel=1e-9), layout
        assert upper[layout] == pytest.approx(high, abs=0.5), layout


def test_a_grid_cut_in_pieces_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = case("llama-3.1-8b", 4, 8, schedule=("1f1b", "zb-h1"))
    whole = read(given)
    monkeypatch.setattr("loadgauge.core.plan.space.space.ELEMENTS", 7)
    assert read(given) == whole


def test_every_axis_is_walked() -> None:
    found = list(read_of("experts"))
    for axis in (
        "dp",
        "tp",
        "pp",
        "cp",
        "ep",
        "etp",
        "vpp",
        "zero",
        "replicas",
        "micro_batch",
        "recompute",
        "schedule",
    ):
        assert len({getattr(layout, axis) for layout in found}) > 1, axis
    assert isinstance(found[0], Layout)


@pytest.mark.parametrize("name", CASES)
def test_no_step_takes_less_than_the_least(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = CASES[name]
    bounds: list[np.ndarray] = []
    whole = Step.batch
    monkeypatch.setattr(Step, "batch", lambda step: bounds.append(step.least) or whole(step))
    batches = list(given.evaluator().batches())
    assert len(bounds) == len(batches)
    for batch, least in zip(batches, bounds, strict=True):
        assert (least <= batch.step).all()
    # It is worth something: half of the layouts take at most a twentieth more.
    over = np.concatenate([batch.step / least for batch, least in zip(batches, bounds, strict=True)])
    assert np.median(over) < 1.05


@pytest.mark.parametrize(("schedule", "split"), [("gpipe", (8, 4)), ("1f1b", (7, 5))])
def test_stages_that_are_slow_in_other_ways_are_read_as_each_alone(schedule: str, split: tuple[int, int]) -> None:
    """(8, 4): with recomputation one stage is slower backward, one forward; (7, 5): which is slower depends on tp."""
    given = case("gpt2", 4, 64, 1024, pp=(2,), schedule=(schedule,), vpp=(1,), stage_layers=split)
    found = read(given)
    assert len(found) > 100
    for layout, both in found.items():
        assert both == pytest.approx(alone(given, layout), rel=1e-9), layout


def test_gradients_that_are_added_up_are_told_apart_for_each_number_of_stages() -> None:
    """Where four stages run two micro-batches and add up their gradients, two stages run one."""
    axes = {"schedule": ("1f1b",), "vpp": (1,), "zero": (0, 1), "pp": (2, 4), "tp": (1,), "recompute": POLICIES[:1]}
    given = case("llama-3.1-8b", 8, 8, kind=training("huggingface"), **axes)
    for layout, both in read(given).items():
        assert both == pytest.approx(alone(given, layout), rel=1e-9), layout


@pytest.mark.parametrize("name", [*CASES, "parts of layers again"])
def test_no_layout_needs_less_than_the_bounds_of_its_class(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ruled out, and what is narrowed down to has the layouts, bytes and seconds of all."""
    again = tuple(map(RecomputePolicy.parse, ("full:every=2", "full:layers=1")))
    given = CASES.get(name) or case("deepseek-v2-lite", 4, 8, recompute=again, schedule=("1f1b", "interleaved"))
    if given.space.lengths is not None:
        return
    monkeypatch.setattr("loadgauge.core.plan.space.space.SMALL", 0)
    everything = lambda low, least: np.ones(len(low), dtype=bool)  # noqa: E731
    evaluator, over, seen = given.evaluator(), [[], []], {}
    families = evaluator.families()
    for part, spread, classes in evaluator.narrowed(families, everything, None):
        assert classes is not None
        for pp, pipelines in families[spread].items():
            part.start(pp)
            for structures in pipelines.values():
                with np.errstate(all="ignore"):
                    some = part.evaluate(structures, None, everything, classes)
                for batch in finish([one for one in some if isinstance(one, Step)], None):
                    bounds = classes.of[key_of(batch.structure)]
                    order = np.searchsorted(bounds.rows, batch.places // part.grid.dims[2])
                    low, least = bounds.low, bounds.least
                    pipeline = batch.structure.pp, batch.structure.vpp, batch.structure.schedule
                    every = part.whole.stages(*pipeline, batch.structure.stage_layers)
                    if filling := Filling.of(every, batch.structure.schedule, classes.blocks):
                        more = filling.nbytes(bounds.batches, batch.structure.pp, bounds.kept)
                        low = bounds.with_first(more, given.cluster.gpu.capacity)
                        least = np.maximum(least, filling.seconds(bounds.batches, bounds.layers, bounds.head))
                    assert (low[order] <= batch.memory).all(), batch.structure
                    assert (least[order] <= batch.step).all(), batch.structure
                    over[0].append(batch.memory / low[order])
                    over[1].append(batch.step / least[order])
                    for place, memory, step in zip(batch.places, batch.memory, batch.step, strict=True):
                        seen[batch.grid.layout(batch.structure, int(place))] = float(memory), float(step)
    assert seen == (read_of(name) if name in CASES else read(given))
    assert np.median(np.concatenate(over[0])) < 2
    if "two directions" not in name:  # schedules with an order of their own have looser bounds of time
        assert np.median(np.concatenate(over[1])) < 1.5
