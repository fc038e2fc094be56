"""Trainer and engine beside each other in time: a step's seconds where answers may be old, by a walk over both.

An engine holds a slot for each answer that runs; a trainer takes a step's answers as soon as that many have ended, in whatever
order, and weights move when it is done. Answers that are asked for and not trained on are (staleness + 1) steps' worth at the most.
At a move of weights all that were asked for end first and no more are, or they go on with the new weights (`partial`).
The walk keeps how many answers there are of each age, a tick for each bin of tokens, and cuts a tick where the trainer begins or
ends. (Sources: areal, `infra/staleness_manager.py`; verl, `fully_async_rollouter.py`, `set_max_required_samples` and `pause`;
nemo-rl, `async_utils/trajectory_collector.py`, `prepare_for_refit`; slime, `train_async.py`; openrlhf, `ppo_trainer_async.py`.)

Legend: N answers of a step, k staleness, U seconds of the trainer, s of a move of weights, in which both wait.
"""

import math
from collections import deque

import msgspec

from loadgauge.core.base.lengths import Lengths
from loadgauge.core.post_training.tail import Step, survivor

BINS = 96
"""Steps of length into which the longest answer is divided."""
DEEPEST = 48
"""Updates that answers may be old, above which a step no longer changes: a tail is hidden under that many others."""


class Sides(msgspec.Struct, frozen=True, kw_only=True):
    """Both sides of a walk. update: seconds of the trainer in a step; sync: in which weights move; every: updates between two moves

    slots, inflight: answers that run at once, and that are asked for and not ended, on all replicas; scale: seconds of the engine
    over those of its steps; reads: seconds of a replica for an answer's prompt, before its steps; tool: seconds of an answer out
    of the engine, in which it holds no slot; partial: as of the engine
    """

    sequences: float
    update: float
    sync: float
    slots: float
    prompt: int
    staleness: float
    replicas: int = 1
    inflight: float = math.inf
    scale: float = 1.0
    reads: float = 0.0
    tool: float = 0.0
    partial: bool = False
    every: int = 1

    @property
    def depth(self) -> float:
        """Steps' worth of answers that are asked for and not trained on, at the most."""
        return max(min(self.staleness, DEEPEST) + 1, self.every)

    @property
    def walks(self) -> bool:
        """Return whether a step is more than its slower side: answers go on at a move of weights, or are asked for in parts."""
        return self.partial or self.every > 1 or self.inflight < self.sequences


class Walk(msgspec.Struct, frozen=True):
    """A step in the mean. step: seconds; waits: of the trainer for answers; idle: of the engine, with nothing to generate

    behind: updates that an answer is old when it is trained on; running: answers that run while any do; partial: as of `Sides`
    """

    step: float
    waits: float
    idle: float
    behind: float
    running: float
    partial: bool = False


def walk(lengths: Lengths, step: Step, sides: Sides) -> Walk:
    """Return the mean of steps after the start.

    >>> both = Sides(sequences=8, update=3.0, sync=0.5, slots=8, prompt=1, staleness=1)
    >>> round(walk(Lengths.of([100]), lambda running, context: 0.05, both).step, 3)  # answers take 5 s, and both wait 0.5
    5.5
    """
    beside = _Beside(lengths, step, sides)
    turn = math.ceil(sides.depth) * sides.every  # batches that began at once come back at once
    turns = 2 + math.ceil(8 / turn)
    beside.until_update(2 * turn)
    before = beside.sums()
    beside.until_update(turns * turn)
    took = [(after - start) / ((turns - 2) * turn) for after, start in zip(beside.sums(), before, strict=True)]
    return Walk(took[0], took[1], took[2], took[3] / sides.sequences, took[4] / took[5], sides.partial)


