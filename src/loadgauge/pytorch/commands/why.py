"""`loadgauge why`: what held the memory when it ran out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from loadgauge.core.base.optional_deps import needs_torch
from loadgauge.core.command_line.options.grouped import Grouped
from loadgauge.core.command_line.options.options import run_options
from loadgauge.core.command_line.options.param_types import Whole
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.text.table import document as print_document
from loadgauge.pytorch.text import why as report
from loadgauge.pytorch.why.answer import Answer, answer, changes as list_changes, estimated
from loadgauge.pytorch.why.causes import NEEDS
from loadgauge.pytorch.why.files import LARGEST_TEXT, content_of, is_pickle, read_stdin
from loadgauge.pytorch.why.message import tells_of_memory

if TYPE_CHECKING:
    from loadgauge.core.resolve.setup import Setup


def _run_options(command: Any) -> Any:
    """Return the command with the options of a run; `--model` is its own."""
    return run_options(command, "base_model")


@click.command("why", cls=Grouped)
@click.argument("file", default="-")
@click.option("--gpu-index", default=0, show_default=True, type=Whole(0, 10**6), help="Which device of a snapshot.")
@click.option(
    "--model", metavar="MODEL", help="What was trained: changes are then estimated too, with the flags of the run."
)
@_run_options
@click.option("--json", "as_json", is_flag=True, help="One JSON document, in bytes.")
def command(file: str, gpu_index: int, model: str | None, as_json: bool, **flags: Any) -> None:
    """Say what held the memory when it ran out, and what would free it.

    FILE is the text of an out-of-memory error ("-", or nothing: from standard input, up to 256 MB; or the error itself, in
    quotes), a snapshot that `torch.cuda.memory._dump_snapshot` has written, or what `loadgauge trace --json` says.

    The traceback before the error says in which phase memory ran out, and for which tensor. A snapshot is a pickle; it is
    read without running anything in it. With --model and the flags of `estimate` that describe the run, every change that
    would make it fit is estimated.

    \b
    loadgauge why error.txt
    loadgauge why snapshot.pickle --model llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3 --seq-len 8192
    """
    setup = _resolve(model, flags)
    document, print_text, found = _read(file, gpu_index)
    if not as_json:
        print_text()
    changes = [] if setup is None else list_changes(setup, None if found is None else found.place)
    if setup is not None and found is not None and found.place is not None:
        document["place"]["same_size"] = size = found.same_size(setup)
        if size and not as_json:
            report.print_size(found.error.tried or 0, size)
    if as_json:
        if setup is not None:
            document["estimated"] = estimated(setup)
            document["changes"] = [report.describe_change(change) for change in changes]
        print_document(document)
    elif setup is not None:
        report.print_changes(estimated(setup), changes)
    elif found is not None and found.error.cause == NEEDS:
        report.print_next(file if file != "-" and Path(file).exists() else "FILE")


def _resolve(model: str | None, flags: dict[str, Any]) -> Setup | None:
    """The run that the flags describe; None where no model is named."""
    if model is None:
        given = [name for name, value in flags.items() if value not in (None, False)]
        if given:
            raise click.UsageError(f"--{given[0].replace('_', '-')} describes a run, which needs --model")
        return None
    if flags["gpu"] is None and flags["memory"] is None:
        raise click.UsageError("--model needs --gpu or --memory, to say what would fit")
    from loadgauge.core.resolve.resolve import resolve_job

    return resolve_job(Job(model=model, **flags))


def _read(file: str, gpu_index: int) -> tuple[dict[str, Any], Callable[[], None], Answer | None]:
    """Return what a file says: as a document, and a function that prints it as text; with the answer to an error's text."""
    path = Path(file)
    said = not path.exists() and tells_of_memory(file)  # the error itself, typed
    if not said and file != "-" and is_pickle(path):
        from loadgauge.pytorch.why.diagnose import of_file

        snapshot, findings = of_file(path, gpu_index)
        return (
            {**msgspec.to_builtins(snapshot), **msgspec.to_builtins(findings)},
            partial(report.print_snapshot, snapshot, findings),
            None,
        )
    text = (
        file
        if said
        else read_stdin()
        if file == "-"
        else content_of(path, LARGEST_TEXT).decode("utf-8", errors="replace")
    )
    if file != "-" and not said and text.startswith("{") and '"at_peak"' in text:
        needs_torch("why")
        from loadgauge.pytorch.why.diagnose import of_trace, read_trace
        from loadgauge.pytorch.why.remedies import retrace

        trace = read_trace(text, path)
        findings, retraced = of_trace(trace), retrace(trace)
        document = {
            **msgspec.to_builtins(findings),
            "peak": trace.peak.total,
            "retraced": msgspec.to_builtins(retraced),
        }
        return document, partial(report.print_trace_causes, trace, findings, retraced), None
    found = answer(text)
    return found.document(), partial(report.print_error, found), found
