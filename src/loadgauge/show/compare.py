"""`loadgauge compare`: formula, trace and measurement side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from loadgauge.show.extras import needs_torch
from loadgauge.show.trace import COUNT, settings_options

if TYPE_CHECKING:
    from loadgauge.measure.compare import Comparison, Difference, Row

MOST_CAUSES = 8


@click.command("compare")
@click.argument("target")
@click.option(
    "--device", type=click.Choice(("cuda", "cpu")), default="cuda", show_default=True, help="What the trace stands for."
)
@settings_options
@click.option("--layers", type=COUNT, help="Another number of layers than the model's.")
@click.option(
    "--measure", type=click.Choice(("cpu", "cuda")), help="Run two real steps there too (the model must fit)."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document: bytes, FLOP and plain counts.")
def command(target: str, as_json: bool, device: str, layers: int | None, measure: str | None, **given: Any) -> None:
    """Three ways to know what TARGET takes: by formula, by tracing PyTorch, by running it. TARGET is a MODEL.

    Every difference over 1 % is put down to operations.

    \b
    loadgauge compare llama-3.1-8b --seq-len 8192 --checkpointing full
    loadgauge compare path/to/config.json --device cpu --measure cpu --seq-len 256 --layers 2
    """
    needs_torch("compare")
    from loadgauge.measure.child import Request, replied
    from loadgauge.measure.training import Settings

    settings = Settings(**given)
    settings.check()
    found = replied(
        Request(target, device, settings, layers, work="compare", measure=measure or "", timed=0)
    ).comparison
    assert found is not None
    if as_json:
        from loadgauge.show.table import document

        document(found)
    else:
        _report(found)


def _report(found: Comparison) -> None:
    from loadgauge.show.table import Column, console, draw, heading, points

    target = console()
    rows = [[row.quantity, *_values(row), _share(row.formula, row.trace), _share(row.trace, row.measured)]
            for row in found.rows]  # fmt: skip
    columns = [
        Column("quantity"), Column("formula", "right"), Column(f"trace ({found.device})", "right"),
        Column("measured", "right"), Column("trace/formula", "right"), Column("measured/trace", "right"),
    ]  # fmt: skip
    if not found.measured_on:
        rows, columns = [[*row[:3], row[4]] for row in rows], [*columns[:3], columns[4]]
    draw(target, columns, rows, title=found.target)
    heading(target, "Differences over 1 %, by operation" if found.differences else "No difference is over 1 %")
    points(target, [line for one in found.differences for line in _why(one)])
    heading(target, "Not counted by the trace")
    points(target, found.not_counted)


def _values(row: Row) -> list[str]:
    return [_number(value, row.unit) for value in (row.formula, row.trace, row.measured)]


def _number(value: float | None, unit: str) -> str:
    from loadgauge.units import MIB, flops

    if value is None:
        return "-"
    return flops(value) if unit == "FLOP" else f"{value / MIB:,.3f} MiB"


def _share(first: float | None, second: float | None) -> str:
    return f"{second / first - 1:+.2%}" if first and second is not None else "-"


def _why(one: Difference) -> list[str]:
    unit = "FLOP" if one.quantity.startswith("FLOP") else "bytes"
    first, second = one.ways
    lines = [f"{one.quantity}: {second} less {first} is {_signed(one.amount, unit)} ({one.share:+.1%})"]
    for cause in one.causes[:MOST_CAUSES]:
        where = f", {cause.where}" if cause.where else ""
        many = f" x{cause.count}" if cause.count > 1 else ""
        lines.append(f"{_signed(cause.amount, unit)} {cause.op}{many}{where}")
    if len(one.causes) > MOST_CAUSES:
        rest = one.causes[MOST_CAUSES:]
        lines.append(f"{_signed(sum(cause.amount for cause in rest), unit)} in {len(rest)} more operations")
    if abs(one.unexplained) > 0.01 * abs(one.amount):
        lines.append(f"{_signed(one.unexplained, unit)} not put down to an operation")
    return lines


def _signed(value: float, unit: str) -> str:
    return f"{'-' if value < 0 else '+'}{_number(abs(value), unit)}"
