"""Measured training steps as text: what `loadgauge measure` prints."""

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base.units import MIB, flops, gib, in_gib
from loadgauge.core.text.table import Column, Paper, draw, points, section

MOST_MODULES, MOST_OPS = 15, 8


def write(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write measured steps; brief: the memory alone."""
    measured, peak = answer.shown
    points(target, [f"PEAK  {gib(measured.peak, 3)} on {measured.device} (PyTorch {measured.torch})"], "")
    sizes = {"forward and backward, at most": measured.backward_peak, "optimizer step, at most": measured.step_peak}
    sizes |= measured.states
    if measured.reserved is not None and measured.device_total is not None:
        sizes |= {
            "reserved by the allocator": measured.reserved,
            "on the device, of all processes": measured.device_total,
        }
    rows = [[in_gib(nbytes, 3), name] for name, nbytes in sizes.items()]
    draw(target, [Column("GiB", "right"), Column("allocated")], rows, title="What it takes")
    if brief:
        return
    if measured.held:
        rows = [
            [f"{nbytes / MIB:,.1f}", f"{nbytes / measured.peak:.0%}", op]
            for op, nbytes in list(measured.by_op().items())[:MOST_OPS]
        ]
        columns = [Column("MiB", "right"), Column("", "right"), Column("made by")]
        draw(target, columns, rows, title="Alive at the peak, beside what was made before the training")
    if measured.scratch:
        points(target, [f"not counted: {scratch_note(measured.scratch, measured.scratch_ops)}"])
    again = "" if measured.flops == measured.model_flops else f", {flops(measured.model_flops)} of them the model's"
    work = [f"FLOPs of a step: {flops(measured.flops)}{again}"]
    if measured.step and measured.flops_per_second:
        share = measured.mfu(peak) if peak else None
        mfu = "" if share is None else f", MFU {share:.1%}" if share >= 0.001 else f", MFU {share:.1e}"
        work.append(
            f"a step takes {measured.step:.3g} s (median of {len(measured.seconds)}), {flops(measured.flops_per_second)}/s{mfu}"
        )
    if measured.overhead is not None:
        cost = f"{measured.overhead:+.0%}" if measured.overhead > 0 else "no more"
        work.append(f"with the instruments that take memory it took {measured.watched:.3g} s ({cost})")
    work += [f"FLOPs of {name} are not counted" for name in measured.uncounted]
    section(target, "Work", work)
    ordered = sorted(measured.modules.items(), key=lambda item: -item[1].peak)
    if ordered:
        rows = [
            [f"{use.peak / MIB:,.2f}", f"{use.persistent / MIB:,.2f}", name] for name, use in ordered[:MOST_MODULES]
        ]
        columns = [Column("peak, MiB", "right"), Column("stays, MiB", "right"), Column("forward of", wrap=True)]
        more = f", {MOST_MODULES} of {len(ordered)} (--json: all)" if len(ordered) > MOST_MODULES else ""
        draw(target, columns, rows, title=f"Modules that take most, beside what was there{more}")


def scratch_note(nbytes: int, ops: tuple[str, ...]) -> str:
    """Return a note on the part of the CPU allocator's peak that is scratch memory of kernels, not the model's [bytes].

    >>> scratch_note(3 * MIB, ("aten::mm",))
    "scratch of this CPU's kernels (inside aten::mm); with it the CPU allocator's peak is 3.0 MiB higher"
    """
    inside = f" (inside {', '.join(ops)})" if ops else ""
    return f"scratch of this CPU's kernels{inside}; with it the CPU allocator's peak is {nbytes / MIB:,.1f} MiB higher"
