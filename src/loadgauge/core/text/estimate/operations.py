"""The tables of an estimate, operation by operation, as text."""

from loadgauge.core.answers.answer import Answer
from loadgauge.core.estimate.tables import Table
from loadgauge.core.text.table import Column, Paper, draw, points

HEADS = {
    "input_gradient": "backward (inputs)", "weight_gradient": "backward (weights)", "forward": "forward",
    "itemsize": "bytes each", "by": "kept for", "sent": "sent", "moved": "moved",
}  # fmt: skip
"""Heads of columns that are not their names."""
LAST = {"kind": 1, "moved": 2, "sent": 1, "products": 3, "shards": 1, "trainable": 1, "role": 1, "itemsize": 2, "by": 3,
        "elements": 1}  # fmt: skip
"""Columns that are left out first where a terminal is narrow."""


def write(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write a table: its rows, their sum over the stage, and what the columns are; brief: the sum alone."""
    table: Table = answer.shown
    target.print(table.of, style="bold", soft_wrap=True)
    target.print()
    names = list(table.rows[0]) if table.rows else []
    numbers = {name for name in names if all(_is_number(row[name]) for row in table.rows)}
    columns = [
        Column(
            HEADS.get(name, name.replace("_", " ")),
            "right" if name in numbers else "left",
            wrap=name in ("products", "by"),
            rank=LAST.get(name, 0),
        )
        for name in names
    ]
    rows = [[_shown(row[name]) for name in names] for row in table.rows]
    total = table.total
    ending = [_shown(total[name]) if name in total else "" for name in names]
    if ending:
        ending[0] = "all, each times its number"
    shown = [ending] if brief else [*rows, ending]
    draw(target, columns, shown, strong=[len(shown) - 1])
    target.print()
    points(target, [f"{table.note}."], "", "dim")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) or not value.is_integer() else f"{value:,.0f}"
    return str(value)
