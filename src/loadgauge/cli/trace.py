"""`loadgauge trace`: what PyTorch itself would allocate, save, compute and send, with no GPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from loadgauge.cli.param_types import Whole
from loadgauge.errors import ConfigError
from loadgauge.optional_deps import needs_torch
from loadgauge.spec.axes import TRACED
from loadgauge.units import GIB, flops, gib

if TYPE_CHECKING:
    from rich.console import Console

    from loadgauge.trace.parallel.degrees import Parallel
    from loadgauge.trace.subprocess import Request
    from loadgauge.trace.trace import Trace

COUNT = Whole(1, 10**9)
SETTINGS = (
    click.option("--seq-len", type=COUNT, default=4096, show_default=True, help="Tokens of a sequence."),
    click.option("--micro-batch", type=COUNT, default=1, show_default=True, help="Sequences in one forward."),
    click.option("--accumulate", type=COUNT, default=1, show_default=True, help="Micro-batches in one optimizer step."),
    click.option(
        "--precision", metavar="NAME", default="bf16", show_default=True, help="bf16, bf16-mixed, fp16-mixed, fp32."
    ),
    click.option(
        "--optimizer",
        metavar="NAME",
        default="adamw",
        show_default=True,
        help="adamw, adamw-fused, adamw-loop, sgd, sgd-momentum, adafactor.",
    ),
    click.option("--attention", type=click.Choice(("sdpa", "eager")), default="sdpa", show_default=True),
)
CHECKPOINTING = ("none", "full")
"""What `compare` and `measure` know too."""
Command = TypeVar("Command", bound=Callable[..., Any])


def settings_options(command: Command, checkpointing: tuple[str, ...] = CHECKPOINTING) -> Command:
    """The flags that say how a model is trained, which `compare` and `measure` have too."""
    last = click.option("--checkpointing", type=click.Choice(checkpointing), default="none", show_default=True)
    for option in reversed((*SETTINGS, last)):
        command = option(command)
    return command


PARALLEL = (
    click.option("--world", "--gpus", "world", type=Whole(1, 10**6), default=1, help="Play one rank of so many."),
    click.option("--rank", type=Whole(0, 10**6), default=0, help="Which rank to play."),
    click.option("--tp", type=Whole(1, 10**6), help="Tensor-parallel ranks (DTensor)."),
    click.option("--sequence-parallel", is_flag=True, help="Share norms over tp as well."),
    click.option("--pp", type=Whole(1, 10**6), help="Pipeline stages; --accumulate micro-batches go through them."),
    click.option("--vpp", type=Whole(1, 10**6), help="Chunks of each pipeline stage."),
    click.option("--schedule", metavar="NAME", help="1f1b, gpipe, interleaved, zb-v, dualpipev."),
    click.option("--stage-layers", metavar="7,8,8,7", help="Layers of each chunk, where they are not equal."),
    click.option("--zero", type=Whole(0, 3), help="0: DDP; 2 and 3 (the default): FSDP2, fully_shard."),
    click.option("--replicas", type=Whole(1, 10**6), help="Groups that hold the same shares (HSDP)."),
)
SHARED = (*TRACED, "sequence_parallel", "schedule", "stage_layers", "zero", "replicas")
"""Flags that share out a MODEL."""


def parallel_options(command: Command) -> Command:
    """The flags that say how a model is shared out over ranks; the data-parallel ranks are what tp and pp leave."""
    for option in reversed(PARALLEL):
        command = option(command)
    return command


@click.command("trace")
@click.argument("target")
@click.option(
    "--device", type=click.Choice(("cuda", "cpu")), default="cuda", show_default=True, help="As which device."
)
@functools.partial(settings_options, checkpointing=("none", "full", "selective"))
@click.option("--keep", metavar="OP,OP", help="Operations whose results selective checkpointing keeps.")
@click.option("--layers", type=COUNT, help="Another number of layers than the model's.")
@parallel_options
@click.option("--viewer", metavar="FILE", default="", help="Write a snapshot for pytorch.org/memory_viz.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document: bytes, FLOP and plain counts.")
def command(
    target: str, as_json: bool, device: str, layers: int | None, viewer: str, world: int, rank: int,
    keep: str | None, **given: Any,
) -> None:  # fmt: skip
    """Run two training steps of TARGET on tensors without memory, and say what they would take.

    TARGET is a MODEL (a name in the catalogue, a Hugging Face config.json, or its folder), or script.py:function: a
    function that trains, or that returns a function which trains one step. Nothing is allocated and no GPU is needed;
    operations take the decisions that CUDA would take. With --world this process plays one rank of many: a script is
    parallel by itself, a MODEL is shared out by the flags, with PyTorch's own tools.

    \b
    loadgauge trace llama-3.1-8b --seq-len 8192 --checkpointing full
    loadgauge trace path/to/config.json --optimizer adamw-fused --viewer memory.pickle
    loadgauge trace train.py:main --json
    loadgauge trace llama-3.1-405b --world 1024 --tp 8 --sequence-parallel --checkpointing full
    loadgauge trace llama-3.1-70b --world 64 --tp 8 --pp 4 --accumulate 16 --rank 63
    """
    needs_torch("trace")
    from loadgauge.trace.jobs import Settings
    from loadgauge.trace.subprocess import Request, traced

    shared = {name: value for name in SHARED if (value := given.pop(name)) is not None and value is not False}
    if keep is not None:
        if given["checkpointing"] != "selective":
            raise click.UsageError("--keep goes with --checkpointing selective")
        given["keep"] = ",".join(name.strip() for name in keep.split(","))
    settings = Settings(**given)
    settings.check()
    if viewer and not Path(viewer).resolve().parent.is_dir():
        raise click.UsageError(f"--viewer: no such folder: {Path(viewer).parent}")
    parallel = _parallel(shared, world, rank, ".py:" in target)
    request = Request(target, device, settings, layers, viewer, world, rank, parallel=parallel)
    found = traced(request, shown(target, as_json))
    if not found.events:
        found = _on_cpu(request, found)
    if as_json:
        from loadgauge.report.table import document

        document(found)
    else:
        _report(found, viewer)


def _on_cpu(request: Request, found: Trace) -> Trace:
    """The trace of a script's CPU tensors, where nothing of it was on the simulated CUDA device. Raises ConfigError where
    there are none either, or where the user has asked for CUDA."""
    import msgspec

    from loadgauge.trace.subprocess import traced

    if not found.elsewhere:
        raise ConfigError("made no tensor: there is nothing to trace", file=request.target)
    if _is_given("device"):
        raise ConfigError(
            "nothing ran on the simulated CUDA device: put the model and its inputs on cuda"
            ' (torch.set_default_device("cuda")), or trace its CPU tensors with --device cpu', file=request.target
        )  # fmt: skip
    again = traced(msgspec.structs.replace(request, device="cpu"))
    note = (
        "cpu: nothing of this script was on cuda, so it was run once more and its CPU tensors are what is reported"
        ' (torch.set_default_device("cuda") traces them as on a GPU)'
    )
    return msgspec.structs.replace(again, assumed={"device": note, **again.assumed})


def _is_given(name: str) -> bool:
    """Whether a flag was typed, rather than left at its default."""
    from click.core import ParameterSource

    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def shown(target: str, as_json: bool) -> TextIO | None:
    """Where what a script prints goes: to the terminal, and beside a JSON document to standard error."""
    from loadgauge.trace.subprocess import is_script

    return None if not is_script(target) else sys.stderr if as_json else sys.stdout


def _parallel(shared: dict[str, Any], world: int, rank: int, script: bool) -> Parallel | None:
    from loadgauge.trace.parallel.degrees import Parallel

    flags = ", ".join(f"--{name.replace('_', '-')}" for name in shared)
    if shared and (script or world == 1):
        why = "are for a MODEL; a script is shared out by itself" if script else "need --world above 1"
        raise click.UsageError(f"{flags}: {why}")
    if rank >= world:
        raise click.UsageError(f"--rank {rank} is not one of {world}")
    if "stage_layers" in shared:
        numbers = [one.strip() for one in shared["stage_layers"].split(",")]
        if not all(one.isdecimal() and len(one) < 7 for one in numbers):
            raise click.UsageError(f"--stage-layers: whole numbers with commas, got {shared['stage_layers'][:40]!r}")
        shared["stage_layers"] = tuple(map(int, numbers))
    parallel = Parallel(**shared)
    if not script and world > 1:
        parallel.data(world)
    return parallel


def _report(found: Trace, viewer: str) -> None:
    from loadgauge.report.table import Column, bar, console, draw, heading, points

    target = console()
    peak = found.peak
    when = peak.phase or "preparation"
    place = " of CPU memory" if found.device == "cpu" else ""
    steps = f"step {_step(found)} of {found.steps}" if found.steps else "no optimizer step was taken"
    target.print(f"PEAK  {gib(found.allocated)}{place} in {when}, at {peak.op}{_in(peak.module)} ({steps})")
    if "device" in found.assumed:
        points(target, [found.assumed["device"]])
    rows = [
        [name, f"{nbytes / GIB:,.2f}", f"{nbytes / peak.total:.0%}", bar(target, nbytes / peak.total)]
        for name, nbytes in peak.categories.items()
    ]
    columns = [Column("at the peak"), Column("GiB", "right"), Column("", "right"), Column("", style="cyan")]
    draw(target, columns, rows, title="What is alive")
    parts = [
        [f"{piece.nbytes / GIB:,.2f}", str(piece.count), piece.category, _made(piece), "x".join(map(str, piece.shape)), piece.dtype]
        for piece in _merged(found)[:12]
    ]  # fmt: skip
    draw(
        target,
        [Column("GiB", "right"), Column("tensors", "right"), Column("as"), Column("from", wrap=True), Column("shape"),
         Column("dtype", wide=True)],
        parts, title="The largest of it",
    )  # fmt: skip
    phases = [[name or "preparation", f"{nbytes / GIB:,.2f}"] for name, nbytes in found.phases.items()]
    draw(target, [Column("phase"), Column("highest, GiB", "right")], phases, title="By phase")
    _work(target, found)
    if found.advice:
        heading(target, "Operators of loadgauge.train.fused that would keep less, and in how many modules")
        points(
            target,
            (f"{one.operator}, in {len(one.modules)}: {gib(one.saves)} less; {one.why}" for one in found.advice),
        )
    if found.hidden:
        heading(target, "Not seen by any tracer; to be added on a GPU")
        points(target, (f"{one.name}: {one.nbytes / 2**20:,.0f} MiB ({one.where} the allocator; {one.basis})"
                        if one.where == "beside" else f"{one.name}: {one.nbytes / 2**20:,.0f} MiB ({one.basis})"
                        for one in found.hidden))  # fmt: skip
    heading(target, "Assumed, and not counted")
    points(target, [f"{name}: {value}" for name, value in found.assumed.items()])
    points(target, [f"not counted: {note}" for note in found.not_counted])
    if viewer:
        target.print(f"\nwritten: {viewer} (open it at https://pytorch.org/memory_viz)")


def _work(target: Console, found: Trace) -> None:
    from loadgauge.report.table import Column, draw, heading, points

    heading(target, "Work and what is kept, of the last step")
    kernels = ", ".join(f"{name} x{count}" for name, count in found.attention.items())
    phases = ", ".join(f"{name} {flops(count)}" for name, count in found.flops.by_phase.items())
    points(
        target,
        [
            f"FLOPs: {flops(found.flops.total)}" + (f" ({phases})" if phases else ""),
            _kept(found),
            *([f"attention kernels, as CUDA would choose: {kernels}"] if kernels else []),
        ],
    )
    if found.collectives:
        rows = [[one.kind, str(one.ranks), str(one.calls), f"{one.payload / 1e9:,.3f}"] for one in found.collectives]
        columns = [Column("collective"), Column("ranks", "right"), Column("calls", "right"), Column("GB", "right")]
        draw(target, columns, rows, title="Sent in the last step, by one rank")


def _kept(found: Trace) -> str:
    """What the graph keeps: all of it, where the table of the peak has only what is alive then."""
    alive = found.peak.categories.get("saved activations", 0)
    if not found.saved and alive:
        return f"saved for a backward that never ran: {gib(alive)} at the peak (torch.no_grad() keeps nothing)"
    modules = len(found.kept)
    place = f" in {modules} module{'s' if modules > 1 else ''}" if modules else ""
    return f"saved for backward by the largest graph: {gib(found.saved_nbytes)}{place}; {gib(alive)} alive at the peak"


def _merged(found: Trace) -> list[Any]:
    """The largest pieces, those of alike modules (layer 0, layer 1, ...) together."""
    import re

    import msgspec

    merged: dict[tuple[Any, ...], Any] = {}
    for piece in found.at_peak:
        module = re.sub(r"\.\d+(?=\.|$)", ".*", piece.module)
        key = (piece.category, piece.op, module, piece.shape, piece.dtype)
        before = merged.get(key)
        count, nbytes = (before.count, before.nbytes) if before else (0, 0)
        merged[key] = msgspec.structs.replace(
            piece, module=module, count=count + piece.count, nbytes=nbytes + piece.nbytes
        )
    return sorted(merged.values(), key=lambda piece: -piece.nbytes)


def _made(piece: Any) -> str:
    return piece.module or "" if piece.op == "external" else f"{piece.op}{_in(piece.module)}"


def _in(module: str) -> str:
    return f" in {module}" if module else ""


def _step(found: Trace) -> int:
    return found.step_peaks.index(max(found.step_peaks)) + 1 if found.step_peaks else 1
