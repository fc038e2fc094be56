"""The order of work of each pipeline schedule, as data: what every stage does, one thing after the other.

A stage holds `chunks` parts of the model. Its work is F (forward), and then either B (gradient of the input) and later
W (gradient of the weights), or BW (both at once). When each starts follows from the order and from how long things
take: `estimate.schedule.timeline` computes it.

Letters: p stages, m micro-batches, v chunks of a stage, r this stage (0: the first).

| schedule    | order of                                                             | limits                    |
|-------------|----------------------------------------------------------------------|---------------------------|
| gpipe       | huang2018; backward in order of micro-batch, as narayanan2021 fig. 3 | -                         |
| 1f1b        | narayanan2021, section 2.2.1                                         | -                         |
| interleaved | narayanan2021, section 2.2.2, as Megatron-LM runs it                 | p >= 2, v >= 2, m >= p     |
| zb-h1       | qi2024, section 2: the handcrafted ZB-H1                             | -                         |
| zb-2p       | qi2024, section 2: the handcrafted ZB-H2                             | -                         |
| zb-v        | qi2024, section 6 (V shape: qi2024v), as PyTorch runs it             | v = 2                     |
| dualpipe    | deepseek2024, section 3.2.1, as DeepSeek runs it (dualpipe)          | p even, m even, m >= 2p   |
| dualpipev   | its half, as DeepSeek (dualpipe) and PyTorch run it                  | v = 2, m >= 2p            |

All eight are fixed orders; none is a greedy search. All but DualPipe and ZB-H2 are, entry by entry, what PyTorch runs
(the tests compare them); DualPipe follows DeepSeek's code step by step, ZB-H2 the activations per device that qi2024
states. What qi2024 calls ZB-1p and ZB-2p (and its authors' code for ZB-V) comes out of a search over the times at hand
under a limit of memory. Here `zb-2p` is ZB-H2, the handcrafted order within the same limit, 2p micro-batches: with
unequal times the search may do better.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import msgspec

from loadgauge.core.base import LayoutError
from loadgauge.core.definitions.layout.layout import in_group

F, B, W, BW, PAIR_WAIT, PAIR_F, PAIR_BW, PAIR_END = range(8)
"""Kinds of work, as stored. A pair is four entries: wait for what its BW needs, F, BW, and then hand on F's output."""

KINDS = ("F", "B", "W", "BW", "", "F", "BW", "")
"""Name of each kind of work; the two without a name take no time."""


class Work(NamedTuple):
    """One piece of work: `F`, `B`, `W` or `BW` of a micro-batch on one of the stage's chunks.

    paired: an F and the BW after it run into one another (DualPipe): both inputs are needed before the first starts
    """

    kind: str
    microbatch: int
    chunk: int
    paired: bool = False


class Order(msgspec.Struct, frozen=True, eq=False):  # each is itself: what follows from it is kept by it
    """The order of work of every stage.

    routes: the (stage, chunk) pairs that a micro-batch passes through; bidirectional schedules have two routes
    split: how many chunks one stage of the model is cut into (DualPipe: 1, its two chunks are two whole stages)
    rows, microbatches: per stage and entry, kind x chunks + chunk, and the micro-batch
    """

    schedule: str
    stages: int
    num_microbatches: int
    chunks: int
    split: int
    routes: tuple[tuple[tuple[int, int], ...], ...]
    rows: tuple[Sequence[int], ...]
    microbatches: tuple[Sequence[int], ...]

    def work(self, stage: int) -> tuple[Work, ...]:
        """Return the work of one stage, in order.

        >>> " ".join(f"{work.kind}{work.microbatch}" for work in order_of_work("zb-h1", 3, 3).work(1))
        'F0 F1 B0 F2 B1 W0 B2 W1 W2'
        """
        entries = zip(self.rows[stage], self.microbatches[stage], strict=True)
        return tuple(
            Work(KINDS[kind], batch, chunk, kind >= PAIR_WAIT)
            for kind, chunk, batch in ((*divmod(row, self.chunks), batch) for row, batch in entries)
            if KINDS[kind]
        )


