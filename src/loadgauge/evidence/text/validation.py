"""Predictions compared with measured runs, as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loadgauge.core.answers.answer import Answer
from loadgauge.core.text.table import Column, Notes, Paper, Table, draw, points, section
from loadgauge.evidence.validate.baseline import baseline, rescaled
from loadgauge.evidence.validate.summary import Errors, errors, grouped, reasons

if TYPE_CHECKING:
    from loadgauge.evidence.validate.operators import Score
    from loadgauge.evidence.validate.runs import Runs
    from loadgauge.evidence.validate.validate import Record

UNITS = {"time": (1.0, "s"), "memory": (2.0**30, "GiB")}
"""Of each quantity, what it is divided by for people, and the unit then."""


def write(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write the summary tables of predictions compared with measurements, and where they are asked for every row.

    brief: of all rows together
    """
    records, runs, rows = answer.shown
    for quantity in ("time", "memory"):
        of = [record for record in records if record.quantity == quantity]
        if of:
            if rows and not brief:
                _rows(target, of, quantity)
            _table(target, of, quantity, runs, brief=brief)
    section(target, "Not predicted", [f"{count} x {reason}" for reason, count in reasons(records).items()])
    assumed = "values that rows do not state are assumed by rule and widen their range; --json lists them for each row"
    notes = [
        "median, p90: of the absolute error, with equal weight per configuration; bias: median of the signed error",
        *([assumed] if any(record.assumed for record in records) else []),
        *([f"ignored columns: {', '.join(runs.ignored)}"] if runs.ignored else []),
    ]
    target.print()
    points(target, notes)


def operator_blocks(scores: Sequence[Score]) -> list[Table | Notes]:
    """Return how far off the predictions of single operations are, by kind and GPU, as tables and notes."""
    return [
        Table(
            [
                Column("operation"),
                Column("GPU"),
                *(Column(name, "right") for name in ("rows", "median", "p90", "bias")),
            ],
            [
                [
                    score.kind,
                    score.gpu,
                    f"{score.rows:,}",
                    f"{score.median:.1%}",
                    f"{score.p90:.1%}",
                    f"{score.signed:+.1%}",
                ]
                for score in scores
            ],
            "Single operations",
        ),
        Notes(
            [
                "median, p90: of the absolute error, predicted / measured - 1; bias: median of the signed error",
                "short: calls of less than a millisecond, on a cool chip; sustained: longer ones, or one product after the other",
            ],
            gap=True,
        ),
    ]


def _rows(target: Paper, records: Sequence[Record], quantity: str) -> None:
    unit, name = UNITS[quantity]

    def number(value: float | None) -> str:
        return "" if value is None else f"{value / unit:,.3g}" if value / unit < 100 else f"{value / unit:,.0f}"

    draw(
        target,
        [
            Column("row"),
            Column(f"measured {name}", "right"),
            Column(f"predicted {name}", "right"),
            Column("low", "right", wide=True),
            Column("high", "right", wide=True),
            Column("error", "right"),
            Column("why there is no prediction", wrap=True),
        ],
        [
            [
                record.id,
                number(record.measured),
                number(record.predicted),
                number(record.low),
                number(record.high),
                _percent(record.error, "+"),
                record.reason,
            ]
            for record in records
        ],
        title={"time": "Step time, row by row", "memory": "Peak memory, row by row"}[quantity],
    )


def _table(target: Paper, records: Sequence[Record], quantity: str, runs: Runs, *, brief: bool) -> None:
    columns = [
        Column(""),
        Column("rows", "right"),
        Column("predicted", "right"),
        Column("configurations", "right", wide=True),
        Column("median", "right"),
        Column("p90", "right"),
        Column("bias", "right"),
    ]
    lines = [_line("all", errors(records))]
    by_quality = grouped(records, lambda record: record.quality)
    if len(by_quality) > 1 and not brief:
        lines += [_line(f"quality {name or '-'}", errors(group)) for name, group in sorted(by_quality.items())]
    strong = range(len(lines))
    by_source = {} if brief else grouped(records, lambda record: record.source)
    lines += [_line(name, errors(group)) for name, group in sorted(by_source.items())] if len(by_source) > 1 else []
    if quantity == "time":
        others = {
            "one constant and the bubble": baseline(records, runs.runs),
            "after one run of one's own": rescaled(records),
        }
        lines += [_line(name, errors(group)) for name, group in others.items() if group]
    title = {"time": "Step time", "memory": "Peak memory"}[quantity]
    shown = [0, 1, 2, 4, 5, 6] if brief else range(len(columns))
    cells = [[line[at] for at in shown] for line in lines]
    draw(target, [columns[at] for at in shown], cells, title=title, strong=tuple(strong))


def _line(name: str, group: Errors) -> list[str]:
    return [
        name,
        str(group.rows),
        str(group.expressible),
        str(group.configurations),
        _percent(group.median),
        _percent(group.p90),
        _percent(group.bias, "+"),
    ]


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{100 * value:{sign}.1f} %"
