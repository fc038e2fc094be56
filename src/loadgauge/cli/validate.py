"""`loadgauge validate`: predicted against published runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
import msgspec

from loadgauge.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from loadgauge.validate.runs import Run, Runs
    from loadgauge.validate.summary import Errors
    from loadgauge.validate.validate import Record

UNITS = {"time": (1.0, "s"), "memory": (2.0**30, "GiB")}


@click.command("validate")
@click.option(
    "--runs",
    "path",
    metavar="FILE",
    help="Your own runs: a CSV with a row each, or the JSON of `make gpu`; default: the published ones.",
)
@click.option("--source", multiple=True, help="Only rows of this source (the second part of the id); may be repeated.")
@click.option("--quality", default="ABC", show_default=True, help="Only rows of these qualities, such as A or AB.")
@click.option("--quantity", type=click.Choice(["time", "memory"]), help="Only step times, or only peak memory.")
@click.option("--rows/--no-rows", "show_rows", default=None, help="Print every row (default: with --runs).")
@click.option("--json", "as_json", is_flag=True, help="One JSON document: seconds and bytes.")
def command(
    path: str | None, source: tuple[str, ...], quality: str, quantity: str | None, show_rows: bool | None, as_json: bool
) -> int:
    """Predict runs whose measurements are published, and say how far off the predictions are.

    Nothing measured is an input. What a row does not state is a range; a row that cannot be expressed says why. Medians
    and percentiles weight by configuration, not by row.

    \b
    loadgauge validate --quality A
    loadgauge validate --source SM --rows
    loadgauge validate --runs my-runs.csv --json
    loadgauge validate --runs benchmarks/gpu.json
    """
    from loadgauge.validate.runs import published, read
    from loadgauge.validate.summary import summary
    from loadgauge.validate.validate import validate

    runs = _chosen(published() if path is None else read(path), source, quality)
    quantities: Any = ("time", "memory") if quantity is None else (quantity,)
    with _progress(len(runs.runs)) as step:
        records = validate(runs, quantities, progress=step)
    if not records:
        raise ConfigError("no row of these measured a step time or a peak memory", file=path or "")
    if as_json:
        from loadgauge.report.table import document

        rows = [record.to_dict() for record in records]
        document({"rows": rows, "summary": summary(records), "ignored_columns": list(runs.ignored)})
    else:
        _report(records, runs, bool(path) if show_rows is None else show_rows)
    return 0 if any(record.error is not None for record in records) else 2


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


def _report(records: Sequence[Record], runs: Runs, show_rows: bool) -> None:
    from loadgauge.report.table import console, points
    from loadgauge.validate.summary import reasons

    target = console()
    for quantity in ("time", "memory"):
        of = [record for record in records if record.quantity == quantity]
        if of:
            if show_rows:
                _rows(target, of, quantity)
            _table(target, of, quantity, runs)
    missing = reasons(records)
    if missing:
        from loadgauge.report.table import heading

        heading(target, "Not predicted")
        points(target, [f"{count} x {reason}" for reason, count in missing.items()])
    notes = [
        "median, p90: of the absolute error, each configuration weighing the same; bias: median of the signed error",
    ]
    if any(record.assumed for record in records):
        notes.append("what rows do not state is assumed by rule and widens their range; --json lists it for each row")
    if runs.ignored:
        notes.append(f"columns that were not read: {', '.join(runs.ignored)}")
    target.print()
    points(target, notes)


def _rows(target: Console, records: Sequence[Record], quantity: str) -> None:
    from loadgauge.report.table import Column, draw

    unit, name = UNITS[quantity]

    def number(value: float | None) -> str:
        return "" if value is None else f"{value / unit:,.3g}" if value / unit < 100 else f"{value / unit:,.0f}"

    columns = [
        Column("row"), Column(f"measured {name}", "right"), Column(f"predicted {name}", "right"),
        Column("low", "right", wide=True), Column("high", "right", wide=True), Column("error", "right"),
        Column("why there is no prediction", wrap=True),
    ]  # fmt: skip
    draw(
        target, columns,
        [
            [
                record.id, number(record.measured), number(record.predicted), number(record.low), number(record.high),
                _percent(record.error, "+"), record.reason,
            ]
            for record in records
        ],
        title={"time": "Step time, row by row", "memory": "Peak memory, row by row"}[quantity],
    )  # fmt: skip


def _table(target: Console, records: Sequence[Record], quantity: str, runs: Runs) -> None:
    from loadgauge.report.table import Column, draw
    from loadgauge.validate.baseline import baseline, rescaled
    from loadgauge.validate.summary import errors, grouped

    columns = [
        Column(""), Column("rows", "right"), Column("predicted", "right"), Column("configurations", "right", wide=True),
        Column("median", "right"), Column("p90", "right"), Column("bias", "right"),
    ]  # fmt: skip
    lines = [_line("all", errors(records))]
    by_quality = grouped(records, lambda record: record.quality)
    if len(by_quality) > 1:
        lines += [_line(f"quality {name or '-'}", errors(group)) for name, group in sorted(by_quality.items())]
    strong = range(len(lines))
    by_source = grouped(records, lambda record: record.source)
    lines += [_line(name, errors(group)) for name, group in sorted(by_source.items())] if len(by_source) > 1 else []
    if quantity == "time":
        constant = baseline(records, runs.runs)
        if constant:
            lines.append(_line("one constant and the bubble", errors(constant)))
        own = rescaled(records)
        if own:
            lines.append(_line("after one run of one's own", errors(own)))
    title = {"time": "Step time", "memory": "Peak memory"}[quantity]
    draw(target, columns, lines, title=title, strong=tuple(strong))


def _line(name: str, found: Errors) -> list[str]:
    return [
        name,
        str(found.rows),
        str(found.expressible),
        str(found.configurations),
        _percent(found.median),
        _percent(found.p90),
        _percent(found.bias, "+"),
    ]


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{100 * value:{sign}.1f} %"
