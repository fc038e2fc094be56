"""`loadgauge compare`: formula, trace and measurement side by side."""

from typing import Any

import click
import msgspec

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base.optional_deps import needs_torch
from loadgauge.core.command_line.options.answering import answering
from loadgauge.core.command_line.options.options import complete_model
from loadgauge.core.command_line.options.spoken import Spoken
from loadgauge.core.definitions.job.flag_types import STEP
from loadgauge.core.definitions.job.job import Job
from loadgauge.pytorch.commands.torch_options import job_options


@click.command("compare", cls=Spoken)
@click.argument("target", shell_complete=complete_model)
@click.option(
    "--device", type=click.Choice(("cuda", "cpu")), default="cuda", show_default=True, help="Device to simulate."
)
@job_options(STEP)
@click.option(
    "--measure", type=click.Choice(("cpu", "cuda")), help="Run two real steps there too (the model must fit)."
)
@answering("the three columns", document="bytes, FLOP and plain counts")
def command(target: str, device: str, layers: int | None, measure: str | None, **fields: Any) -> Answer:
    """Three ways to know what TARGET takes: by formula, by tracing PyTorch, by running it. TARGET is a MODEL.

    Every difference over 1 % is attributed to operations.

    \b
    loadgauge compare llama-3.1-8b --seq-len 8192 --recompute full
    loadgauge compare path/to/config.json --device cpu --measure cpu --seq-len 256 --layers 2
    """
    needs_torch("compare")
    from loadgauge.pytorch.compare.compare import compare_request
    from loadgauge.pytorch.trace.subprocess import Request, in_child
    from loadgauge.pytorch.trace.torch_run import TorchRun

    job = Job(model=target, **fields)
    TorchRun.of(job)  # raises in this process
    comparison = in_child(compare_request, Request(job, device, layers), measure=measure or "", timed=0)
    return Answer(
        form="compare.ways",
        writer="loadgauge.pytorch.text.compare:write",
        shown=comparison,
        document=lambda: msgspec.to_builtins(comparison),
        table=[msgspec.structs.asdict(row) for row in comparison.rows],
        not_counted=comparison.not_counted,
    )
