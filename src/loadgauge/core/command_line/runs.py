"""`loadgauge runs`: famous training runs, typed as their sources write them."""

import shlex
import tomllib
from typing import Any

import click

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base import ConfigError, Error, read_data, suggest
from loadgauge.core.command_line.options.answering import answering
from loadgauge.core.text.show import BLOCKS
from loadgauge.core.text.table import Column, Table


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
    params = command.make_context("estimate", flags_of(name)).params
    fields = {key: value for key, value in params.items() if key in Job.__struct_fields__ and value is not None}
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


UNITS = {"step_s": "s a step", "mfu": "% MFU", "hfu": "% HFU", "tok_s_gpu": "tokens/s a GPU"}
KEYS = {"name": "run", "what": "what", "year": "year", "unsaid": "leaves unsaid", "source": "source"}


@click.command("runs")
@click.argument("name", required=False)
@click.option("--predict", is_flag=True, help="The prediction beside the published figure (some seconds).")
@answering(document="each run as its source has it")
def command(name: str | None, predict: bool) -> Answer:
    """List famous training runs: `loadgauge estimate run:NAME` answers one, typed as its source writes it.

    What a source leaves unsaid is assumed, and said so, as in any other estimate; flags after run:NAME change it.
    """
    if name is not None:
        flags_of(name)
    chosen = [each for each in famous() if name in (None, each)]
    rows = [predicted(each) if predict else famous()[each] for each in chosen]
    if predict:
        names = ("published", "predicted", "speed")
        columns = [Column("run"), *(Column(each, "right") for each in names), Column("in range"), Column("verdict")]
        lines = [_compared(row, UNITS[row["unit"]]) for row in rows]
    else:
        columns = [
            Column(head, wide=key in ("source", "unsaid"), wrap=key in ("source", "unsaid"))
            for key, head in KEYS.items()
        ]
        lines = [[str(row.get(key, "")) for key in KEYS] for row in rows]
    return Answer(form="runs.list", writer=BLOCKS, shown=[Table(columns, lines)], document={"runs": rows}, table=rows)


def _compared(row: dict[str, Any], unit: str) -> list[str]:
    """Return the cells of a run beside its prediction."""
    cells = [row["name"], f"{row['published']:,g} {unit}"]
    if "predicted" not in row:
        return [*cells, "-", "-", row["why"], row.get("verdict", "-").upper()]
    value = float(f"{row['predicted']:.3g}")
    return [*cells, f"{value:,g}", f"{row['error']:+.0%}", "yes" if row["inside"] else "no", row["verdict"].upper()]
