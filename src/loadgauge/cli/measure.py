"""`loadgauge measure`: what training steps that really run take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from loadgauge.cli.param_types import Whole
from loadgauge.cli.torch_options import STEP, TorchCommand, job_options, make_job, script_output
from loadgauge.optional_deps import needs_torch
from loadgauge.units import MIB, flops, gib, in_gib

if TYPE_CHECKING:
    from loadgauge.measure.train_steps import MeasuredSteps

MOST_MODULES, MOST_OPS = 15, 8
PEAKS = {"fp32": "tf32", "bf16-pure": "bf16", "bf16-autocast": "bf16", "fp16-autocast": "fp16"}
"""The peak FLOP/s of a GPU that a precision can reach; PyTorch uses TF32 only on request."""


@click.command("measure", cls=TorchCommand)
@click.argument("target")
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True, help="Where it runs.")
@job_options(STEP)
@click.option("--steps", type=Whole(0, 1000), default=3, show_default=True, help="Steps to time.")
@click.option("--gpu", metavar="GPU", help="Whose peak FLOP/s MFU is a share of (`loadgauge gpus` lists them).")
@click.option("--json", "as_json", is_flag=True, help="One JSON document: bytes, seconds, FLOP and plain counts.")
def command(
    target: str, as_json: bool, device: str, layers: int | None, steps: int, gpu: str | None, **given: Any
) -> None:
    """Train TARGET for some steps, and measure them: peak and what stays, by module; seconds, FLOP/s, MFU.

    TARGET is a MODEL, with random weights, or script.py:function (see `loadgauge trace`). The steps that are timed run
    without any instrument.

    \b
    loadgauge measure gpt2 --seq-len 128 --layers 2
    loadgauge measure train.py:main --device cuda --gpu h100-sxm5-80gb
    """
    needs_torch("measure")
    from loadgauge.measure.train_steps import measure_request
    from loadgauge.spec.hardware import gpu as find_gpu
    from loadgauge.trace.subprocess import Request, in_child
    from loadgauge.trace.torch_run import TorchRun

    job = make_job(target, **given)
    precision = TorchRun.of(job).training.precision.name
    peak = None if gpu is None else find_gpu(gpu).peak(PEAKS[precision])
    request = Request(job, device, layers)
    measured = in_child(measure_request, request, script_output(target, as_json), timed=steps)
    if as_json:
        import msgspec

        from loadgauge.report.table import document

        more = {"step": measured.step, "flops_per_second": measured.flops_per_second, "overhead": measured.overhead}
        document({**msgspec.to_builtins(measured), **more, "mfu": measured.mfu(peak) if peak else None})
    else:
        _report(measured, peak)


def _report(measured: MeasuredSteps, peak: float | None) -> None:
    from loadgauge.report.table import Column, console, draw, heading, points

    target = console()
    target.print(f"PEAK  {gib(measured.peak, 3)} on {measured.device} (PyTorch {measured.torch})")
    sizes = {"forward and backward, at most": measured.backward_peak, "optimizer step, at most": measured.step_peak}
    sizes |= measured.states
    if measured.reserved is not None and measured.device_total is not None:
        sizes |= {
            "reserved by the allocator": measured.reserved,
            "on the device, of all processes": measured.device_total,
        }
    rows = [[in_gib(nbytes, 3), name] for name, nbytes in sizes.items()]
    draw(target, [Column("GiB", "right"), Column("allocated")], rows, title="What it takes")
    if measured.held:
        rows = [
            [f"{nbytes / MIB:,.1f}", f"{nbytes / measured.peak:.0%}", op]
            for op, nbytes in list(measured.by_op().items())[:MOST_OPS]
        ]
        columns = [Column("MiB", "right"), Column("", "right"), Column("made by")]
        draw(target, columns, rows, title="Alive at the peak, beside what was made before the training")
    if measured.scratch:
        points(target, [f"not counted: {scratch_note(measured.scratch, measured.scratch_ops)}"])
    heading(target, "Work")
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
    points(target, work)
    ordered = sorted(measured.modules.items(), key=lambda item: -item[1].peak)
    if not ordered:
        return
    rows = [[f"{use.peak / MIB:,.2f}", f"{use.persistent / MIB:,.2f}", name] for name, use in ordered[:MOST_MODULES]]
    columns = [Column("peak, MiB", "right"), Column("stays, MiB", "right"), Column("forward of", wrap=True)]
    more = f", {MOST_MODULES} of {len(ordered)} (--json: all)" if len(ordered) > MOST_MODULES else ""
    draw(target, columns, rows, title=f"Modules that take most, beside what was there{more}")


def scratch_note(nbytes: int, ops: tuple[str, ...]) -> str:
    """What of the CPU allocator's peak is not the model's.

    >>> scratch_note(3 * MIB, ("aten::mm",))
    "scratch of this CPU's kernels (inside aten::mm); with it the CPU allocator's peak is 3.0 MiB higher"
    """
    inside = f" (inside {', '.join(ops)})" if ops else ""
    return f"scratch of this CPU's kernels{inside}; with it the CPU allocator's peak is {nbytes / MIB:,.1f} MiB higher"
