"""Whatever the schedule and the times: all work is done once, nothing starts early, equal stages give the closed form.

What work depends on, and when it can start, is worked out here a second time, from the shape of the schedule alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from hypothesis import given, settings, strategies as st

from loadgauge.core.estimate.schedule.simulate import (
    SCHEDULES,
    Event,
    Simulation,
    Work,
    simulate,
)
from orders import check_order, longest_stage, most_in_flight
from pipeline_forms import closed_form, closed_form_holds


@dataclass(frozen=True)
class Case:
    schedule: str
    stages: int
    batches: int
    chunks: int  # of a stage
    times: dict[str, Any] = field(default_factory=dict)

    def play(self, **more: Any) -> Simulation:
        chunks = self.chunks if self.schedule == "interleaved" else None
        return simulate(self.schedule, self.stages, self.batches, chunks=chunks, **{**self.times, **more})

    def part(self, stage: int, chunk: int) -> int:
        """Which part of the model, in its order, a chunk holds."""
        if chunk == 0:
            return stage
        if self.schedule == "interleaved":
            return chunk * self.stages + stage
        return self.stages - 1 - stage if self.schedule == "dualpipe" else 2 * self.stages - 1 - stage

    def way(self, chunk: int) -> int:
        """Which of the directions a chunk serves."""
        return chunk if self.schedule == "dualpipe" else 0

    def where(self) -> dict[tuple[int, int], tuple[int, int]]:
        """The stage and chunk that hold a part of the model, for each direction."""
        return {
            (self.part(stage, chunk), self.way(chunk)): (stage, chunk)
            for stage in range(self.stages)
            for chunk in range(self.chunks)
        }

    def cost(self, stage: int, work: Work) -> Any:
        names = {"F": "forward", "B": "backward", "W": "weight"}
        alone = sum(self.times[names[kind]][stage][work.chunk] for kind in work.kind)
        return alone * self.times["pair"] if work.paired else alone

    def batches_of(self, chunk: int) -> range:
        if self.schedule != "dualpipe":
            return range(self.batches)
        half = self.batches // 2
        return range(half, self.batches) if chunk else range(half)

    def link(self, here: int, there: int) -> Any:
        """Time from one stage to another."""
        if here == there:
            return 0
        low, high = sorted((here, there))
        return self.times["send"][low if high == low + 1 else high]


@st.composite
def cases(draw: st.DrawFn, schedules: tuple[str, ...] = tuple(SCHEDULES)) -> Case:
    schedule = draw(st.sampled_from(schedules))
    stages, batches, chunks = draw(st.integers(1, 7)), draw(st.integers(1, 24)), 1
    if schedule == "interleaved":
        stages, chunks = stages + 1, draw(st.integers(2, 4))
        batches = (stages) * draw(st.integers(1, 4))
    elif schedule == "dualpipe":
        stages, batches, chunks = 2 * draw(st.integers(1, 4)), 2 * batches, 2
        batches += 2 * stages
    elif schedule in ("dualpipev", "zb-v"):
        chunks = 2
        batches += 2 * stages if schedule == "dualpipev" else 0
    seconds = st.integers(0, 20)
    each = st.lists(seconds, min_size=stages, max_size=stages)
    every = st.lists(st.lists(seconds, min_size=chunks, max_size=chunks), min_size=stages, max_size=stages)
    links = stages if schedule == "interleaved" else stages - 1
    times = {
        "forward": draw(every),
        "backward": draw(every),
        "weight": draw(every),
        "send": draw(st.lists(seconds, min_size=links, max_size=links)),
        "overlap_send": draw(st.booleans()),
        "tail": draw(each),
        "pair": Fraction(draw(st.integers(5, 10)), 10) if schedule.startswith("dual") else 1,
    }
    return Case(schedule, stages, batches, chunks, times)


def by_work(events: tuple[Event, ...]) -> dict[tuple[str, int, int, int], Event]:
    return {(kind, event.stage, event.chunk, event.microbatch): event for event in events for kind in event.kind}


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_stage_does_everything_once(case: Case) -> None:
    played = case.play()
    done: dict[tuple[str, int, int, int], int] = defaultdict(int)
    for event in played.timeline:
        for kind in event.kind:
            done[kind, event.stage, event.chunk, event.microbatch] += 1
    assert done == {
        (kind, stage, chunk, batch): 1
        for kind in "FBW"
        for stage in range(case.stages)
        for chunk in range(case.chunks)
        for batch in case.batches_of(chunk)
    }
    check_order(played.order)
    splits = case.schedule not in ("gpipe", "1f1b", "interleaved")
    assert ("W" in {event.kind for event in played.timeline}) == splits


@settings(max_examples=200, deadline=None)
@given(cases())
def test_nothing_starts_before_what_it_depends_on(case: Case) -> None:
    played = case.play()
    work = by_work(played.timeline)
    where = case.where()
    last = max(part for part, _ in where)
    for (kind, stage, chunk, batch), event in work.items():
        part, way = case.part(stage, chunk), case.way(chunk)
        needs: list[tuple[str, int, int]] = []
        if kind == "F" and part > 0:
            needs = [("F", *where[part - 1, way])]
        elif kind == "B":
            needs = [("F", stage, chunk)] + ([("B", *where[part + 1, way])] if part < last else [])
        elif kind == "W" and event.kind == "W":
            needs = [("B", stage, chunk)]
        for other, there, whose in needs:
            ready = work[other, there, whose, batch].end + case.link(stage, there)
            assert event.start >= ready, f"{event} before {other} of stage {there}"
    free: dict[int, Any] = defaultdict(int)
    for event in sorted(played.timeline, key=lambda event: (event.stage, event.start, event.end)):
        assert event.start >= free[event.stage]  # one thing at a time
        free[event.stage] = event.end
        costs = {"F": "forward", "B": "backward", "W": "weight"}
        alone = sum(case.times[costs[kind]][event.stage][event.chunk] for kind in event.kind)
        assert event.end - event.start in (alone, alone * case.times["pair"])


@settings(max_examples=200, deadline=None)
@given(cases())
def test_times_add_up(case: Case) -> None:
    played = case.play()
    spent: dict[int, Any] = defaultdict(int)
    for event in played.timeline:
        spent[event.stage] += event.end - event.start
    for stage in range(case.stages):
        tail = case.times["tail"][stage]
        assert played.busy[stage] + played.idle[stage] == played.total
        assert played.busy[stage] == spent[stage] + tail
        assert 0 <= played.sending[stage] <= played.idle[stage]
        assert played.busy[stage] + played.sending[stage] <= played.last[stage] - played.first[stage] <= played.total
        if case.times["pair"] == 1:
            own = sum(
                sum(case.times[kind][stage][chunk] for kind in ("forward", "backward", "weight"))
                * len(case.batches_of(chunk))
                for chunk in range(case.chunks)
            )
            assert played.busy[stage] == own + tail  # so the slowest stage bounds the time
    assert played.total == max(played.last)
    assert 0 <= played.bubble_fraction < 1


@settings(max_examples=200, deadline=None)
@given(cases())
def test_time_is_at_least_one_micro_batch_through_all_stages(case: Case) -> None:
    played = case.play(pair=1)
    through = sum(
        case.times["forward"][stage][chunk] + case.times["backward"][stage][chunk]
        for stage in range(case.stages)
        for chunk in range(case.chunks if case.schedule != "dualpipe" else 1)
    )
    assert played.total >= through
    assert played.total >= max(played.busy)


@settings(max_examples=150, deadline=None)
@given(cases(), st.data())
def test_slower_is_never_faster(case: Case, data: st.DataObject) -> None:
    """With the order fixed, more time for anything can only delay: the total is a longest path."""
    name = data.draw(st.sampled_from(["forward", "backward", "weight", "send", "tail"]))
    more: Any = [each + 3 if isinstance(each, int) else [time + 3 for time in each] for each in case.times[name]]
    assert case.play(**{name: more}).total >= case.play().total
    assert case.play(overlap_send=False).total >= case.play(overlap_send=True).total


def longest_path(case: Case, played: Simulation) -> Any:
    """The total a second time: go over all work again and again until no end moves. Slow and simple."""
    orders = [played.order.work(stage) for stage in range(case.stages)]
    where = case.where()
    last = max(part for part, _ in where)
    ends: dict[tuple[str, int, int, int], Any] = defaultdict(int)

    def ready(stage: int, work: Work) -> Any:
        """When the input of some work has come."""
        part, way = case.part(stage, work.chunk), case.way(work.chunk)
        if work.kind == "W":
            return ends["B", stage, work.chunk, work.microbatch]
        if work.kind == "F" and part == 0:
            return 0
        if work.kind != "F" and part == last:
            return ends["F", stage, work.chunk, work.microbatch]
        there = where[part - 1 if work.kind == "F" else part + 1, way]
        return ends[work.kind[0], *there, work.microbatch] + case.link(stage, there[0])

    def sending(stage: int, work: Work) -> Any:
        """How long its stage waits for its output to arrive."""
        part = case.part(stage, work.chunk) + (1 if work.kind == "F" else -1)
        there = where.get((part, case.way(work.chunk)))
        return case.link(stage, there[0]) if there and work.kind != "W" and not case.times["overlap_send"] else 0

    while True:
        before, finish = dict(ends), []
        for stage, order in enumerate(orders):
            now: Any = 0
            remaining = list(order)
            while remaining:
                together = [remaining.pop(0)]
                if together[0].paired:
                    together.append(remaining.pop(0))
                now = max(now, *(ready(stage, work) for work in together))
                now += sum(case.cost(stage, work) for work in together)
                for work in reversed(together):  # of a pair the backward goes out first
                    ends[work.kind[0], stage, work.chunk, work.microbatch] = now
                    now += sending(stage, work)
            finish.append(now + case.times["tail"][stage])
        if before == dict(ends):
            return max(finish)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_total_is_the_longest_path(case: Case) -> None:
    played = case.play()
    assert played.total == longest_path(case, played)


@st.composite
def equal_stages(draw: st.DrawFn) -> tuple[Case, dict[str, Any]]:
    case = draw(cases())
    seconds = st.integers(1, 24)
    f, b, w = draw(seconds), draw(seconds), draw(seconds)
    if case.schedule.startswith("dual"):
        b, w = f, draw(st.integers(0, f))
    elif case.schedule == "zb-v":
        b = w = f
    equal = {"forward": Fraction(f), "backward": Fraction(b), "weight": Fraction(w), "send": 0, "tail": 0}
    return case, equal


@settings(max_examples=400, deadline=None)
@given(equal_stages())
def test_equal_stages_give_the_closed_form(drawn: tuple[Case, dict[str, Any]]) -> None:
    case, equal = drawn
    sizes = (case.schedule, case.stages, case.batches, equal["forward"], equal["backward"], equal["weight"])
    if closed_form_holds(*sizes, pair=case.times["pair"]):
        expected = closed_form(*sizes, chunks=case.chunks, pair=case.times["pair"])
        assert case.play(**equal).total == expected


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 20), st.integers(1, 20), st.integers(1, 20))
def test_closed_forms_of_papers(p: int, m: int, f: int, b: int, w: int) -> None:
    """Written out here as printed, not called."""
    times = {"forward": f, "backward": b, "weight": w}
    assert simulate("1f1b", p, m, **times).total == simulate("gpipe", p, m, **times).total == (m + p - 1) * (f + b + w)
    if w <= min(f, b) and m >= p:
        assert simulate("zb-h1", p, m, **times).total == m * (f + b + w) + (p - 1) * (f + b - w)
    if m >= 2 * p - 1:
        bubble = (p - 1) * max(0, f + b - 2 * w, b - f)
        assert longest_stage(simulate("zb-2p", p, m, **times)) == m * (f + b + w) + bubble
    assert max(most_in_flight(simulate("zb-h1", p, m, **times).order)) == min(m, p)
    assert most_in_flight(simulate("1f1b", p, m, **times).order) == tuple(min(m, p - stage) for stage in range(p))
