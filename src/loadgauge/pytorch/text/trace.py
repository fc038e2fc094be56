"""A trace as text: what `loadgauge trace` prints, and `print` of a `Trace`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.base.units import flops, gib, in_gib
from loadgauge.core.text.table import Column, Paper, draw, plain, points, section
from loadgauge.pytorch.record.allocations import any_layer
from loadgauge.pytorch.text.capture import alive, by_phase

if TYPE_CHECKING:
    from loadgauge.pytorch.trace.result import Trace


def answer_of(trace: Trace, viewer: str = "") -> Answer:
    """Return the answer that a trace is. viewer: path of the snapshot written, if any"""
    return Answer(
        form="trace.steps",
        writer="loadgauge.pytorch.text.trace:write",
        shown=(trace, viewer),
        document=lambda: msgspec.to_builtins(trace),
        pivots=(
            Pivot("Alive at the peak", "peak.categories", "categories", "of"),
            Pivot("Highest, by phase", "phases", "phases", "of"),
        ),
        assumed=trace.assumed,
        not_counted=trace.not_counted,
    )


def text(trace: Trace) -> str:
    """Return the text of `loadgauge trace`, without the last line break."""
    return plain(answer_of(trace).text)


def write(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write a trace; brief: the peak, and what is alive at it."""
    trace, viewer = answer.shown
    peak = trace.peak
    when = peak.phase or "preparation"
    memory = " of CPU memory" if trace.device == "cpu" else ""
    steps = f"step {_step_of_peak(trace)} of {trace.steps}" if trace.steps else "no optimizer step was taken"
    points(
        target, [f"PEAK  {gib(trace.allocated)}{memory} in {when}, at {peak.op}{_inside(peak.module)} ({steps})"], ""
    )
    if "subject" in trace.assumed:
        target.print(f"Run on {trace.assumed['subject']}")
    if "device" in trace.assumed:
        points(target, [trace.assumed["device"]])
    alive(target, peak.categories)
    if brief:
        return
    draw(
        target,
        [
            Column("GiB", "right"),
            Column("tensors", "right"),
            Column("as"),
            Column("from", wrap=True),
            Column("shape"),
            Column("dtype", wide=True),
        ],
        [
            [
                in_gib(piece.nbytes),
                str(piece.count),
                piece.category,
                _origin(piece),
                "x".join(map(str, piece.shape)),
                piece.dtype,
            ]
            for piece in _merged(trace)[:12]
        ],
        title="The largest of it",
    )
    by_phase(target, trace.phases)
    _print_work(target, trace)
    section(
        target,
        "Operators of loadgauge.train.fused that would keep less, and in how many modules",
        [
            f"{advice.operator}, in {len(advice.modules)}: {gib(advice.saves)} less; {advice.why}"
            for advice in trace.advice
        ],
    )
    outside = {"beside": "outside the allocator; "}
    section(
        target,
        "Not seen by any tracer; to be added on a GPU",
        [
            f"{line.name}: {line.nbytes / 2**20:,.0f} MiB ({outside.get(line.where, '')}{line.basis})"
            for line in trace.hidden
        ],
    )
    section(
        target,
        "Assumed, and not counted",
        [
            *(f"{name}: {value}" for name, value in trace.assumed.items()),
            *(f"not counted: {note}" for note in trace.not_counted),
        ],
    )
    if viewer:
        target.print(f"\nwritten: {viewer} (open it at https://pytorch.org/memory_viz)")


def _print_work(target: Paper, trace: Trace) -> None:
    kernels = ", ".join(f"{name} x{count}" for name, count in trace.attention.items())
    phases = ", ".join(f"{name} {flops(count)}" for name, count in trace.flops.by_phase.items())
    section(
        target,
        "Work and what is kept, of the last step",
        [
            f"FLOPs: {flops(trace.flops.total)}" + (f" ({phases})" if phases else ""),
            _saved_line(trace),
            *([f"attention kernels, as CUDA would choose: {kernels}"] if kernels else []),
        ],
    )
    if trace.collectives:
        draw(
            target,
            [Column("collective"), Column("ranks", "right"), Column("calls", "right"), Column("GB", "right")],
            [[sent.kind, str(sent.ranks), str(sent.calls), f"{sent.payload / 1e9:,.3f}"] for sent in trace.collectives],
            title="Sent in the last step, by one rank",
        )


def _saved_line(trace: Trace) -> str:
    """Return what the graph keeps: all of it, where the table of the peak has only what is alive then."""
    alive = trace.peak.categories.get("saved activations", 0)
    if not trace.saved and alive:
        return f"saved for a backward that never ran: {gib(alive)} at the peak (torch.no_grad() keeps nothing)"
    modules = len(trace.kept)
    inside = f" in {modules} module{'s' if modules > 1 else ''}" if modules else ""
    return f"saved for backward by the largest graph: {gib(trace.saved_nbytes)}{inside}; {gib(alive)} alive at the peak"


def _merged(trace: Trace) -> list[Any]:
    """The largest pieces, those of alike modules (layer 0, layer 1, ...) together."""
    merged: dict[tuple[Any, ...], Any] = {}
    for piece in trace.at_peak:
        module = any_layer(piece.module)
        key = (piece.category, piece.op, module, piece.shape, piece.dtype)
        before = merged.get(key)
        count, nbytes = (before.count, before.nbytes) if before else (0, 0)
        merged[key] = msgspec.structs.replace(
            piece, module=module, count=count + piece.count, nbytes=nbytes + piece.nbytes
        )
    return sorted(merged.values(), key=lambda piece: -piece.nbytes)


def _origin(piece: Any) -> str:
    return piece.module or "" if piece.op == "external" else f"{piece.op}{_inside(piece.module)}"


def _inside(module: str) -> str:
    return f" in {module}" if module else ""


def _step_of_peak(trace: Trace) -> int:
    return trace.step_peaks.index(max(trace.step_peaks)) + 1 if trace.step_peaks else 1
