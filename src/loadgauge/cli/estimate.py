"""`loadgauge estimate`: does it fit, where does every byte go, how long does it take, what does it cost."""

from __future__ import annotations

from typing import Any, get_args

import click

from loadgauge.cli.options import run_options, whole_run_options
from loadgauge.errors import ConfigError
from loadgauge.estimate.memory.phases import PARTS
from loadgauge.estimate.result import When
from loadgauge.resolve.resolve import resolve_job
from loadgauge.spec.job import Job

FIGURES = ("all", "bytes", "step", "time", "roofline", "schedule")


@click.command("estimate")
@click.argument("model")
@run_options
@whole_run_options
@click.option("--json", "as_json", is_flag=True, help="One JSON document: bytes, FLOP and plain counts.")
@click.option("--explain", "part", type=click.Choice(PARTS), help="Explain one part: formula, your numbers, source.")
@click.option(
    "--at", type=click.Choice(get_args(When)), help="With --explain: the moment of the step (default: largest)."
)
@click.option("--plot", "file", type=click.Path(), metavar="FILE", help="Draw the estimate: .svg, .png or .pdf.")
@click.option(
    "--figure", type=click.Choice(FIGURES), default="all", help="Which figure --plot draws (all on one sheet)."
)
def command(
    model: str, as_json: bool, part: str | None, at: When | None, file: str | None, figure: str, **flags: Any
) -> int:
    """Estimate the memory of the fullest rank at its peak, FLOPs, time and cost of training MODEL.

    MODEL is a name in the catalogue (`loadgauge models`), a Hugging Face config.json, its folder, or another tool's job
    file, whose run the flags change (`loadgauge convert --help` lists the tools). Flags that are not given have
    defaults, which are listed. Exit code: 0 it fits (or no --gpu is given), 1 it does not, 2 cannot tell.

    \b
    loadgauge estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3
    loadgauge estimate llama-3.1-70b --gpu h100-sxm5-80gb --gpus 64 --tp 8 --pp 2 --sequence-parallel \\
        --global-batch 512 --tokens 1T --price 2.50
    loadgauge estimate my-model/config.json --gpu rtx4090 --qlora --loss chunked
    """
    if file is None and figure != "all":
        raise ConfigError("--figure says what --plot FILE draws; there is no --plot")
    if part is None and at is not None:
        raise ConfigError("--at chooses the moment that --explain PART explains; there is no --explain")
    given = resolve_job(Job(model=model, **flags))
    result = given.estimate()
    if file is not None:
        from pathlib import Path

        from loadgauge.plot.sheet import plot

        plot(given, result, Path(file), figure)
    code = 1 if result.memory.fits is False else 0
    if as_json:
        from loadgauge.report.document import estimate_document
        from loadgauge.report.table import document

        document(estimate_document(given, result, part, at or "largest"))
    elif part is not None:
        from loadgauge.report.explanation import show

        show(result.explain(part, at or "largest"))
    else:
        from loadgauge.report.estimate import report

        report(given, result)
    return code
