"""`loadgauge runs`: famous training runs, typed as their sources write them."""

from __future__ import annotations

import shlex
import tomllib
from typing import Any

import click

from loadgauge.core.base import ConfigError, Error, read_data, suggest


def famous() -> dict[str, dict[str, Any]]:
    """Return the runs by name: what, year, command, figure (`unit value`), source, and what the source leaves unsaid."""
    rows: list[dict[str, Any]] = tomllib.loads(read_data("famous_runs.toml"))["run"]
    return {row["name"]: row for row in rows}


def flags_of(name: str) -> list[str]:
    """Return the model and the flags of a run. Raises `ConfigError`.

    >>> flags_of("bloom-176b")[:3]
    ['bloom-176b', '--gpu', 'a100-sxm4-80gb']
    """
    runs = famous()
    if name not in runs:
        raise ConfigError(f"no run {name[:40]!r} (known: {', '.join(runs)}){suggest(name, runs)}")
    return shlex.split(runs[name]["command"])


def predicted(name: str) -> dict[str, Any]:
    """Return a run with its figure beside the prediction, in the figure's unit, and the verdict.

    error: of the speed; +0.1: predicted 10 % too fast; inside: whether the figure lies in the predicted range
    """
    import msgspec

    from loadgauge.core.command_line.estimate import command
    from loadgauge.core.definitions.job.job import Job
    from loadgauge.core.resolve.resolve import resolve_job

    run = famous()[name]
    given = command.make_context("estimate", flags_of(name)).params
    fields = {key: value for key, value in given.items() if key in Job.__struct_fields__ and value is not None}
    unit, _, text = run["figure"].partition(" ")
    row = {"name": name, "what": run["what"], "year": run["year"], "unit": unit, "published": float(text)}
    try:
        result = resolve_job(msgspec.structs.replace(Job(model=fields.pop("model")), **fields)).estimate()
    except Error as error:
        return row | {"why": str(error)}
    row["verdict"] = result.memory.verdict
    time = result.time
    if time is None:
        return row | {"why": result.untimed}
    shown = {
        "step_s": time.step,
        "mfu": 100 * time.mfu,
        "hfu": 100 * time.hfu,
        "tok_s_gpu": time.tokens_per_second_per_gpu,
    }
    value = shown[unit]
    ratio = row["published"] / value if unit == "step_s" else value / row["published"]
    step = time.step * ratio  # seconds of a step as published
    return row | {"predicted": value, "error": ratio - 1, "inside": time.low <= step <= time.high}


@click.command("runs")
@click.argument("name", required=False)
@click.option("--predict", is_flag=True, help="The prediction beside the published figure (some seconds).")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(name: str | None, predict: bool, as_json: bool) -> None:
    """List famous training runs: `loadgauge estimate run:NAME` answers one, typed as its source writes it.

    What a source leaves unsaid is assumed, and said so, as in any other estimate; flags after run:NAME change it.
    """
    from loadgauge.core.text.table import Column, console, document, draw

    if name is not None:
        flags_of(name)
    chosen = [each for each in famous() if name in (None, each)]
    rows = [predicted(each) if predict else famous()[each] for each in chosen]
    if as_json:
        document({"runs": rows})
        return
    units = {"step_s": "s a step", "mfu": "% MFU", "hfu": "% HFU", "tok_s_gpu": "tokens/s a GPU"}
    columns = [Column("run"), Column("what"), Column("year"), Column("leaves unsaid", wrap=True)]
    columns.append(Column("source", wide=True, wrap=True))
    keys = ("name", "what", "year", "unsaid", "source")
    lines = [[str(row.get(key, "")) for key in keys] for row in rows]
    if predict:
        names = ("published", "predicted", "speed")
        columns = [Column("run"), *(Column(each, "right") for each in names), Column("in range"), Column("verdict")]
        lines = [_compared(row, units[row["unit"]]) for row in rows]
    draw(console(), columns, lines)


def _compared(row: dict[str, Any], unit: str) -> list[str]:
    """Return the cells of a run beside its prediction."""
    cells = [row["name"], f"{row['published']:,g} {unit}"]
    if "predicted" not in row:
        return [*cells, "-", "-", row["why"], row.get("verdict", "-").upper()]
    value = float(f"{row['predicted']:.3g}")
    return [*cells, f"{value:,g}", f"{row['error']:+.0%}", "yes" if row["inside"] else "no", row["verdict"].upper()]
