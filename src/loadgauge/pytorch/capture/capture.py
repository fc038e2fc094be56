"""Capture: a run with symbols gives formulas, a plain run at other sizes checks them operation by operation."""

from __future__ import annotations

import functools
import itertools
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from loadgauge.core.base.errors import ConfigError, Error, NotModelled, first_line
from loadgauge.pytorch.capture.captured import Captured, Operation, Storage
from loadgauge.pytorch.capture.lists.compose import Few, compose, distinct
from loadgauge.pytorch.capture.record import Recorded, record
from loadgauge.pytorch.capture.symbols.sizes import Formula, written
from loadgauge.pytorch.capture.symbols.symbolic import MOST_OPERATIONS, Symbols, TooMuch
from loadgauge.pytorch.device.read import of_program
from loadgauge.pytorch.record.allocations import op_name
from loadgauge.pytorch.record.recording import ASKED
from loadgauge.pytorch.trace.programs.training import Around, Sized

OTHERS = (16, 1, 64, 128, 3, 256, 1024, 2)
"""What is added to a size for the run that checks a formula."""

ROWS = "; `loadgauge capture --rows LINE=NUMBER` states how many rows are chosen, `--rows most` as many as there are"


class Differs(NotModelled):
    """A formula that does not give what a plain run at other sizes gives."""


class Captures:
    """Recordings of a training at all sizes asked for so far: formulas, each for the sizes where its guards hold.

    Sizes are those of `job.names`, such as b (sequences) and s (tokens of each).
    """

    def __init__(self, job: Sized, target: str, pictures: tuple[tuple[str, int], ...] = ()) -> None:
        self.job, self.target, self.pictures = job, target, pictures
        self.known: list[Captured] = []

    def at(self, **sizes: int) -> Captured:
        """Return a capture that holds at some sizes; the code is run where there is none yet.

        Raises ConfigError where the code itself fails at these sizes.
        """
        found = next((one for one in self.known if one.holds(**sizes)), None)
        if found is None:
            try:
                found = capture(self.job, self.target, sizes)
            except Exception as error:  # whatever stops symbols: a plain run tells whether it is the code's own fault
                found = self._plainly(sizes, first_line(error)[:200])
            found = msgspec.structs.replace(found, pictures=self.pictures)
            self.known.append(found)
        return found

    def _plainly(self, sizes: Mapping[str, int], why: str) -> Captured:
        try:
            return capture_at(self.job, self.target, sizes, why)
        except Error:
            raise
        except Exception as error:  # of the code, or of an operation that needs values
            raise ConfigError(f"{self.target} cannot be captured: {reason(error)}") from None


def capture(job: Sized, target: str, sizes: Mapping[str, int]) -> Captured:
    """Capture a training with formulas in its sizes, which hold at `sizes` and wherever its guards do.

    Raises NotModelled where the code does not run with symbols; Differs where a formula is wrong.
    """
    return recorded(job, target, sizes)[0]


def recorded(
    job: Sized, target: str, sizes: Mapping[str, int], around: Around | None = None
) -> tuple[Captured, Recorded, Symbols]:
    """The same, with the recording of every layer that it was made of. around: as for `record`; few layers stand for all without"""
    few, symbols, plain = Few(), Symbols(dict(sizes)), None

    def value(other: Mapping[str, int]) -> Any:
        return functools.cache(lambda size: Formula.of(size, symbols.names).at(other))

    try:
        run = record(job, symbols.sizes, symbols, around or few.within)
        found = _captured(run, target, job.names, dict(sizes), symbols)
        others = [one for one in others_of(sizes, found.guards) if found.holds(**one)] or [dict(sizes)]
        other = others[0]
        if few.few is not None:
            other = next((one for one in others if distinct(run, few, value(one))), other)
        plain = record(job, other, around=around)
        if few.few is not None:
            run = compose(run, plain, few, value(other))
            found = _captured(run, target, job.names, dict(sizes), symbols)
    except TooMuch:
        raise
    except Exception:  # of the module with few layers: the whole one may do
        if few.few is None or (plain is not None and len(plain.ops) > MOST_OPERATIONS):
            raise
        symbols = Symbols(dict(sizes))
        run = record(job, symbols.sizes, symbols)
        found = _captured(run, target, job.names, dict(sizes), symbols)
        if plain is None or not found.holds(**other):
            other = next((one for one in others_of(sizes, found.guards) if found.holds(**one)), dict(sizes))
            plain = record(job, other)
    compare(found, plain, other)
    return found, run, symbols


def capture_at(job: Sized, target: str, sizes: Mapping[str, int], why: str = "") -> Captured:
    """Capture a training at one set of sizes; its formulas are numbers, and hold there alone. why: there are no others"""
    found = _captured(record(job, sizes), target, job.names, dict(sizes), None)
    return msgspec.structs.replace(
        found, guards=tuple(f"({name} == {value})" for name, value in sizes.items()), plain=why
    )


