"""`loadgauge models`: the catalogue of models."""

from __future__ import annotations

from typing import Any

import click


@click.command("models")
@click.argument("words", nargs=-1, metavar="[WORD]...")
@click.option("--check", is_flag=True, help="Every model type of the installed transformers, and which road takes it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(words: tuple[str, ...], check: bool, as_json: bool) -> None:
    """List the models of the catalogue; with WORDs, those whose name or type contains every WORD.

    Any other model is read from its Hugging Face config.json. --check lists the model types instead: those with a hand-written
    family, those that are captured (see `loadgauge capture`), and those that are not, with what stops them.
    """
    if check:
        _check(words, as_json)
        return
    from loadgauge.core.base.errors import ConfigError
    from loadgauge.core.families.catalogue import model, models
    from loadgauge.core.text.catalogue import model_row
    from loadgauge.core.text.table import Column, console, document, draw, points

    chosen = [model_row(model(name)) for name in models()]
    chosen = [row for row in chosen if all(word.lower() in f"{row['name']} {row['model_type']}" for word in words)]
    if not chosen:
        raise ConfigError(f"no model in the catalogue matches {' '.join(words)!r}; `loadgauge models` lists them all")
    if as_json:
        document({"models": chosen})
        return
    target = console()
    columns = [
        Column("model"),
        Column("type", rank=1),
        Column("parameters", "right"),
        Column("layers", "right"),
        Column("hidden", "right"),
        Column("vocabulary", "right"),
        Column("positions", "right", wide=True),
        Column("source", wide=True, wrap=True),
    ]
    rows = [[row["name"], row["model_type"], *_figures(row), row["source"]] for row in chosen]
    draw(target, columns, rows)
    target.print()
    points(
        target, [f"{len(rows)} models; for any other, give its Hugging Face config.json or the folder that holds it"]
    )


def _check(words: tuple[str, ...], as_json: bool) -> None:
    from loadgauge.core.base.errors import ConfigError
    from loadgauge.core.base.hooks import need
    from loadgauge.core.text.table import Column, console, document, draw, points

    survey = need("MODEL_SOURCES").survey()

    rows = [
        one
        for one in survey.world()
        if all(word.lower() in f"{one.type} {one.cls} {one.road}".lower() for word in words)
    ]
    if not rows:
        raise ConfigError(f"no model type matches {' '.join(words)!r}; `loadgauge models --check` lists them all")
    here, known = survey.installed(), survey.tried()
    if as_json:
        document({"transformers": here, "tried_with": known.transformers, "roads": survey.counts(rows), "types": rows})
        return
    target = console()
    columns = [
        Column("type"),
        Column("class", wide=True),
        Column("head", rank=1),
        Column("road"),
        Column("why", wrap=True),
    ]
    draw(target, columns, [[one.type, one.cls, one.head, one.road, one.why] for one in rows])
    target.print()
    total = ", ".join(f"{road} {count}" for road, count in survey.counts(rows).items())
    with_ = f"transformers {here}" if here else "no transformers is installed; its types are those that were tried"
    points(
        target,
        [
            f"{len(rows)} types ({with_}): {total}",
            "family: `loadgauge estimate`; formulas and numbers: `loadgauge capture`, tried with transformers "
            + known.transformers,
        ],
    )


def _figures(row: dict[str, Any]) -> list[str]:
    from loadgauge.core.base.units import count

    sizes = [row[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size", "positions")]
    return [count(row["params"]), *("" if size is None else f"{size:,}" for size in sizes)]
