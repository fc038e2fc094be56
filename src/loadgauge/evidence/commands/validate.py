"""`loadgauge validate`: predictions compared with published runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
import msgspec

from loadgauge.core.base.errors import ConfigError

if TYPE_CHECKING:
    from loadgauge.evidence.validate.runs import Run, Runs


@click.command("validate")
@click.option(
    "--runs",
    "path",
    metavar="FILE",
    help="Your own runs: a CSV with one run per row (columns: fields of a job and what was measured, or those of"
    " tools/published_runs/README.md), rows in JSON (.jsonl), the JSON of `make gpu`, or anchor files (.toml, a folder of"
    " them); default: the published ones.",
)
@click.option("--source", multiple=True, help="Only rows of this source (the second part of the id); may be repeated.")
@click.option("--quality", default="ABC", show_default=True, help="Only rows of these qualities, such as A or AB.")
@click.option("--quantity", type=click.Choice(["time", "memory"]), help="Only step times, or only peak memory.")
@click.option("--rows/--no-rows", "show_rows", default=None, help="Print every row (default: with --runs).")
@click.option(
    "--operators", is_flag=True, help="Single operations instead of runs: the measurements behind the calibration."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document: seconds and bytes.")
def command(
    path: str | None,
    source: tuple[str, ...],
    quality: str,
    quantity: str | None,
    show_rows: bool | None,
    operators: bool,
    as_json: bool,
) -> int:
    """Predict published runs, and report how far off the predictions are.

    No measurement is an input. Values that a row does not state widen its range; a row that cannot be predicted is listed
    with the reason. Medians and percentiles weight by configuration, not by row.

    \b
    loadgauge validate --quality A
    loadgauge validate --source SM --rows
    loadgauge validate --runs my-runs.csv --json
    loadgauge validate --runs benchmarks/gpu.json
    loadgauge validate --operators
    """
    if operators:
        return _operators(as_json=as_json, alone=path is None and not source and quantity is None and show_rows is None)
    from loadgauge.evidence.published.tables import read
    from loadgauge.evidence.validate.runs import published
    from loadgauge.evidence.validate.summary import summary
    from loadgauge.evidence.validate.validate import validate

    runs = _chosen(published() if path is None else read(path), source, quality)
    quantities: Any = ("time", "memory") if quantity is None else (quantity,)
    with _progress(len(runs.runs)) as step:
        records = validate(runs, quantities, progress=step)
    if not records:
        raise ConfigError("no row of these measured a step time or a peak memory", file=path or "")
    if as_json:
        from loadgauge.core.text.table import document

        rows = [record.to_dict() for record in records]
        document({"rows": rows, "summary": summary(records), "ignored_columns": list(runs.ignored)})
    else:
        from loadgauge.evidence.text.validation import print_validation

        print_validation(records, runs, rows=bool(path) if show_rows is None else show_rows)
    return 0 if any(record.error is not None for record in records) else 2


def _operators(*, as_json: bool, alone: bool) -> int:
    """Score the measured operations."""
    from loadgauge.evidence.validate.operators import scores

    if not alone:
        raise click.UsageError("--operators needs --json alone: its measurements come with loadgauge")
    found = scores()
    if as_json:
        from loadgauge.core.text.table import document

        document({"operators": [msgspec.structs.asdict(score) for score in found]})
    else:
        from loadgauge.evidence.text.validation import print_operators

        print_operators(found)
    return 0


def _chosen(runs: Runs, sources: tuple[str, ...], quality: str) -> Runs:
    letters = quality.upper()
    if not letters or not set(letters) <= set("ABC"):
        raise ConfigError(f"must be letters of A, B and C, got {quality[:20]!r}", key="quality")
    every = letters == "ABC" or set(letters) == set("ABC")
    wanted = {name.upper() for name in sources}

    def keep(run: Run) -> bool:
        return (every or run.quality in letters) and (not wanted or run.series.upper() in wanted)

    known = {run.series for run in runs.runs}
    for name in wanted - {name.upper() for name in known}:
        raise ConfigError(f"no row has the source {name!r} (there are: {', '.join(sorted(known))})", key="source")
    rejected = () if wanted or not every else runs.rejected
    return msgspec.structs.replace(runs, runs=tuple(run for run in runs.runs if keep(run)), rejected=rejected)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], object] | None]:
    """A bar on stderr, on a terminal only."""
    if not sys.stderr.isatty() or total < 50:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("predicting", total=total)
        yield lambda: bar.advance(task)
