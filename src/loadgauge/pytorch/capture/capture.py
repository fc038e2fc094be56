"""Capture: a run with symbols gives formulas, a plain run at other sizes checks them operation by operation."""

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


APART = "same device"
"""Words of PyTorch's errors for tensors of a processor beside those of a card."""
PLACED = "what the code makes without a device lies on the card, as it does not run otherwise"


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
        captured = next((capture for capture in self.known if capture.holds(**sizes)), None)
        if captured is None:
            try:
                captured = capture(self.job, self.target, sizes)
            except Exception as error:  # whatever stops symbols: a plain run tells whether it is the code's own fault
                captured = self._plainly(sizes, first_line(error)[:200])
            captured = msgspec.structs.replace(captured, pictures=self.pictures)
            self.known.append(captured)
        return captured

    def _plainly(self, sizes: Mapping[str, int], why: str) -> Captured:
        try:
            return capture_at(self.job, self.target, sizes, why)
        except Error:
            raise
        except Exception as error:  # of the code, or of an operation that needs values
            if APART in str(error) and not self.job.placed and self.job.step is None:
                self.job = msgspec.structs.replace(self.job, placed=True, notes=(*self.job.notes, PLACED))
                return capture_at(self.job, self.target, sizes, why)
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
        captured = _captured(run, target, job.names, dict(sizes), symbols)
        others = [other for other in others_of(sizes, captured.guards) if captured.holds(**other)] or [dict(sizes)]
        other = others[0]
        if few.few is not None:
            other = next((sizes_too for sizes_too in others if distinct(run, few, value(sizes_too))), other)
        plain = record(job, other, around=around)
        if few.few is not None:
            run = compose(run, plain, few, value(other))
            captured = _captured(run, target, job.names, dict(sizes), symbols)
    except TooMuch:
        raise
    except Exception:  # of the module with few layers: the whole one may do
        if few.few is None or (plain is not None and len(plain.ops) > MOST_OPERATIONS):
            raise
        symbols = Symbols(dict(sizes))
        run = record(job, symbols.sizes, symbols)
        captured = _captured(run, target, job.names, dict(sizes), symbols)
        if plain is None or not captured.holds(**other):
            other = next(
                (other_sizes for other_sizes in others_of(sizes, captured.guards) if captured.holds(**other_sizes)),
                dict(sizes),
            )
            plain = record(job, other)
    compare(captured, plain, other)
    return captured, run, symbols


def capture_at(job: Sized, target: str, sizes: Mapping[str, int], why: str = "") -> Captured:
    """Capture a training at one set of sizes; its formulas are numbers, and hold there alone. why: there are no others"""
    captured = _captured(record(job, sizes), target, job.names, dict(sizes), None)
    return msgspec.structs.replace(
        captured, guards=tuple(f"({name} == {value})" for name, value in sizes.items()), plain=why
    )


def others_of(sizes: Mapping[str, int], guards: Sequence[str] = ()) -> Iterator[dict[str, int]]:
    """Yield sizes that differ from some in every one that is not 1, the nearest first. guards: such as that one is a number

    >>> next(others_of({"b": 3, "s": 96, "n": 16000}, ["(n == 16000)"]))
    {'b': 4, 's': 112, 'n': 16000}
    """
    moving = [name for name, value in sizes.items() if value != 1 and f"({name} == {value})" not in guards]
    for more in OTHERS:
        for sign, step in itertools.product((1, -1), (1, 2)):
            alone = len(moving) == 1
            changed = {
                name: sizes[name] + (sign * more if index or alone else step) for index, name in enumerate(moving)
            }
            if all(value > 1 for value in changed.values()):
                yield {**sizes, **changed}


def reason(error: Exception) -> str:
    """Why code did not run, with its line, and the line before it that decided by a value which nobody knows."""
    line, asked, stated = stopped_at(error), getattr(error, ASKED, ""), ""
    cause = first_line(error)[:200]
    if isinstance(error, DynamicOutputShapeException):
        stated = ROWS if any(word in cause for word in ("nonzero", "masked_select")) else ""
        cause = f"the size of what {cause} gives depends on values"
    places = [part for part in (line, asked and f"{asked} decided by a value that is not known") if part]
    return f"{cause} ({'; '.join(places)}){stated}" if places else cause


def stopped_at(error: BaseException) -> str:
    """The innermost line of the program in an error's traceback, as file:line; "" where it is PyTorch's or this package's alone."""
    own = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if of_program(frame.f_code.co_filename)]
    lines = {id(frame): line for frame, line in traceback.walk_tb(error.__traceback__)}
    return f"{own[-1].f_code.co_filename}:{lines[id(own[-1])]}" if own else ""


def compare(captured: Captured, plain: Recorded, sizes: Mapping[str, int]) -> None:
    """Raise Differs unless formulas give the bytes of every event, the kept bytes and the FLOPs of a plain run.

    Several releases after one another, as where a graph is let go, may come in another order: they are compared at their end.
    """
    names, others = [operation.name for operation in captured.operations], [op.name for op in plain.ops]
    if names != others:
        pairs = itertools.zip_longest(names, others, fillvalue="none")
        index, (symbolic, plainly) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
        raise Differs(f"operation {index} is {symbolic} with symbols and {plainly} at {dict(sizes)}")
    live, changes = 0, captured.changes(**sizes)
    mine = list(itertools.accumulate(changes))
    if len(mine) != len(plain.changes):
        raise Differs(f"{len(mine)} events with symbols and {len(plain.changes)} at {dict(sizes)}")
    for event, change in enumerate(plain.changes):
        live += change
        if live != mine[event] and not (_releases(plain.changes, event) and _releases(changes, event)):
            op = op_name(plain.stream.records[plain.ids[event]].op)
            raise Differs(f"{op}: {mine[event]} bytes live with symbols, {live} at {dict(sizes)}")
    for operation, ran in zip(captured.operations, plain.ops, strict=True):
        if operation.flops is not None and operation.flops.at(sizes) != ran.flops:
            raise Differs(f"{ran.name}: {operation.flops.at(sizes)} FLOP with symbols, {ran.flops} at {dict(sizes)}")
    if captured.kept_bytes(**sizes) != sum(plain.kept):
        raise Differs(f"{captured.kept_bytes(**sizes)} bytes kept with symbols, {sum(plain.kept)} at {dict(sizes)}")


def _releases(changes: Sequence[Any], event: int) -> bool:
    """Return whether an event releases memory, and so does the next."""
    return event + 1 < len(changes) and bool(changes[event] < 0) and bool(changes[event + 1] < 0)


def _captured(
    run: Recorded, target: str, names: tuple[str, ...], sizes: dict[str, int], symbols: Symbols | None
) -> Captured:
    formulas: dict[Any, Formula] = {}
    of_names = {} if symbols is None else symbols.names

    def size(expression: Any) -> Formula:
        if expression not in formulas:
            formulas[expression] = Formula.of(expression, of_names)
        return formulas[expression]

    stream = run.stream
    phases = [name for _, name in stream.phases]
    storages = tuple(
        Storage(
            stream.category(number), op_name(record.op), record.module, phases[record.phase - 1] if record.phase else ""
        )
        for number, record in enumerate(stream.records)
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
        kept=tuple(size(nbytes) for nbytes in run.kept),
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