def others_of(sizes: Mapping[str, int], guards: Sequence[str] = ()) -> Iterator[dict[str, int]]:
    """Yield sizes that differ from some in every one that is not 1, the nearest first. guards: such as that one is a number

    >>> next(others_of({"b": 3, "s": 96, "n": 16000}, ["(n == 16000)"]))
    {'b': 4, 's': 112, 'n': 16000}
    """
    moving = [name for name, value in sizes.items() if value != 1 and f"({name} == {value})" not in guards]
    for more in OTHERS:
        for sign, step in itertools.product((1, -1), (1, 2)):
            changed = {name: sizes[name] + (sign * more if place else step) for place, name in enumerate(moving)}
            if len(moving) == 1:
                changed = {name: sizes[name] + sign * more for name in moving}
            if all(value > 1 for value in changed.values()):
                yield {**sizes, **changed}


def reason(error: Exception) -> str:
    """Why code did not run, with its line, and the line before it that decided by a value which nobody knows."""
    line, asked, stated = stopped_at(error), getattr(error, ASKED, ""), ""
    what = first_line(error)[:200]
    if isinstance(error, DynamicOutputShapeException):
        stated = ROWS if any(one in what for one in ("nonzero", "masked_select")) else ""
        what = f"the size of what {what} gives depends on values"
    places = [one for one in (line, asked and f"{asked} decided by a value that is not known") if one]
    return f"{what} ({'; '.join(places)}){stated}" if places else what


def stopped_at(error: BaseException) -> str:
    """The innermost line of the program in an error's traceback, as file:line; "" where it is PyTorch's or this package's alone."""
    own = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if of_program(frame.f_code.co_filename)]
    lines = {id(frame): line for frame, line in traceback.walk_tb(error.__traceback__)}
    return f"{own[-1].f_code.co_filename}:{lines[id(own[-1])]}" if own else ""


def compare(found: Captured, plain: Recorded, sizes: Mapping[str, int]) -> None:
    """Raise Differs unless formulas give the bytes of every event, the kept bytes and the FLOPs of a plain run.

    Several releases after one another, as where a graph is let go, may come in another order: they are compared at their end.
    """
    names, others = [one.name for one in found.operations], [op.name for op in plain.ops]
    if names != others:
        pairs = itertools.zip_longest(names, others, fillvalue="none")
        place, (one, two) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
        raise Differs(f"operation {place} is {one} with symbols and {two} at {dict(sizes)}")
    live, changes = 0, found.changes(**sizes)
    mine = list(itertools.accumulate(changes))
    if len(mine) != len(plain.changes):
        raise Differs(f"{len(mine)} events with symbols and {len(plain.changes)} at {dict(sizes)}")
    for event, change in enumerate(plain.changes):
        live += change
        if live != mine[event] and not (_releases(plain.changes, event) and _releases(changes, event)):
            op = op_name(plain.stream.records[plain.ids[event]].op)
            raise Differs(f"{op}: {mine[event]} bytes live with symbols, {live} at {dict(sizes)}")
    for known, ran in zip(found.operations, plain.ops, strict=True):
        if known.flops is not None and known.flops.at(sizes) != ran.flops:
            raise Differs(f"{ran.name}: {known.flops.at(sizes)} FLOP with symbols, {ran.flops} at {dict(sizes)}")
    if found.kept_bytes(**sizes) != sum(plain.kept):
        raise Differs(f"{found.kept_bytes(**sizes)} bytes kept with symbols, {sum(plain.kept)} at {dict(sizes)}")


def _releases(changes: Sequence[Any], event: int) -> bool:
    """Return whether an event releases memory, and so does the next."""
    return event + 1 < len(changes) and bool(changes[event] < 0) and bool(changes[event + 1] < 0)


def _captured(
    run: Recorded, target: str, names: tuple[str, ...], sizes: dict[str, int], symbols: Symbols | None
) -> Captured:
    known: dict[Any, Formula] = {}
    of_names = {} if symbols is None else symbols.names

    def size(expression: Any) -> Formula:
        if expression not in known:
            known[expression] = Formula.of(expression, of_names)
        return known[expression]

    stream = run.stream
    phases = [name for _, name in stream.phases]
    storages = tuple(
        Storage(stream.category(number), op_name(one.op), one.module, phases[one.phase - 1] if one.phase else "")
        for number, one in enumerate(stream.records)
    )
    first, operations = 0, []
    for op in run.ops:
        flops = None if op.flops is None else size(op.flops)
        operations.append(Operation(op.name, op.module, op.phase, flops, first, op.events))
        first = op.events
    return Captured(
        target=target,
        names=names,
        sizes=sizes,
        parameters=run.parameters,
        operations=tuple(operations),
        storages=storages,
        events=tuple((number, size(change)) for number, change in zip(run.ids, run.changes, strict=True)),
        kept=tuple(size(one) for one in run.kept),
        guards=() if symbols is None else tuple(dict.fromkeys(written(guard, of_names) for guard in symbols.guards)),
        values=run.values,
        branches=run.branches,
        assumed=run.assumed,
        second=run.second,
        seconds=run.seconds,
        torch=str(torch.__version__),
        phases=tuple(stream.phases),
        of_sound=run.of_sound,
        subject=run.subject,
    )
