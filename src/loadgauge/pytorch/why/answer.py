"""The answers of `loadgauge why`: to the text of an error its cause, where it was, and what to do; to a record its causes.

Nothing of the estimate is loaded where no model is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.base import Error, gib, needs
from loadgauge.core.definitions.training.memory_range import memory_range
from loadgauge.pytorch.why.causes import ADVICE, ENGINE, NEEDS, WAKING
from loadgauge.pytorch.why.message import OutOfMemory, parse
from loadgauge.pytorch.why.traceback import Place, place

if TYPE_CHECKING:
    from loadgauge.core.plan.advise.try_ import Tried
    from loadgauge.core.resolve.setup import Setup
    from loadgauge.pytorch.trace.result import Trace

_TEXT = "loadgauge.pytorch.text.why"


class Diagnosis(Answer, frozen=True, kw_only=True):
    """Why memory ran out; the verdict is the first cause.

    own: what the file itself says, in bytes; place: where it was; setup: the run, where one is named
    """

    pivots: tuple[Pivot, ...] = (Pivot("Held at the peak", "parts", "parts", "of"),)
    own: Mapping[str, Any] = {}
    place: Place | None = None
    setup: Setup | None = None

    def alternatives(self) -> list[tuple[str, Any]]:
        return [] if self.setup is None else [(change.flags, change) for change in changes(self.setup, self.place)]

    def to_dict(self) -> dict[str, Any]:
        if self.setup is None:
            return dict(self.own)
        tried = [describe_change(change) for _, change in self.alternatives()]
        return {**self.own, "estimated": estimated(self.setup), "changes": tried}


def of_snapshot(path: Path, device: int = 0) -> Diagnosis:
    """Return what a snapshot of the allocator shows of a device. Raises `ConfigError` for what is none; nothing in it is run."""
    from loadgauge.pytorch.why.diagnose import of_file

    snapshot, findings = of_file(path, device)
    own = {**msgspec.to_builtins(snapshot), **msgspec.to_builtins(findings)}
    return _of_record("snapshot", own, (snapshot, findings))


def of_recording(trace: Trace, *, again: bool = True) -> Diagnosis:
    """Return what a trace shows. again: whether it is traced with other flags too, where it is of a model"""
    from loadgauge.pytorch.why.diagnose import of_trace
    from loadgauge.pytorch.why.remedies import retrace

    findings, retraced = of_trace(trace), retrace(trace) if again else ()
    own = msgspec.to_builtins(findings) | {"peak": trace.peak.total, "retraced": msgspec.to_builtins(retraced)}
    return _of_record("trace", own, (trace, findings, retraced))


def _of_record(kind: str, own: dict[str, Any], shown: Any) -> Diagnosis:
    """Return the answer that a record's causes are. shown: what is written, the findings second"""
    first = next((cause.name for cause in shown[1].causes), "nothing stands out")
    return Diagnosis(form=f"why.{kind}", writer=f"{_TEXT}:write_{kind}", own=own, shown=shown, verdict=first)


