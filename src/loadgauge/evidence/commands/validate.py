"""`loadgauge validate`: predictions compared with published runs."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import click
import msgspec

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.answers.plan.progress import clear, progress
from loadgauge.core.base.errors import CANNOT_TELL, YES, ConfigError
from loadgauge.core.command_line.options.answering import answering, refuse
from loadgauge.core.text.show import BLOCKS

if TYPE_CHECKING:
    from loadgauge.evidence.validate.runs import Runs


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
@answering(document="seconds and bytes")
def command(
    path: str | None,
    source: tuple[str, ...],
    quality: str,
    quantity: str | None,
    show_rows: bool | None,
    operators: bool,
) -> Answer:
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
        refuse(
            {"runs": path, "source": source, "quantity": quantity, "rows": show_rows},
            "is of runs; leave out --operators",
        )
        return _operators()
    from loadgauge.evidence.published.tables import read
    from loadgauge.evidence.validate.runs import published
    from loadgauge.evidence.validate.summary import summary
    from loadgauge.evidence.validate.validate import validate

    runs = _chosen(published() if path is None else read(path), source, quality)
    quantities: Any = ("time", "memory") if quantity is None else (quantity,)
    numbers = count(1)
    records = validate(runs, quantities, progress=lambda: progress(next(numbers), len(runs.runs), "runs"))
    clear()
    if not records:
        raise ConfigError("no row of these measured a step time or a peak memory", file=path or "")
    rows = [record.to_dict() for record in records]
    return Answer(
        form="validate.runs",
        writer="loadgauge.evidence.text.validation:write",
        shown=(records, runs, bool(path) if show_rows is None else show_rows),
        document=lambda: {"rows": rows, "summary": summary(records), "ignored_columns": list(runs.ignored)},
        table=[{name: value for name, value in row.items() if name != "assumed"} for row in rows],
        pivots=(Pivot("Rows that are not predicted", "summary.reasons", "reasons", "of"),),
        code=YES if any(record.error is not None for record in records) else CANNOT_TELL,
    )


def _operators() -> Answer:
    """Score the measured operations."""
    from loadgauge.evidence.text.validation import operator_blocks
    from loadgauge.evidence.validate.operators import scores

    scores_of_kernels = scores()
    return Answer(
        form="validate.operators",
        writer=BLOCKS,
        shown=operator_blocks(scores_of_kernels),
        document={"operators": [msgspec.structs.asdict(score) for score in scores_of_kernels]},
        pivots=(Pivot("Median error", "operators.median", "kind", "gpu"),),
    )


def _chosen(runs: Runs, sources: tuple[str, ...], quality: str) -> Runs:
    letters = quality.upper()
    if not letters or not set(letters) <= set("ABC"):
        raise ConfigError(f"must be letters of A, B and C, got {quality[:20]!r}", key="quality")
    every = letters == "ABC" or set(letters) == set("ABC")
    wanted = {name.upper() for name in sources}
    series = {run.series for run in runs.runs}
    for name in wanted - {name.upper() for name in series}:
        raise ConfigError(f"no row has the source {name!r} (there are: {', '.join(sorted(series))})", key="source")
    rejected = () if wanted or not every else runs.rejected
    kept = tuple(
        run for run in runs.runs if (every or run.quality in letters) and (not wanted or run.series.upper() in wanted)
    )
    return msgspec.structs.replace(runs, runs=kept, rejected=rejected)
