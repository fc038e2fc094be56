"""`loadgauge models`: the catalogue of models."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from loadgauge.core.answers.answer import Answer, Pivot
from loadgauge.core.base import ConfigError, count, need
from loadgauge.core.command_line.options.answering import answering
from loadgauge.core.families.catalogue import model, models
from loadgauge.core.text.catalogue import model_row
from loadgauge.core.text.show import BLOCKS
from loadgauge.core.text.table import Column, Notes, Table

COLUMNS = (
    Column("model", whole=True),
    Column("type", rank=1),
    *(Column(name, "right") for name in ("parameters", "layers", "hidden size", "vocabulary")),
    Column("positions", "right", wide=True),
    Column("source", wide=True, wrap=True),
)
TYPES = (Column("type"), Column("class", wide=True), Column("head", rank=1), Column("road"), Column("why", wrap=True))
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "positions")


@click.command("models")
@click.argument("words", nargs=-1, metavar="[WORD]...")
@click.option("--check", is_flag=True, help="Every model type of the installed transformers, and which road takes it.")
@answering(document="parameters, and sizes as config.json has them")
def command(words: tuple[str, ...], check: bool) -> Answer:
    """List the models of the catalogue; with WORDs, those whose name or type contains every WORD.

    Any other model is read from its Hugging Face config.json. --check lists the model types instead: those with a hand-written
    family, those that are captured (see `loadgauge capture`), and those that are not, with what stops them.
    """
    if check:
        return _types(words)
    chosen = _with(
        words,
        [model_row(model(name)) for name in models()],
        lambda row: f"{row['name']} {row['model_type']}",
        "model in the catalogue",
        "models",
    )
    rows = [
        [row["name"], row["model_type"], count(row["params"]), *(_size(row[name]) for name in SIZES), row["source"]]
        for row in chosen
    ]
    note = (
        f"{len(rows)} model{'s' * (len(rows) > 1)}; `loadgauge models WORD` lists those of a name; any other is read from its"
        " config.json, or the folder that holds it"
    )
    return Answer(
        form="models.catalogue",
        writer=BLOCKS,
        shown=[Notes([note], mark=""), Table(COLUMNS, rows)],
        document={"models": chosen},
        pivots=(Pivot("Parameters", "models.params", "name", "of"),),
    )


def _types(words: tuple[str, ...]) -> Answer:
    """Return the model types of transformers, and what takes each."""
    survey = need("MODEL_SOURCES").survey()
    rows = _with(words, survey.world(), lambda row: f"{row.type} {row.cls} {row.road}", "model type", "models --check")
    here, tried, roads = survey.installed(), survey.tried(), survey.counts(rows)
    with_ = f"transformers {here}" if here else "no transformers is installed; its types are those that were tried"
    notes = [
        f"{len(rows)} types ({with_}): {', '.join(f'{road} {number}' for road, number in roads.items())}",
        "family: `loadgauge estimate`; formulas and numbers: `loadgauge capture`, tried with transformers "
        + tried.transformers,
    ]
    cells = [[row.type, row.cls, row.head, row.road, row.why] for row in rows]
    return Answer(
        form="models.types",
        writer=BLOCKS,
        shown=[Table(TYPES, cells), Notes(notes, gap=True)],
        document={"transformers": here, "tried_with": tried.transformers, "roads": roads, "types": rows},
        pivots=(Pivot("Model types by road", "roads", "roads", "of"),),
    )


def _with(words: tuple[str, ...], rows: Sequence[Any], text: Callable[[Any], str], listed: str, all_: str) -> list[Any]:
    """Return the rows in whose text every word is. Raises `ConfigError` where there is none."""
    chosen = [row for row in rows if all(word.lower() in text(row).lower() for word in words)]
    if not chosen:
        raise ConfigError(f"no {listed} matches {' '.join(words)!r}; `loadgauge {all_}` lists them all")
    return chosen


def _size(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