class Family(NamedTuple):
    """A schedule: how it orders the work of one stage, and what it requires of stages, micro-batches and chunks."""

    order: Callable[[int, int, int, int, tuple[int, ...]], tuple[list[int], list[int]]]
    """Of a stage, the stages, micro-batches, chunks, and how many W each stage puts off at the most."""
    chunks: int  # 0: the user's choice
    splits_backward: bool
    shape: Literal["line", "v", "both"] = "line"
    """Placement of chunks on the stages: down them; down and up again; half of the micro-batches down, half up."""


def order_of_work(
    schedule: str, stages: int, num_microbatches: int, chunks: int | None = None, put_off: tuple[int, ...] = ()
) -> Order:
    """Return the order of work of a schedule; raises `LayoutError` with the reason where it cannot exist.

    put_off: how many W each stage of ZB-H1 or ZB-H2 puts off at the most, if fewer than the schedule would

    >>> [f"{work.kind}{work.microbatch}.{work.chunk}" for work in order_of_work("interleaved", 2, 2, 2).work(1)]
    ['F0.0', 'F1.0', 'F0.1', 'BW0.1', 'F1.1', 'BW1.1', 'BW0.0', 'BW1.0']
    """
    size = _chunks(schedule, stages, num_microbatches, chunks)
    return _order(schedule, stages, num_microbatches, size, put_off)


def rows_of_stage(
    schedule: str, stages: int, num_microbatches: int, chunks: int | None, stage: int, put_off: tuple[int, ...] = ()
) -> tuple[int, Sequence[int]]:
    """Return how many chunks a stage has, and its `Order.rows`, without those of the other stages.

    >>> size, rows = rows_of_stage("interleaved", 2, 2, 2, 1)
    >>> size, tuple(rows) == order_of_work("interleaved", 2, 2, 2).rows[1]
    (2, True)
    """
    size = _chunks(schedule, stages, num_microbatches, chunks)
    return size, SCHEDULES[schedule].order(stage, stages, num_microbatches, size, put_off)[0]


def _chunks(schedule: str, stages: int, num_microbatches: int, chunks: int | None) -> int:
    problem = violation(schedule, stages, num_microbatches, chunks)
    if problem:
        raise LayoutError(problem)
    return SCHEDULES[schedule].chunks or chunks or 1


def violation(schedule: str, stages: int, num_microbatches: int, chunks: int | None = None) -> str:
    """Return in one line why a schedule cannot run `stages` and `num_microbatches`; empty when it can.

    >>> violation("interleaved", 4, 3, 2)
    'interleaved needs at least 4 micro-batches, one a stage, got 3'
    """
    family = SCHEDULES.get(schedule)
    if family is None:
        return f"unknown pipeline schedule {schedule!r} (known: {', '.join(SCHEDULES)})"
    for name, value in (("stages", stages), ("num_microbatches", num_microbatches), ("chunks", chunks)):
        if value is not None and (not isinstance(value, int) or value < 1):
            return f"{name} must be a whole number of at least 1, got {value}"
    if family.chunks and chunks not in (None, family.chunks):
        return f"{schedule} has {family.chunks} chunk(s) a stage, not {chunks}"
    if schedule == "interleaved":
        if stages < 2 or chunks is None or chunks < 2:
            return f"interleaved needs at least 2 stages and 2 chunks a stage, got {stages} and {chunks or 1}"
        if num_microbatches < stages:
            return f"interleaved needs at least {stages} micro-batches, one a stage, got {num_microbatches}"
    if schedule == "dualpipe" and (stages % 2 or num_microbatches % 2):
        return f"dualpipe needs an even number of stages and of micro-batches, got {stages} and {num_microbatches}"
    if schedule in ("dualpipe", "dualpipev") and num_microbatches < 2 * stages:
        return f"{schedule} needs at least 2 micro-batches a stage: {2 * stages}, got {num_microbatches}"
    return ""


@lru_cache(maxsize=16)
def _order(schedule: str, stages: int, batches: int, chunks: int, put_off: tuple[int, ...]) -> Order:
    family = SCHEDULES[schedule]
    lists = [family.order(stage, stages, batches, chunks, put_off) for stage in range(stages)]
    down = [(stage, 0) for stage in range(stages)]
    up = [(stage, 1) for stage in reversed(range(stages))]
    routes = {
        "line": (tuple((stage, chunk) for chunk in range(chunks) for stage in range(stages)),),
        "v": (tuple(down + up),),
        "both": (tuple(down), tuple(up)),
    }[family.shape]
    return Order(
        schedule=schedule,
        stages=stages,
        num_microbatches=batches,
        chunks=chunks,
        split=1 if family.shape == "both" else chunks,
        routes=routes,
        rows=tuple(tuple(rows) for rows, _ in lists),
        microbatches=tuple(tuple(numbers) for _, numbers in lists),
    )