class _Beside:
    """Both sides at a moment. ages: answers that run, by how many bins they have; outside: those in a tool, until when

    now: seconds; until: when the trainer ends; ready: when it had its answers; begun, queued,
    ended: answers so far that were asked for, that wait for a slot, and that are done
    """

    def __init__(self, lengths: Lengths, step: Step, sides: Sides) -> None:
        import numpy

        self.sides = sides
        width = max(1, math.ceil(lengths.longest / BINS))
        alive = survivor(lengths, width)
        self.alive = alive[: max(1, int((alive > 0).sum()))]
        self.stays = numpy.append(self.alive[1:] / numpy.maximum(self.alive[:-1], 1e-300), 0.0)
        self.middles = width * (numpy.arange(len(self.alive)) + 0.5)
        self.ages, self.outside = numpy.zeros(len(self.alive)), deque[tuple[float, float]]()
        most = max(1.0, min(sides.slots, sides.inflight, sides.depth * sides.sequences) / sides.replicas)
        self.sizes = numpy.unique(numpy.append(numpy.round(numpy.geomspace(1, most, 14)), most))
        self.contexts = sides.prompt, sides.prompt + float(self.middles[-1])
        # As many still run, in the mean, when the last of a batch ends: less than one.
        of = max(1, round(min(sides.sequences, sides.slots)))
        at, left = numpy.append(self.middles, lengths.longest), numpy.append(self.alive, 0.0)
        self.last = min(1.0, of * float(numpy.interp(lengths.expected_max(of), at, left))) + 1e-6
        tick = width * sides.scale
        self.ticks = [numpy.array([tick * step(float(size), at) for size in self.sizes]) for at in self.contexts]
        self.now = self.since = self.begun = self.queued = self.ended = self.away = 0.0
        self.until, self.ready = math.inf, math.inf
        self.updates, self.moved, self.draining, self.unread = 0, 0, False, 0.0
        self.waits = self.idle = self.behind = self.busy = self.area = 0.0

    def sums(self) -> tuple[float, ...]:
        """Return what has added up so far, in the order of `Walk`."""
        return self.now, self.waits, self.idle, self.behind, self.area, self.busy

    def until_update(self, number: int) -> None:
        """Go on until the trainer has ended so many updates."""
        while self.updates < number:
            self._train()
            running = self._begin()
            if self.draining and self.queued + running + self.away <= self.last:
                self._move(running)
            elif running > 1e-9:
                self._tick(running)
            else:
                event = min(self.until, self.outside[0][0] if self.outside else math.inf)
                self.idle += max(0.0, event - self.now)
                self.now = max(self.now, event)
            while self.outside and self.outside[0][0] <= self.now:
                when, count = self.outside.popleft()
                self.away -= count
                self._end(when, when, count)

    def _train(self) -> None:
        """The trainer ends, and begins where it has a step's answers."""
        if self.until <= self.now:
            self.updates, self.until, self.since = self.updates + 1, math.inf, self.now
            self.ready = self.now if self.ended >= self._wanted else math.inf
            if self.updates % self.sides.every == 0:
                self.draining = not self.sides.partial
                if self.sides.partial:
                    self._move(0.0)
        if self.until == math.inf and self.ready < math.inf and not self.draining:
            start = max(self.since, self.ready)
            self.waits += start - self.since
            self.until = start + self.sides.update

    @property
    def _wanted(self) -> float:
        """Answers of all updates so far and of the next."""
        return (self.updates + 1) * self.sides.sequences * (1 - 1e-9)

    def _move(self, left: float) -> None:
        """Weights move, and both wait. left: what is taken as ended of what runs"""
        self._end(self.now, self.now, left + (self.away if self.draining else 0.0))
        if self.draining:
            self.waits += self.now - self.since
            self.ages[:], self.away = 0.0, 0.0
            self.outside.clear()
        self.behind += (self.begun - self.updates * self.sides.sequences) * self.sides.every
        self.now += self.sides.sync
        self.outside = deque((when + self.sides.sync, count) for when, count in self.outside)
        self.moved, self.draining, self.since = self.moved + 1, False, self.now

    def _begin(self) -> float:
        """Answers are asked for, and those begin that slots are free for; return how many run."""
        sides, running = self.sides, float(self.ages.sum())
        if not self.draining:
            most = (self.moved * sides.every + sides.depth) * sides.sequences
            asked = max(0.0, min(most - self.begun, sides.inflight - self.queued - running - self.away))
            self.begun += asked
            self.queued += asked
        room = min(self.queued, sides.slots - running)
        if room > 1e-9:
            self.queued -= room
            self.unread += room * sides.reads / sides.replicas
            self.ages[0] += room * self.alive[0]
            self._leave(self.now, self.now, room * (1 - float(self.alive[0])))
            running += room * float(self.alive[0])
        return running

    def _tick(self, running: float) -> None:
        """All that runs goes on for a bin of tokens, or until the trainer ends."""
        import numpy

        here = running / self.sides.replicas
        here /= -math.expm1(-here)  # of a replica that has any
        near, far = (float(numpy.interp(here, self.sizes, ticks)) for ticks in self.ticks)
        low, high = self.contexts
        share = (self.sides.prompt + float(self.ages @ self.middles) / running - low) / (high - low)
        tick = near + (far - near) * share + self.unread
        stay = self.ages * self.stays
        leaves = running - float(stay.sum())
        part = min(1.0, max(1e-9, (self.until - self.now) / tick))
        if self.draining and self.queued < 1e-9 and leaves * part > running + self.away - self.last > 0:
            part = max(1e-9, (running + self.away - self.last) / leaves)  # the last ends within the tick
        self.ages *= 1 - part
        self.ages[1:] += part * stay[:-1]
        self.unread *= 1 - part
        before, self.now = self.now, self.now + part * tick
        self.busy += part * tick
        self.area += running * part * tick
        self._leave(before, self.now, part * leaves)

    def _leave(self, before: float, now: float, count: float) -> None:
        """Answers end on the engine between two moments; with a tool they come back later."""
        if self.sides.tool > 0 and count > 0:
            self.away += count
            self.outside.append((now + self.sides.tool, count))
        else:
            self._end(before, now, count)

    def _end(self, before: float, now: float, count: float) -> None:
        """Answers have ended, evenly between two moments: the trainer has its step's when there are enough."""
        lacks = self._wanted - self.ended
        self.ended += count
        if self.ready == math.inf and count > 0 and self.ended >= self._wanted:
            self.ready = before + (now - before) * min(1.0, max(0.0, lacks / count))
