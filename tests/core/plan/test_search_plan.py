"""The plan is what a loop over single estimates finds: the same best, the same order, the same front."""

from __future__ import annotations

import functools

import msgspec
import numpy as np
import pytest

from loadgauge import NothingFits
from loadgauge.core.base.errors import LayoutError
from loadgauge.core.definitions.hardware.hardware import with_memory
from loadgauge.core.plan import inverse as questions
from loadgauge.core.plan.batch.best import SLOWEST, Best
from loadgauge.core.plan.reopen import reopen
from loadgauge.core.plan.request import PlanRequest, cases
from loadgauge.core.plan.search import OBJECTIVES, carried, search
from spaces import alone, case, ends, every_layout

SMALL = {
    "dense": case("llama-3.1-8b", 8, 8, pp=(1, 2), cp=(1, 2), schedule=("1f1b",), vpp=(1,), replicas=(1, 2)),
    "experts": case(
        "deepseek-v2-lite", 8, 8, pp=(1, 4), cp=(1,), tp=(1, 2), etp=(1,), vpp=(1, 2), schedule=("1f1b", "interleaved"),
        replicas=(1,), zero=(1, 3),
    ),
}  # fmt: skip


@functools.cache
def brute_force(name: str) -> list[tuple[float, float]]:
    """Time and memory of every layout that fits, the best first, by a plain loop."""
    return sorted((step, memory) for memory, high, step in loop(name) if high <= SMALL[name].cluster.gpu.capacity)


@functools.cache
def loop(name: str) -> list[tuple[float, float, float]]:
    """Memory, its upper end and time of every layout."""
    return [ends(SMALL[name], layout) for layout in every_layout(SMALL[name])]


@pytest.mark.parametrize("name", SMALL)
def test_order_and_front_are_those_of_a_plain_loop(name: str) -> None:
    given = SMALL[name]
    expected = brute_force(name)
    found = search([given], top=100)
    assert found.fitting == len(expected)
    for result, (step, _) in zip(found.layouts, expected, strict=False):
        assert result.time is not None
        assert result.time.step == pytest.approx(step, rel=1e-12)
    front = []
    for step, memory in expected:
        if not front or memory < front[-1][1]:
            front.append((step, memory))
    shown = [(result.time.step, result.memory.total) for result in found.pareto if result.time is not None]
    assert [memory for _, memory in shown] == pytest.approx([memory for _, memory in front])
    assert [step for step, _ in shown] == pytest.approx([step for step, _ in front])


@pytest.mark.parametrize("name", SMALL)
def test_a_tight_layout_is_offered_where_it_is_faster(name: str) -> None:
    given, room = SMALL[name], SMALL[name].cluster.gpu.capacity
    tight = [step for memory, high, step in loop(name) if memory <= room < high]
    fastest = brute_force(name)[0][0]
    # A margin on what is predicted leaves fewer tight layouts, and at last none.
    for margin in (0.0, 10 * 2.0**30, room - max(memory for _, memory in brute_force(name))):
        found = search([given], margin=margin)
        assert found.layouts[0].memory.verdict == "fits"
        left = [step for memory, high, step in loop(name) if memory <= room - margin and high > room]
        if min(left, default=fastest) >= fastest:
            assert found.tighter is None
            continue
        assert found.tighter is not None
        assert found.tighter.time is not None
        assert found.tighter.memory.verdict == "tight"
        assert found.tighter.time.step == pytest.approx(min(left), rel=1e-12)
    assert tight