def _gpipe(stage: int, stages: int, batches: int, chunks: int, put_off: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """All forwards, then all backwards."""
    return [F] * batches + [BW] * batches, [*range(batches), *range(batches)]


def _alternate(warmup: int, forwards: list[int], backwards: list[int]) -> list[int]:
    """Some forwards, then one forward and one backward in turn, then the backwards that are left."""
    turns = len(forwards) - warmup
    steady = [0] * (2 * turns)
    steady[::2], steady[1::2] = forwards[warmup:], backwards[:turns]
    return forwards[:warmup] + steady + backwards[turns:]


def _one_f_one_b(
    stage: int, stages: int, batches: int, chunks: int, put_off: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Return the order of 1F1B: a stage runs one forward ahead for each stage behind it."""
    warmup, numbers = min(stages - stage - 1, batches), list(range(batches))
    return _alternate(warmup, [F] * batches, [BW] * batches), _alternate(warmup, numbers, numbers)


def _interleaved(
    stage: int, stages: int, batches: int, chunks: int, put_off: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Groups of g micro-batches (`in_group`) go through chunk 0, then chunk 1, ...; 2 (p - r - 1) + (v - 1) g forwards ahead."""
    group = in_group(batches, stages)
    warmup = min(2 * (stages - stage - 1) + (chunks - 1) * group, batches * chunks)
    groups = [range(start, min(start + group, batches)) for start in range(0, batches, group)]
    numbers = [number for members in groups for _ in range(chunks) for number in members]
    visits = [chunk for members in groups for chunk in range(chunks) for _ in members]
    forwards = [F * chunks + chunk for chunk in visits]
    backwards = [BW * chunks + chunks - 1 - chunk for chunk in visits]
    return _alternate(warmup, forwards, backwards), _alternate(warmup, numbers, numbers)


def _zero_bubble(
    ahead: int, stage: int, stages: int, batches: int, chunks: int, put_off: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """1F1B so many times as far ahead, with each W as many micro-batches after its B, or as `put_off` says: ZB-H1 is 1 (p - r - 1)
    forwards ahead and W r behind, p micro-batches everywhere, the most that 1F1B holds; ZB-H2 is 2, with 2p - 1 everywhere.
    """
    warmup, delay = ahead * (stages - stage - 1), min((ahead * stage, *put_off[stage : stage + 1]))
    rows, numbers = [F] * min(warmup, batches), list(range(min(warmup, batches)))
    for batch in range(batches):
        if batch + warmup < batches:
            rows.append(F)
            numbers.append(batch + warmup)
        rows.append(B)
        numbers.append(batch)
        if batch >= delay:
            rows.append(W)
            numbers.append(batch - delay)
    left = range(max(batches - delay, 0), batches)
    return rows + [W] * len(left), numbers + list(left)


class _Writer:
    """Writes down one stage of a schedule with two chunks, counting the micro-batches of each kind and chunk."""

    def __init__(self, first: tuple[int, int] = (0, 0)) -> None:
        self.rows: list[int] = []
        self.numbers: list[int] = []
        self.forwards, self.backwards = list(first), list(first)
        self.pending: deque[tuple[int, int]] = deque()  # B done, W not yet

    def put(self, kind: int, chunk: int, number: int) -> None:
        """Append one piece of work."""
        self.rows.append(2 * kind + chunk)
        self.numbers.append(number)

    def forward(self, chunk: int) -> None:
        """Append F of the chunk's next micro-batch."""
        self.put(F, chunk, self.forwards[chunk])
        self.forwards[chunk] += 1

    def backward(self, chunk: int, split: bool) -> None:
        """Append the backward of the chunk's next micro-batch: B where `split`, else BW."""
        self.put(B if split else BW, chunk, self.backwards[chunk])
        if split:
            self.pending.append((chunk, self.backwards[chunk]))
        self.backwards[chunk] += 1

    def weight(self) -> None:
        """Append the W that has waited longest."""
        chunk, number = self.pending.popleft()
        self.put(W, chunk, number)

    def pair(self, forward: int, backward: int) -> None:
        """Append F of one chunk paired with BW of another."""
        self.put(PAIR_WAIT, backward, self.backwards[backward])
        self.put(PAIR_F, forward, self.forwards[forward])
        self.put(PAIR_BW, backward, self.backwards[backward])
        self.put(PAIR_END, forward, self.forwards[forward])
        self.forwards[forward] += 1
        self.backwards[backward] += 1


def _zb_v(stage: int, stages: int, batches: int, chunks: int, put_off: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Down through chunk 0 and up again through chunk 1; 2p chunks (p micro-batches) everywhere."""
    writer, after = _Writer(), stages - stage
    enough = max(
        batches, 2 * stages - 1
    )  # the pattern needs 2p - 1; micro-batches that do not exist are left out below
    for _ in range(2 * after - 1):
        writer.forward(0)
    for _ in range(stage):
        writer.forward(1)
        writer.forward(0)

    def turn(chunk: int) -> None:
        if writer.forwards[chunk] < enough:
            writer.forward(chunk)
        writer.backward(chunk, split=True)
        writer.weight()

    for _ in range(after):
        turn(1)
    while writer.forwards[1] < enough:
        turn(0)
        turn(1)
    for _ in range(stage):
        writer.backward(0, split=True)
        writer.backward(1, split=True)
    late = [
        entry for entry in writer.pending if entry[0]
    ]  # chunk 1 keeps its W for the very end, chunk 0 starts at once
    writer.pending = deque(entry for entry in writer.pending if not entry[0])
    for _ in range(after):
        writer.backward(0, split=True)
        writer.weight()
    writer.pending.extendleft(reversed(late))
    while writer.pending:
        writer.weight()
    kept = [entry for entry in zip(writer.rows, writer.numbers, strict=True) if entry[1] < batches]
    return [row for row, _ in kept], [number for _, number in kept]


def _dual(near: int, rank: int, batches: int, writer: _Writer, swap: int = 0) -> tuple[list[int], list[int]]:
    """DeepSeek's eight steps for the `rank`-th of the `near` stages between an end and the turning point.

    batches: of each direction; swap: 1 where chunk 1 enters near and chunk 0 far
    """
    here, there, left = swap, 1 - swap, near - rank - 1
    for _ in range(2 * left):
        writer.forward(here)
    for _ in range(rank + 1):
        writer.forward(here)
        writer.forward(there)
    for _ in range(left):
        writer.backward(there, split=True)
        writer.weight()
        writer.forward(there)
    for turn in range(batches - 2 * near + rank + 1):
        if turn == 0 and left == 0:  # at the turning point the first two are kept apart: the bubble is smaller so
            writer.forward(here)
            writer.backward(there, split=False)
        else:
            writer.pair(here, there)
        writer.pair(there, here)
    for _ in range(left):
        writer.backward(there, split=False)
        writer.pair(there, here)
    for turn in range(2 * (rank + 1)):  # the second half of these leaves its W for later
        writer.backward(here if turn % 2 else there, split=turn > rank)
    for _ in range(left):
        writer.weight()
        writer.backward(here, split=True)
    while writer.pending:
        writer.weight()
    return writer.rows, writer.numbers


def _dualpipe(
    stage: int, stages: int, batches: int, chunks: int, put_off: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Half of the micro-batches enter at each end; a stage holds two stages of the model, one for each direction."""
    rank, half = min(stage, stages - 1 - stage), batches // 2
    return _dual(stages // 2, rank, half, _Writer((0, half)), swap=int(stage != rank))


def _dualpipev(
    stage: int, stages: int, batches: int, chunks: int, put_off: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """The first half of DualPipe's stages, the two directions joined at the turning point."""
    return _dual(stages, stage, batches, _Writer())


SCHEDULES: dict[str, Family] = {
    "gpipe": Family(_gpipe, 1, False),
    "1f1b": Family(_one_f_one_b, 1, False),
    "interleaved": Family(_interleaved, 0, False),
    "zb-h1": Family(partial(_zero_bubble, 1), 1, True),
    "zb-2p": Family(partial(_zero_bubble, 2), 1, True),
    "zb-v": Family(_zb_v, 2, True, "v"),
    "dualpipe": Family(_dualpipe, 2, True, "both"),
    "dualpipev": Family(_dualpipev, 2, True, "v"),
}
"""The schedules by name."""
