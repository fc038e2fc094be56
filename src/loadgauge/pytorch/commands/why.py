"""`loadgauge why`: what held the memory when it ran out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from loadgauge.core.base.errors import refuse
from loadgauge.core.base.optional_deps import needs_torch
from loadgauge.core.command_line.options.answering import answering
from loadgauge.core.command_line.options.grouped import Grouped
from loadgauge.core.command_line.options.options import run_options
from loadgauge.core.command_line.options.param_types import Whole
from loadgauge.core.definitions.job.job import Job
from loadgauge.pytorch.why.answer import Diagnosis, OfError, answer, of_recording, of_snapshot
from loadgauge.pytorch.why.files import LARGEST_TEXT, content_of, is_pickle, read_stdin
from loadgauge.pytorch.why.message import tells_of_memory

if TYPE_CHECKING:
    from loadgauge.core.resolve.setup import Setup


def _run_options(command: Any) -> Any:
    """Return the command with the options of a run; `--model` is its own."""
    return run_options(command, "base_model")


@click.command("why", cls=Grouped)
@click.argument("file", default="-")
@click.argument("run", required=False, metavar="[MODEL]")
@click.option("--gpu-index", default=0, show_default=True, type=Whole(0, 10**6), help="Which device of a snapshot.")
@click.option(
    "--model", metavar="MODEL", help="What was trained: changes are then estimated too, with the flags of the run."
)
@_run_options
@answering("the cause, and what to do", document="bytes")
def command(file: str, run: str | None, gpu_index: int, model: str | None, **flags: Any) -> Diagnosis:
    """Say what held the memory when it ran out, and what would free it.

    FILE is the text of an out-of-memory error ("-", or nothing: from standard input, up to 256 MB; or the error itself, in
    quotes), a snapshot that `torch.cuda.memory._dump_snapshot` has written, or what `loadgauge trace --json` says.

    The traceback before the error says in which phase memory ran out, and for which tensor. A snapshot is a pickle; it is
    read without running anything in it. With MODEL (or --model), a model or the job file that ran, and the flags of `estimate`
    that describe the run, every change that would make it fit is estimated; the size of the GPU is the error's, where neither
    --gpu nor --memory says it.

    \b
    loadgauge why error.txt
    loadgauge why error.txt train.py
    loadgauge why snapshot.pickle --model llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3 --seq-len 8192
    """
    if run is not None and _is_evidence(run) and not _is_evidence(file):
        file, run = run, file
    if model is not None and run is not None:
        raise click.UsageError(f"{run} and --model {model}: the run is described once")
    model = model or run
    if model is None:
        _resolve(None, flags)
    diagnosis = _read(file, gpu_index)
    capacity = diagnosis.error.capacity if isinstance(diagnosis, OfError) else None
    if model is not None and capacity and flags["gpu"] is None and flags["memory"] is None:
        flags["memory"] = f"{capacity / 2**30:.4g}GiB"  # as the error has it
    return msgspec.structs.replace(diagnosis, setup=_resolve(model, flags))


def _resolve(model: str | None, flags: dict[str, Any]) -> Setup | None:
    """The run that the flags describe; None where no model is named."""
    if model is None:
        flags_set = [name for name, value in flags.items() if value not in (None, False)]
        if flags_set:
            raise click.UsageError(f"--{flags_set[0].replace('_', '-')} describes a run, which needs --model")
        return None
    if flags["gpu"] is None and flags["memory"] is None:
        raise click.UsageError("--model needs --gpu or --memory, to say what would fit")
    from loadgauge.core.resolve.resolve import resolve_job  # with all of the estimate

    return resolve_job(Job(model=model, **flags))


def _is_evidence(file: str) -> bool:
    """Return whether a file says why memory ran out, rather than what ran."""
    path = Path(file)
    if not os.path.isfile(file):
        return False
    return is_pickle(path) or tells_of_memory(content_of(path, LARGEST_TEXT).decode("utf-8", errors="replace"))


def _read(file: str, gpu_index: int) -> Diagnosis:
    """Return what a file says, or the text of an error in place of its name."""
    if tells_of_memory(file) and not os.path.exists(file):  # which a text too long for a name does not upset
        return answer(file)
    path = Path(file)
    if file == "-":
        return answer(read_stdin())
    refuse(
        not os.path.exists(file),
        f"{file[:80]!r} is neither a file nor an out-of-memory error; give the error's text, or its file",
    )
    if is_pickle(path):
        return of_snapshot(path, gpu_index)
    text = content_of(path, LARGEST_TEXT).decode("utf-8", errors="replace")
    if text.startswith("{") and '"at_peak"' in text:
        needs_torch("why")
        from loadgauge.pytorch.why.diagnose import read_trace

        return of_recording(read_trace(text, path))
    diagnosis: OfError = msgspec.structs.replace(answer(text), file=file)
    return diagnosis
