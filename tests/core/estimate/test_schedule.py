"""Pipeline schedules against what papers print, what PyTorch runs, and what can be worked out by hand."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import msgspec
import numpy
import pytest
import sympy

from loadgauge.core.base.errors import LayoutError, NotModelled
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.estimate.schedule.simulate import (  # fmt: skip
    SCHEDULES,
    Event,
    order_of_work,
    run,
    simulate,
)
from loadgauge.core.estimate.schedule.stages import stages as stages_of
from loadgauge.core.resolve.resolve import resolve_job
from orders import check_order, longest_stage, most_in_flight
from pipeline_forms import closed_form, closed_form_holds

EQUAL = {"forward": 2, "backward": 2, "weight": 2}
NAMES = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "BW"}


def torch_orders(name: str, stages: int, batches: int, chunks: int) -> list[list[tuple[str, int, int]]]:
    """PyTorch's own order for every rank: (kind, micro-batch, chunk), without its empty slots."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    made = object.__new__(getattr(schedules, name))  # the order needs sizes only, not a process group
    made.pp_group_size, made.n_local_stages, made._n_microbatches = stages, chunks, batches
    made._num_stages = made.num_stages = stages * chunks
    made.microbatches_per_round = batches // max(1, batches // stages)
    single = hasattr(made, "_get_pipeline_order")
    found = made._get_pipeline_order() if single else None
    orders = []
    for rank in range(stages):
        actions = found[rank] if found else made._calculate_single_rank_operations(rank)
        flat = [part for action in actions if action for part in (action.sub_actions or (action,))]
        kinds = [(NAMES.get(part.computation_type.name), part.microbatch_index, part.stage_index) for part in flat]
        orders.append([(kind, batch, stage // stages) for kind, batch, stage in kinds if kind])
    return orders


@pytest.mark.parametrize(
    ("schedule", "name", "chunks", "sizes"),
    [
        ("gpipe", "ScheduleGPipe", 1, [(1, 1), (4, 3), (3, 8)]),
        ("1f1b", "Schedule1F1B", 1, [(4, 8), (5, 5), (8, 20)]),
        ("interleaved", "ScheduleInterleaved1F1B", 2, [(2, 2), (4, 4), (4, 12), (4, 10), (8, 18)]),
        ("interleaved", "ScheduleInterleaved1F1B", 3, [(2, 6), (5, 10)]),
        ("zb-h1", "ScheduleInterleavedZeroBubble", 1, [(2, 2), (4, 8), (8, 17)]),
        ("zb-v", "ScheduleZBVZeroBubble", 2, [(1, 1), (4, 2), (4, 7), (4, 12), (6, 30)]),
        ("dualpipev", "ScheduleDualPipeV", 2, [(1, 2), (2, 4), (4, 10), (5, 10), (6, 31)]),
    ],
)
def test_orders_are_those_that_pytorch_runs(
    schedule: str, name: str, chunks: int, sizes: list[tuple[int, int]]
) -> None:
    for stages, batches in sizes:
        order = order_of_work(schedule, stages, batches, chunks)
        for stage, theirs in enumerate(torch_orders(name, stages, batches, chunks)):
            if schedule == "1f1b" and stage == stages - 1:
                continue  # PyTorch's listing (not its run) numbers the last rank's forwards from 1
            assert [(work.kind, work.microbatch, work.chunk) for work in order.work(stage)] == theirs


@pytest.mark.parametrize("stages", [2, 4, 6, 10])
def test_dualpipe_is_dualpipev_unfolded_and_its_two_halves_mirror_each_other(stages: int) -> None:
    batches = 4 * stages
    both = order_of_work("dualpipe", stages, batches)
    half = order_of_work("dualpipev", stages // 2, batches // 2)
    for stage in range(stages):
        mirror = both.work(stages - 1 - stage)
        for mine, other in zip(both.work(stage), mirror, strict=True):
            assert (mine.kind, mine.paired, mine.chunk) == (other.kind, other.paired, 1 - other.chunk)
            assert mine.microbatch % (batches // 2) == other.microbatch % (batches // 2)
    for stage in range(stages // 2):
        unfolded = [(work.kind, work.microbatch % (batches // 2), work.chunk) for work in both.work(stage)]
        assert unfolded == [(work.kind, work.microbatch, work.chunk) for work in half.work(stage)]


def test_interleaved_order_of_megatron_by_hand() -> None:
    """Figure 4 of narayanan2021 (4 stages, 8 micro-batches, 2 chunks): the first device."""
    work = order_of_work("interleaved", 4, 8, 2).work(0)
    warmup = [(each.microbatch, each.chunk) for each in work[:10]]
    assert {each.kind for each in work[:11]} == {"F"}
    assert warmup == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1), (4, 0), (5, 0)]
    assert [(each.microbatch, each.chunk) for each in work if each.kind == "BW"][:5] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 1),
        (0, 0),
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("batches", [1, 3, 8, 24])
def test_activations_in_flight_are_those_of_the_layout(stages: int, batches: int) -> None:
    for schedule, chunks in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3)):
        if schedule == "interleaved" and (stages == 1 or batches % stages):
            continue
        layout = Layout(pp=stages, vpp=chunks, global_batch=batches, schedule=schedule, seq_len=1)
        expected = tuple(layout.in_flight(stage) for stage in range(stages))
        assert most_in_flight(order_of_work(schedule, stages, batches, chunks)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_activations_in_flight_are_those_that_papers_print(stages: int) -> None:
    batches = 4 * stages

    def peaks(schedule: str, kept: Any = 1) -> tuple[Any, ...]:
        return most_in_flight(order_of_work(schedule, stages, batches), kept=kept)

    kept = Fraction(2, 5)  # M_W / M_B
    h1 = tuple(
        (stages - stage) + stage * kept for stage in range(stages)
    )  # qi2024, section 2.3, devices counted from 1
    h2 = tuple((2 * stages - 2 * stage - 1) + 2 * stage * kept for stage in range(stages))
    assert peaks("zb-h1", kept) == h1
    assert peaks("zb-2p", kept) == h2
    assert (max(peaks("zb-h1")), max(peaks("zb-2p"))) == (stages, 2 * stages - 1)  # table 2
    assert peaks("zb-v") == (stages,) * stages  # section 6: p M_B
    assert peaks("dualpipe") == (stages + 1,) * stages  # deepseek2024, table 2: PP + 1
    assert 2 * max(peaks("dualpipev")) == 2 * stages + 1  # dualpipe: PP + 1, of 2p stages


def test_activations_weigh_what_each_chunk_weighs() -> None:
    order = order_of_work("interleaved", 2, 4, 2)
    assert most_in_flight(order, [[1, 1], [1, 1]]) == (5, 3)
    assert most_in_flight(order, [[10, 1], [1, 10]]) == (41, 12)  # 4 of chunk 0 and 1 of chunk 1; then 2 and 1


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize(("f", "b", "w"), [(6, 6, 6), (6, 6, 4), (8, 6, 2), (4, 10, 4)])
def test_bubbles_are_those_that_papers_print(stages: int, f: int, b: int, w: int) -> None:
    batches = 5 * stages
    ideal = batches * (f + b + w)

    def bubble(schedule: str, **more: Any) -> Any:
        return simulate(schedule, stages, batches, forward=f, backward=b, weight=w, **more).total - ideal

    assert bubble("1f1b") == bubble("gpipe") == (stages - 1) * (f + b + w)
    assert bubble("interleaved", chunks=2) == Fraction((stages - 1) * (f + b + w), 2)
    assert bubble("zb-h1") == (stages - 1) * (f + b - w)  # qi2024, table 2
    h2 = simulate("zb-2p", stages, batches, forward=f, backward=b, weight=w)
    assert longest_stage(h2) - ideal == (stages - 1) * max(f + b - 2 * w, b - f)  # table 2 where b <= f
    if f == b:
        assert bubble("dualpipe") == (stages / 2 - 1) * (f + (b + w) + (b + w) - 3 * w)  # deepseek2024, table 2
        assert bubble("dualpipev") == (stages - 1) * (f + (b + w) + (b + w) - 3 * w) / 2
    if f == b == w:
        assert (
            longest_stage(h2)
            == ideal
            == longest_stage(simulate("zb-v", stages, batches, **EQUAL | {"forward": 6, "backward": 6, "weight": 6}))
        )


def test_a_third_of_the_bubble_and_none() -> None:
    """qi2024, section 2: with F = B = W, ZB-H1 leaves a third of the bubble of 1F1B, ZB-H2 and ZB-V nothing."""
    idle = {name: longest_stage(simulate(name, 8, 32, **EQUAL)) - 32 * 6 for name in ("1f1b", "zb-h1", "zb-2p", "zb-v")}
    assert idle == {"1f1b": 42, "zb-h1": 14, "zb-2p": 0, "zb-v": 0}


def test_bubble_fraction_of_narayanan() -> None:
    """narayanan2021, sections 2.2.1 and 2.2.2: (p - 1) / m of the busy time, and 1 / v of that when interleaved."""
    plain = simulate("1f1b", 4, 16, forward=1, backward=2)
    assert Fraction(sum(plain.idle), sum(plain.busy)) == Fraction(3, 16)
    assert plain.bubble_fraction == pytest.approx(3 / 19)
    folded = simulate("interleaved", 4, 16, forward=1, backward=2, chunks=3)
    assert sum(folded.idle) / sum(folded.busy) == pytest.approx(3 / 16 / 3)


def test_unequal_stages_by_hand() -> None:
    """Two stages, the second three times as slow; its work decides, the first only fills and drains."""
    played = simulate("1f1b", 2, 3, forward=[1, 3], backward=[2, 6])
    assert played.total == 1 + 3 * (3 + 6) + 2
    assert played.busy == (9, 27)
    assert played.idle == (21, 3)
    assert played.timeline[:3] == (Event(0, "F", 0, 0, 0, 1), Event(0, "F", 1, 0, 1, 2), Event(0, "BW", 0, 0, 10, 12))
    assert played.timeline[6] == Event(1, "F", 0, 0, 1, 4)


def test_each_part_of_the_model_takes_its_own_time() -> None:
    times = [1, 2, 3, 4]
    plain = simulate("dualpipe", 4, 8, forward=times, backward=times, weight=times)
    for event in plain.timeline:
        part = event.stage if event.chunk == 0 else 3 - event.stage  # the other direction starts at the last stage
        assert event.end - event.start == times[part] * (2 if event.kind == "BW" else 1)
    chunked = simulate("zb-v", 2, 4, forward=[[1, 8], [2, 4]], backward=3, weight=[2, 4])
    for event in chunked.timeline:
        expected = {"F": [[1, 8], [2, 4]], "B": [[1.5, 1.5]] * 2, "W": [[1, 1], [2, 2]]}[event.kind]
        assert event.end - event.start == expected[event.stage][event.chunk]
    assert order_of_work("zb-v", 2, 4).routes == (((0, 0), (1, 0), (1, 1), (0, 1)),)
    assert order_of_work("interleaved", 2, 4, 2).routes == (((0, 0), (1, 0), (0, 1), (1, 1)),)


@pytest.mark.parametrize(("stages", "batches"), [(2, 1), (4, 7), (8, 3)])
def test_sends_by_hand(stages: int, batches: int) -> None:
    """GPipe: beside compute a send only delays the first micro-batch of each way; otherwise every micro-batch."""
    times = {"forward": 5, "backward": 9, "send": 2}
    hidden = simulate("gpipe", stages, batches, **times)
    assert hidden.total == (batches + stages - 1) * 14 + 2 * (stages - 1) * 2
    shown = simulate("gpipe", stages, batches, **times, overlap_send=False)
    assert shown.total == (batches + stages - 2) * (14 + 2 * 2) + 14
    assert shown.sending == (2 * batches, *[4 * batches] * (stages - 2), 2 * batches)
    assert hidden.sending == (0,) * stages
    links = simulate("1f1b", stages, 1, forward=5, backward=9, send=list(range(stages - 1)))
    assert links.total == stages * 14 + 2 * sum(range(stages - 1))


def test_interleaved_sends_from_the_last_stage_back_to_the_first() -> None:
    free = simulate("interleaved", 4, 4, forward=2, backward=2, chunks=2, send=[0, 0, 0, 0])
    last = simulate("interleaved", 4, 4, forward=2, backward=2, chunks=2, send=[0, 0, 0, 5])
    assert last.total == free.total + 2 * 5


def test_turning_point_of_a_v_needs_no_send() -> None:
    assert simulate("zb-v", 1, 4, forward=2, backward=2, weight=2, send=100, overlap_send=False).total == 4 * 6
    one = simulate("zb-v", 2, 1, forward=2, backward=2, weight=2, send=7)
    assert one.total == 4 * 1 + 4 * 1 + 4 * 7 + 2 * 1  # both chunks' W of stage 0 come last


def test_fixed_time_at_the_end() -> None:
    plain = simulate("1f1b", 3, 6, forward=1, backward=2)
    tailed = simulate("1f1b", 3, 6, forward=1, backward=2, tail=[0, 1, 10])
    assert tailed.total == plain.last[2] + 10
    assert tailed.busy == (18, 19, 28)
    assert tailed.last == (plain.last[0], plain.last[1] + 1, plain.last[2] + 10)


def test_overlapped_pairs() -> None:
    """F and BW run into one another hold back both outputs until both are done, and take less time."""
    played = simulate("dualpipe", 4, 16, forward=4, backward=4, weight=4, pair=Fraction(3, 4))
    assert played.total == closed_form("dualpipe", 4, 16, 4, 4, 4, pair=Fraction(3, 4))
    turning = played.order.work(1)
    assert sum(work.paired for work in turning if work.kind == "F") == 16 - 4 - 1
    bubble = (4 // 2 - 1) * (9 + 8 - 3 * 4)  # deepseek2024, table 2, with F&B = 3/4 of 12
    assert played.idle[1] == bubble


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("interleaved", 4, 3, 2), "interleaved needs at least 4 micro-batches"),
        (("interleaved", 4, 8, None), "at least 2 stages and 2 chunks"),
        (("interleaved", 1, 8, 2), "at least 2 stages and 2 chunks"),
        (("dualpipe", 3, 8, None), "even number of stages"),
        (("dualpipe", 4, 9, None), "even number of stages and of micro-batches"),
        (("dualpipe", 4, 6, None), "at least 2 micro-batches a stage: 8, got 6"),
        (("dualpipev", 4, 7, None), "at least 2 micro-batches a stage: 8, got 7"),
        (("zb-v", 4, 8, 3), "zb-v has 2 chunk"),
        (("1f1b", 4, 8, 2), "1f1b has 1 chunk"),
        (("1f1b", 0, 8, None), "stages must be a whole number of at least 1"),
        (("gpipe", 2, 1.5, None), "num_microbatches must be a whole number"),
        (("pipedream", 2, 4, None), "unknown pipeline schedule 'pipedream'"),
    ],
)
def test_what_cannot_exist_is_refused_in_one_line(arguments: tuple[Any, ...], message: str) -> None:
    schedule, stages, batches, chunks = arguments
    with pytest.raises(LayoutError, match=message) as caught:
        simulate(schedule, stages, batches, forward=1, backward=1, chunks=chunks)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"forward": [1, 2, 3], "backward": 1}, "forward needs 2 numbers"),
        ({"forward": 1, "backward": -1}, "backward must be a time"),
        ({"forward": 1, "backward": float("nan")}, "backward must be a time"),
        ({"forward": [[1], [1, 2]], "backward": 1}, "forward of stage 1 needs 1 numbers"),
        ({"forward": 1, "backward": 1, "send": [1, 1]}, "send needs 1 numbers"),
        ({"forward": 1, "backward": 1, "tail": [1]}, "tail needs 2 numbers"),
    ],
)
def test_times_that_do_not_fit_are_refused(times: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        simulate("1f1b", 2, 4, **times)


def test_an_order_that_waits_for_itself_deadlocks() -> None:
    order = order_of_work("1f1b", 2, 2)
    swapped = msgspec.structs.replace(
        order, rows=(order.rows[0], (3, 0, 0, 3))
    )  # the last stage's first F after its BW
    with pytest.raises(
        LayoutError, match="1f1b deadlocks: stage 0 waits for the input of BW of micro-batch 0 on chunk 0"
    ):
        run(swapped, forward=1, backward=1)
    early = order_of_work("zb-h1", 1, 1)
    early = msgspec.structs.replace(early, rows=((0, 2, 1),))  # W before B
    with pytest.raises(LayoutError, match="waits for the input of W of micro-batch 0"):
        run(early, forward=1, backward=1)


def test_an_order_with_something_missing_or_twice_is_found() -> None:
    order = order_of_work("zb-h1", 2, 3)
    check_order(order)
    for numbers in ((0, 1, 0, 0, 2, 1, 1, 2, 1), (0, 1, 0, 0, 2, 1, 1, 1, 2)):
        with pytest.raises(LayoutError, match="stage 0 does not do"):
            check_order(msgspec.structs.replace(order, microbatches=(numbers, order.microbatches[1])))


def test_closed_forms_read_three_ways() -> None:
    p, m, v, f, b, w = sympy.symbols("p m v f b w", positive=True)
    assert sympy.simplify(closed_form("1f1b", p, m, f, b) - (m + p - 1) * (f + b)) == 0
    assert sympy.simplify(closed_form("gpipe", p, m, f, b, w) - (m + p - 1) * (f + b + w)) == 0
    assert sympy.simplify(closed_form("interleaved", p, m, f, b, chunks=v) - m * (f + b) - (p - 1) * (f + b) / v) == 0
    h1 = closed_form("zb-h1", p, m, f, b, w).subs({sympy.Min(m, p): p, sympy.Min(f, b, w): w})
    assert sympy.simplify(h1 - m * (f + b + w) - (p - 1) * (f + b - w)) == 0  # as printed
    pair = (f + b + w) * m + (p / 2 - 1) * (f + 2 * (b + w) - 3 * w)
    assert sympy.simplify(closed_form("dualpipe", p, m, f, b, w) - pair) == 0  # as printed, F&B = F + B
    numbers = {p: 4, m: 12, v: 2, f: 6, b: 6, w: 6}
    for schedule in SCHEDULES:
        sizes = (p, m, f, b, w, v)
        exact = closed_form(schedule, *(numbers[letter] for letter in sizes))
        assert float(closed_form(schedule, *sizes).subs(numbers)) == exact
        arrays = [numpy.array([numbers[letter], 2 * numbers[letter]], dtype=numpy.float64) for letter in sizes]
        twice = closed_form(schedule, *(2 * numbers[letter] for letter in sizes))
        assert list(closed_form(schedule, *arrays)) == [exact, twice]
        assert closed_form_holds(schedule, *arrays[:5]) is True or all(closed_form_holds(schedule, *arrays[:5]))


@pytest.mark.parametrize(
    ("schedule", "sizes"),
    [
        ("interleaved", (4, 6, 1, 1)),
        ("zb-2p", (4, 6, 1, 1, 1)),
        ("zb-v", (4, 8, 1, 2, 1)),
        ("dualpipe", (4, 8, 1, 2, 1)),
        ("dualpipe", (4, 8, 1, 1, 2)),
        ("dualpipev", (4, 7, 1, 1, 1)),
    ],
)
def test_closed_forms_are_not_used_where_they_do_not_hold(schedule: str, sizes: tuple[int, ...]) -> None:
    with pytest.raises(NotModelled, match=f"closed form of {schedule}"):
        closed_form(schedule, *sizes)
    with pytest.raises(LayoutError, match="unknown pipeline schedule"):
        closed_form("none", *sizes)


def test_timeline_is_made_when_asked_for_and_once() -> None:
    played = simulate("1f1b", 2, 2, forward=1, backward=1)
    assert "timeline" not in vars(played)
    assert played.timeline is played.timeline


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("schedule", "ahead"), [("zb-h1", 1), ("zb-2p", 2)])
def test_zero_bubble_puts_off_what_the_first_stage_holds_anyhow(schedule: str, ahead: int, recompute: str) -> None:
    """The layers of each stage stay within p (or 2p - 1) of its micro-batches, walked through; one more W would be too much."""
    job = Job("llama-3.1-70b", gpus=8, pp=8, schedule=schedule, recompute=recompute, global_batch=32)
    memory = resolve_job(job).estimate().workings.memory
    for stage in list(stages_of(memory.model, memory.layout))[1:]:
        layers = memory.of_layers(memory.counts(stage, stage.start, stage.stop))
        limit = (1 + ahead * 7) * layers.kept

        def peak(delays: tuple[int, ...], index: int = stage.index, each: Any = layers) -> int:
            change = {"F": each.kept, "B": each.waiting - each.kept, "W": -each.waiting}
            now = most = 0
            for work in order_of_work(schedule, 8, 32, put_off=delays).work(index):
                now += change[work.kind]
                most = max(most, now)
            return most

        late = memory.put_off
        more = tuple(delay + (place == stage.index) for place, delay in enumerate(late))
        # An F comes before the W that makes room for it.
        assert peak(late) <= limit + layers.waiting
        assert late[stage.index] == ahead * stage.index or peak(more) > limit
    assert (memory.put_off == tuple(ahead * stage for stage in range(8))) == (recompute == "none")
