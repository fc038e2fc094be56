"""`loadgauge models`: the catalogue of models."""

from __future__ import annotations

from typing import Any

import click


@click.command("models")
@click.argument("words", nargs=-1, metavar="[WORD]...")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def command(words: tuple[str, ...], as_json: bool) -> None:
    """List the models of the catalogue; with WORDs, those whose name or type contains every WORD.

    Any other model is read from its Hugging Face config.json.
    """
    from loadgauge.errors import ConfigError
    from loadgauge.families.catalogue import model, models
    from loadgauge.report.catalogue import model_row
    from loadgauge.report.table import Column, console, document, draw, points

    chosen = [model_row(model(name)) for name in models()]
    chosen = [row for row in chosen if all(word.lower() in f"{row['name']} {row['model_type']}" for word in words)]
    if not chosen:
        raise ConfigError(f"no model in the catalogue matches {' '.join(words)!r}; `loadgauge models` lists them all")
    if as_json:
        document({"models": chosen})
        return
    target = console()
    columns = [
        Column("model"), Column("type", rank=1), Column("parameters", "right"), Column("layers", "right"),
        Column("hidden", "right"), Column("vocabulary", "right"), Column("positions", "right", wide=True),
        Column("source", wide=True, wrap=True),
    ]  # fmt: skip
    rows = [[row["name"], row["model_type"], *_figures(row), row["source"]] for row in chosen]
    draw(target, columns, rows)
    target.print()
    points(
        target, [f"{len(rows)} models; for any other, give its Hugging Face config.json or the folder that holds it"]
    )


def _figures(row: dict[str, Any]) -> list[str]:
    from loadgauge.units import count

    sizes = [row[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size", "positions")]
    return [count(row["params"]), *("" if size is None else f"{size:,}" for size in sizes)]