class OfError(Diagnosis, frozen=True, kw_only=True):
    """The answer to an error: its figures, and where memory ran out, where a traceback says it. file: its name, to be typed"""

    form: str = "why.message"
    writer: str = f"{_TEXT}:write_error"
    pivots: tuple[Pivot, ...] = ()
    error: OutOfMemory
    file: str = "FILE"

    @property
    def remedies(self) -> tuple[str, ...]:
        """What to do, the first step first: what makes the tensor of the traceback smaller where tensors are the cause, and else
        what is against the cause."""
        error, cause = self.error, self.error.cause
        first, *rest = ADVICE[cause]
        against = (first, error.engine, *rest) if cause in (ENGINE, WAKING) and error.engine else (first, *rest)
        of_place = () if self.place is None else (self.place.remedy,)
        lines = (*of_place, *against) if cause == NEEDS else (*against, *of_place)
        least = memory_range().expandable.needed.high * (error.allocated or 0)
        if (
            cause == NEEDS
            and error.tried
            and (error.idle or 0) > least
            and (error.idle or 0) + (error.free or 0) >= error.tried
        ):
            share = (error.idle or 0) / ((error.allocated or 0) + (error.idle or 0))
            lines += (
                f"{gib(error.idle or 0)} ({share:.0%}) of what PyTorch holds lies idle in pieces, as in most trainings: after the"
                " above, PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True wins a part of it",
            )
        return tuple(dict.fromkeys(lines))

    @property
    def notes(self) -> tuple[str, ...]:
        """How the error's figures were read, where that is not plain."""
        own = (
            ()
            if self.error.own is None
            else (
                f"process {self.error.own} is this one: beside it there is no room for what PyTorch holds (in a container a"
                " process does not know its own number)",
            )
        )
        larger = () if self.setup is None else tuple(filter(None, (self._larger(self.setup),)))
        return (*own, *(f"contradiction in the error: {text}" for text in self.error.contradictions), *larger)

    def _larger(self, setup: Setup) -> str:
        """Return what to look at where the run needed more than its flags explain; "" where they do."""
        error, memory = self.error, setup.estimate().memory
        if error.cause != NEEDS or error.capacity is None or error.free is None or error.tried is None:
            return ""
        need = error.capacity - error.free + error.tried
        if need <= memory.high:
            return ""
        length = next((n for n in longer(setup) if n.estimate().memory.total >= need), None)
        enough = "longer sequences" if length is None else f"--seq-len {int(length.layout.seq_len)}"
        return (
            f"the run needed {gib(need)}, more than these flags say (up to {gib(memory.high)}): {enough} would explain it, or a"
            " larger micro-batch, or something else that the program holds"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures [bytes], `cause` and `headline`, `place`, `remedies` and `notes`."""
        error = self.error
        figures = {
            name: value for name, value in msgspec.to_builtins(error).items() if name not in ("stated", "engine")
        }
        where = {} if self.place is None else {"place": msgspec.to_builtins(self.place)}
        if self.place is not None and self.setup is not None:
            where["place"]["same_size"] = self.same_size(self.setup)
        named = {"cause": error.cause, "headline": error.headline, "held": error.held, **where}
        more = {"elsewhere": error.elsewhere, "notes": list(self.notes)}
        return {**named, "remedies": list(self.remedies), **figures, **more} | super().to_dict()

    def same_size(self, setup: Setup) -> str:
        """Return which tensors of a run have the size that was asked for; "" for none."""
        from loadgauge.pytorch.why.sizes import by_size

        if self.place is None or self.error.tried is None:
            return ""
        result = setup.estimate()
        tried, backward = self.error.tried, self.place.phase == "backward"
        return self.place.same_size(tried, result) or by_size(tried, result, backward)


def answer(text: str) -> OfError:
    """Return what the text of an error says. Raises ConfigError where there is no error of memory in it.

    >>> answer("slurmstepd: error: Detected 1 oom_kill event").error.cause
    "the host's memory"
    """
    error = parse(text)
    return OfError(error=error, place=place(text), verdict=error.cause)


def describe_change(change: Tried) -> dict[str, Any]:
    """Return a change and its estimated memory [bytes], as `loadgauge why --json` has it."""
    return {"flags": change.flags, "note": change.note, "memory": needs(change.result.memory)}


def changes(setup: Setup, where: Place | None) -> list[Tried]:
    """Return the changes that shrink what the traceback names and make the run fit, then those that the estimate alone advises,
    each once."""
    from loadgauge.core.plan.advise.advice import advice
    from loadgauge.core.plan.advise.try_ import try_change

    listed = (
        []
        if where is None
        else [fields for fields in where.changes if fields.get("micro_batch") != setup.layout.micro_batch]
    )
    named = [try_change(setup, fields, ROOM_FOR_IT) for fields in listed]
    fitting = [trial for trial in named if trial is not None and trial.result.memory.verdict in ("fits", "depends")]
    own = setup.estimate().memory.total
    either = [
        trial for trial in (*advice(setup)[::-1], *fitting[::-1]) if trial.result.memory.total < (1 - LEAST) * own
    ]
    return list({trial.flags: trial for trial in either}.values())[::-1]


def longer(setup: Setup) -> Iterator[Setup]:
    """Yield the run with longer sequences, by eighths of an octave, up to 16 times as long."""
    from loadgauge.core.resolve.resolve import resolve_job

    for eighth in range(1, 33 if setup.lengths is None else 1):
        length = 64 * math.ceil(setup.layout.seq_len * 2 ** (eighth / 8) / 64)
        try:
            run = resolve_job(setup.job.replace(seq_len=length), setup.model)
            run.layout.check(run.model)
        except Error:  # longer than a table of positions
            return
        yield run


def estimated(setup: Setup) -> str:
    """Return what a run needs by its estimate, at which moment, of which batch, and what of it is held for what."""
    memory, layout = setup.estimate().memory, setup.layout
    assumed = "" if setup.job.micro_batch else " (not given)"
    card = setup.job.gpu or f"a card of {setup.job.memory}"
    held = sorted(memory.parts.items(), key=lambda part: -part[1])[:MOST_PARTS]
    of = ", ".join(f"{name.replace('_', ' ')} {gib(nbytes)}" for name, nbytes in held if nbytes >= LEAST * memory.total)
    return (
        f"{gib(memory.total)} at {memory.moment}, with micro-batch {layout.micro_batch}{assumed} of {layout.seq_len:,} tokens,"
        f" {memory.verdict} on {card}: {of}"
    )


ROOM_FOR_IT = "leaves more room where it failed"
MOST_PARTS = 4
LEAST = 0.01
"""Share of the whole from which a part is named, and from which a change counts."""
