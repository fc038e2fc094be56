"""The queue of a server: beside a walk of every single step, what conserves requests, and what queues obey."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from loadgauge.core.serving import loop
from loadgauge.core.serving.loop import BUDGET, Load, closed_loop

LOAD = Load(requests=6, prompt=3000, answer=40, reading=0.2, idle=0.01, each=0.002, slots=99.0)


def walked(load: Load, rounds: int, spread: float) -> tuple[float, float]:
    """The same server, one step after the other, each request an object: no events, no heap."""
    dice = random.Random(0)
    whole = rounds * load.requests
    prompts = [load.prompt * (1 + spread * (2 * dice.random() - 1)) for _ in range(whole)]
    answers = [max(1, round(load.answer * (1 + spread * (2 * dice.random() - 1)))) for _ in range(whole)]
    later = [{"n": n, "unread": prompts[n], "todo": answers[n], "made": answers[n]} for n in range(whole)]
    more = load.reading if load.more is None else load.more
    now, waiting, running, done = 0.0, [later.pop(0) | {"came": 0.0} for _ in range(load.requests)], [], []
    arrived: list[dict[str, Any]] = []
    looked = patient = 0  # steps without a look for requests, and without a prompt that is let in
    while len(done) < whole:
        if not running or looked >= load.polls:
            patient = patient if waiting else 0
            waiting, arrived, looked = waiting + arrived, [], 0
        took = 0.0
        ready: list[dict[str, Any]] = []
        begun = bool(waiting) and waiting[0]["unread"] not in prompts
        enough = sum(prompts[one["n"]] for one in waiting) >= load.company
        if waiting and len(running) < int(load.slots) and (not running or begun or enough or patient >= load.patience):
            looked = patient = load.polls  # the engine looks for requests after prompts; those that are left wait anew
            room = max(load.budget - (len(running) if load.mixed else 0), load.budget / 4)
            while waiting and room > 0 and len(running) + len(ready) < int(load.slots):
                part = min(waiting[0]["unread"], room)
                waiting[0]["unread"] -= part
                room -= part
                took += part * more / load.prompt
                if waiting[0]["unread"] > 1e-9:
                    break
                ready.append(waiting.pop(0))
        alone = load.reading - more if took else 0.0  # whatever is read, once a step
        if took:
            patient = 0
        elif running:
            looked, patient = looked + 1, patient + bool(waiting)
        if load.mixed or not took:
            took += max(alone, load.idle + load.each * len(running))
            for one in running:
                one["todo"] -= 1
        else:
            took += alone
        now += took
        for one in ready:
            one |= {"first": now, "todo": one["todo"] - 1}
        running += ready
        for one in [one for one in running if not one["todo"]]:
            running.remove(one)
            done.append(one | {"end": now})
            if later:
                arrived.append(later.pop(0) | {"came": now})
    first = sum(one["first"] - one["came"] for one in done) / whole
    return first, sum((one["end"] - one["first"]) / max(1, one["made"] - 1) for one in done) / whole


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"mixed": False},
        {"slots": 4.0},
        {"prompt": 20_000},
        {"prompt": 100, "requests": 200, "reading": 0.001},
        {"more": 0.12},
        {"more": 0.12, "mixed": False},
        {"polls": 7},
        {"polls": 7, "mixed": False, "requests": 3},
        {"patience": 5, "company": 1e9},
        {"patience": 5, "company": 6_500.0, "budget": 16_384},
        {"patience": 9, "company": 1e9, "mixed": False, "slots": 4.0},
        {"budget": 2048},
    ],
)
def test_the_queue_is_that_of_a_walk_through_every_step(changed: dict[str, Any]) -> None:
    load = msgspec.structs.replace(LOAD, **changed)
    found = closed_loop(load, 4, 0.1)
    assert (found.first, found.token) == pytest.approx(walked(load, 4, 0.1), rel=1e-9)


def test_a_prompt_waits_for_the_next_look_and_for_others() -> None:
    """One after another, so that nothing else waits: with a poll every 30 steps a request that comes at any step waits half of
    them in the mean, one that waits for company all of its patience; where all are read at once nobody does."""
    load = msgspec.structs.replace(LOAD, requests=2, prompt=1, answer=997, reading=1e-6, idle=0.01, each=0.0)
    base = closed_loop(load, 200, 0.5).first
    polled = closed_loop(msgspec.structs.replace(load, polls=30), 200, 0.5).first
    patient = closed_loop(msgspec.structs.replace(load, patience=30, company=1e9), 200, 0.5).first
    assert (polled - base) / load.idle == pytest.approx(14.5, rel=0.1)
    assert (patient - base) / load.idle == pytest.approx(30, rel=0.06)
    assert closed_loop(msgspec.structs.replace(load, patience=30, company=0.5), 200, 0.5).first == pytest.approx(base)


def test_a_queue_for_places_obeys_littles_law() -> None:
    """Of 32 requests 8 have a place, so that all of a request takes four times what it holds its place for: its prompt and its
    tokens, between which the prompts of the seven others are read."""
    load = msgspec.structs.replace(LOAD, requests=32, slots=8.0)
    found = closed_loop(load, 40, 0.1)
    held = load.idle + load.reading + (load.answer - 1) * found.token
    assert found.first + (load.answer - 1) * found.token == pytest.approx(32 / 8 * held, rel=0.03)
    read = 7 * load.reading / (load.answer - 1)
    assert found.token == pytest.approx(load.idle + 7.5 * load.each + read, rel=0.03)


def test_ranks_that_read_side_by_side_share_the_burst() -> None:
    one = msgspec.structs.replace(LOAD, requests=64, prompt=BUDGET, mixed=False)
    eight = msgspec.structs.replace(one, ranks=8)
    assert closed_loop(eight, 1, 0.0).first == pytest.approx(closed_loop(one, 1, 0.0).first / 8, rel=0.15)


def test_ranks_read_their_own_prompts_and_share_the_experts() -> None:
    """One prompt on one of eight ranks: what is its own takes the whole time, what all do together an eighth."""
    load = msgspec.structs.replace(LOAD, requests=1, prompt=1000, mixed=False, ranks=8)
    for together in (0.0, 0.6, 1.0):
        found = closed_loop(msgspec.structs.replace(load, together=together), 1, 0.0)
        assert found.first == pytest.approx(load.reading * (1 - together + together / 8))


def test_many_requests_followed_in_groups_take_as_long_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    load = msgspec.structs.replace(LOAD, requests=1024, prompt=1024, answer=512, reading=0.004, each=1e-4, slots=300.0)
    grouped = closed_loop.__wrapped__(load)
    monkeypatch.setattr(loop, "MOST", 1024)
    single = closed_loop.__wrapped__(load)
    assert grouped != single
    assert (grouped.first, grouped.token) == pytest.approx((single.first, single.token), rel=0.02)