@pytest.mark.long
def test_where_nothing_fits_for_sure_the_tight_ones_are_ranked() -> None:
    given = SMALL["dense"]
    least = min(loop("dense"))[0] / 2**30
    card = with_memory(given.cluster.gpu, f"{1.02 * least * 80 / 79.2:.3f}GiB")
    small = msgspec.structs.replace(given, cluster=msgspec.structs.replace(given.cluster, gpu=card))
    room = small.cluster.gpu.capacity
    rows = [ends(small, layout) for layout in every_layout(small)]
    assert not [high for _, high, _ in rows if high <= room]
    expected = sorted(step for memory, _, step in rows if memory <= room)
    found = search([small], top=100)
    assert {result.memory.verdict for result in found.layouts} == {"tight"}
    assert found.tighter is None
    assert [result.time.step for result in found.layouts if result.time] == pytest.approx(
        expected[: len(found.layouts)]
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_layout_does_better_by_the_objective(objective: str) -> None:
    given = SMALL["dense"]
    best = search([given], objective=objective).layouts[0]  # type: ignore[arg-type]
    expected = brute_force("dense")
    assert best.time is not None
    if objective == "network":
        assert carried(best) == 0  # one node
    elif objective == "headroom":
        assert best.memory.total == min(memory for _, memory in expected)
    else:
        assert best.time.step == pytest.approx(expected[0][0], rel=1e-12)


@pytest.mark.parametrize(("name", "objective"), [*(("dense", one) for one in OBJECTIVES), ("experts", OBJECTIVES[0])])
def test_schedules_that_are_not_played_change_nothing(name: str, objective: str) -> None:
    given = SMALL[name]
    quick, whole = (search([given], objective=objective, top=15, exhaustive=flag) for flag in (False, True))  # type: ignore[arg-type]
    assert [result.layout for result in quick.layouts] == [result.layout for result in whole.layouts]
    assert [result.layout for result in quick.pareto] == [result.layout for result in whole.pareto]
    assert (quick.valid, quick.fitting) == (whole.valid, whole.fitting)


@pytest.mark.parametrize(
    ("name", "gpus", "batch", "margin"), [("llama-3.1-70b", 128, 128, 0), ("mixtral-8x22b", 64, 128, 20 * 2**30)]
)
@pytest.mark.long
def test_most_schedules_are_not_played_and_the_answer_is_the_same(
    name: str, gpus: int, batch: int, margin: int
) -> None:
    given = case(name, gpus, batch, pp=(2, 4, 8), etp=(1,), schedule=("1f1b", "interleaved", "zb-h1"), vpp=(1, 2, 4))
    quick, whole = (search([given], margin=margin, top=100, exhaustive=flag) for flag in (False, True))
    assert whole.bounded == 0
    assert quick.bounded > quick.valid / 2
    for some, every in ((quick.layouts, whole.layouts), (quick.pareto, whole.pareto)):
        found, expected = ([(one.time.step, one.memory.total) for one in rows if one.time] for rows in (some, every))
        if every is whole.pareto:  # a space that is narrowed down has no front of layouts that take very long
            expected = [row for row in expected if row[0] <= SLOWEST * expected[0][0]]
        assert found == expected
    assert (quick.valid, quick.fitting, quick.evaluated) == (whole.valid, whole.fitting, whole.evaluated)


def test_the_best_of_many_are_those_of_all_sorted() -> None:
    given = case("llama-3.1-70b", 128, 128, pp=(2, 4, 8), schedule=("1f1b", "interleaved"), vpp=(1, 2, 4))
    limit, count = given.cluster.gpu.capacity, 100
    best = Best(count)
    for batch in given.evaluator().batches(None, best.wanted(0, lambda step, memory: step, limit, limit)):
        best.add(0, batch, batch.step, limit, limit)
    best.sure.trim()
    batches = list(given.evaluator().batches())
    steps = np.sort(np.concatenate([batch.step[batch.high <= limit] for batch in batches]))
    assert [row.step for row in best.sure.rows] == steps[:count].tolist()
    tight = np.concatenate([batch.step[(batch.memory <= limit) & (batch.high > limit)] for batch in batches])
    assert min(row.step for row in best.tight.rows) == tight.min()


@pytest.mark.long
def test_the_least_need_of_network_is_that_of_a_plain_loop_over_quick_layouts() -> None:
    given = case(
        "llama-3.1-8b", 16, 32, tp=(1, 2, 4), cp=(1, 2), schedule=("1f1b",), vpp=(1,), replicas=(1,), zero=(0, 1, 2, 3)
    )
    found = search([given], objective="network", top=5)
    rows = [given.estimate(layout) for layout in every_layout(given)]
    seconds = {id(result): result.time.step for result in rows if result.time is not None and result.memory.fits}
    quick = [result for result in rows if seconds.get(id(result), float("inf")) <= 1.05 * min(seconds.values())]
    sent = sorted(
        sum(row.adapter * row.calls_per_step for row in result.network) / seconds[id(result)] for result in quick
    )
    assert len(sent) > 5
    assert sent[0] < 0.9 * sent[-1]
    assert [carried(result) for result in found.layouts] == pytest.approx(sent[:5], rel=1e-12)


def test_a_margin_is_left_free() -> None:
    given = SMALL["dense"]
    fastest = search([given]).layouts[0].memory.total
    margin = given.cluster.gpu.capacity - fastest + 1
    found = search([given], margin=margin)
    assert all(result.memory.total <= given.cluster.gpu.capacity - margin for result in (*found.layouts, *found.pareto))


def test_a_lock_is_kept_and_costs_time() -> None:
    free = search([SMALL["dense"]]).layouts[0]
    locked = search([questions.with_space(SMALL["dense"], tp=(8,))]).layouts[0]
    assert locked.layout.tp == 8
    assert locked.time is not None
    assert free.time is not None
    assert locked.time.step >= free.time.step


def test_the_nearest_miss_is_the_layout_that_needs_least() -> None:
    given = case("llama-3.1-70b", 1, 4, card="rtx4090")
    with pytest.raises(NothingFits) as caught:
        search([given])
    least = min(alone(given, layout)[0] for layout in every_layout(given))
    assert caught.value.missing == pytest.approx(least - given.cluster.gpu.capacity)


def test_what_cannot_exist_is_said_with_its_reason() -> None:
    with pytest.raises(LayoutError, match="attention heads"):
        search([questions.with_space(SMALL["dense"], tp=(3,))])


def test_the_longest_sequence_fits_and_a_longer_one_does_not() -> None:
    given = case("llama-3.1-8b", 1, 1, schedule=("1f1b",), zero=(0,), card="b300-sxm-288gb")
    answer = questions.largest_sequence(given)
    assert answer.best.memory.verdict == "fits"
    more = answer.value + max(1, answer.value // 1024 // 64) * questions.STEP
    longer = questions.best_of(questions.with_space(given, seq_len=more), "time", 0)
    assert longer is None or longer.memory.verdict == "tight"


def test_fewer_gpus_do_not_hold_it() -> None:
    given = SMALL["dense"]
    answer = questions.fewest_gpus(given)
    smaller = [size for size in questions.sizes(8, 8) if size < answer.value]
    assert smaller
    tries = [questions.best_of(reopen(given, gpus=size), "time", 0) for size in smaller]
    assert all(best is None or best.memory.verdict == "tight" for best in tries)
    tight = [size for size, best in zip(smaller, tries, strict=True) if best is not None]
    assert (f"on {tight[0]} it is TIGHT" if tight else "") in answer.text


def test_a_batch_that_is_said_is_kept_and_one_that_is_not_is_told() -> None:
    """Neither the most GPUs that are tried nor ranks without tp, pp and cp round it."""
    asked = {"gpu": "h100-sxm5-80gb", "seq_len": "8192", "find": "gpus"}
    for batch in ("100", "64"):
        _, cases_of = cases(PlanRequest.of("llama-3.1-8b", asked | {"global_batch": batch}))
        assert questions.fewest_gpus(cases_of[-1]).best.layout.global_batch == int(batch)
    _, cases_of = cases(PlanRequest.of("llama-3.1-8b", asked))
    told = questions.fewest_gpus(cases_of[-1], any_batch=True)
    assert f"a global batch of {told.best.layout.global_batch:,}, as none is said" in told.text
    few = {"gpu": "h100-sxm5-80gb", "gpus": "64", "global_batch": "16"}
    assert cases(PlanRequest.of("llama-3.1-8b", few))[1][0].space.global_batch == 16


def test_one_gpu_is_asked_for_the_largest_batch() -> None:
    given = case("llama-3.2-1b", 1, 1)
    answer = questions.smallest_batch(given, 0.1)
    assert answer.value == questions.largest_micro_batch(given).value > 1
