"""An article as text: its tables with printed and right values, and what is wrong in it and why."""

from __future__ import annotations

import math
from collections.abc import Mapping

from loadgauge.core.answers.answer import Answer
from loadgauge.core.text.table import Column, Paper, draw, heading, points
from loadgauge.evidence.articles.article import Checked

COLUMNS = (
    Column("quantity", wrap=True),
    Column("printed", "right"),
    Column("right", "right"),
    Column("unit"),
    Column(""),
)
AGREES = (
    "A value agrees to half a unit of the last digit that is printed (a whole one where digits were cut off); a count that is"
    " meant exactly, a bound and a range as they stand, or within the share beside them."
)


def write(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write an article; brief: what is wrong in it, and how much."""
    article, checked = answer.shown
    target.print(f"Article {article.number}: {article.title}", style="bold", soft_wrap=True)
    points(target, [article.about + (f" In it, {article.unit}." if article.unit else "")], "")
    flat = [one for rows in checked for one in rows]
    wrong = dict.fromkeys(one.wrong for one in flat if one.agrees is False)
    reasons = {reason: number for number, reason in enumerate(wrong, 1)}
    for table, rows in () if brief else zip(article.table, checked, strict=True):
        draw(target, COLUMNS, [_cells(one, reasons) for one in rows], table.title)
        points(target, [f"{one.row.what}: {one.row.note}" for one in rows if one.row.note], "- ", "dim")
        for command in table.commands:
            target.print(f"  {command}", style="dim", soft_wrap=True)
    if reasons:
        heading(target, "What is wrong in the article, and why")
        points(target, [f"[{number}] {reason}." for reason, number in reasons.items()], "")
    agree, differ = (sum(one.agrees is word for one in flat) for word in (True, False))
    target.print()
    unprinted = f", {len(flat) - agree - differ} without a printed value" if len(flat) > agree + differ else ""
    points(target, [f"{len(flat)} values: {agree} as printed, {differ} wrong in the article{unprinted}."], "", "dim")
    if agree + differ:
        points(target, [AGREES], "", "dim")
    if any(one.right is None for one in flat):
        points(target, ["Values that are traced need PyTorch: pip install torch."], "", "dim")


def _cells(one: Checked, reasons: Mapping[str, int]) -> list[str]:
    """A row of a table; reasons: their numbers"""
    bound = "<= " if one.row.at_most else ">= " if one.row.at_least else ""
    about = f" ±{100 * one.row.within:g} %" if one.row.within else ""
    mark = "" if one.agrees is None else "agrees" if one.agrees else f"WRONG [{reasons[one.wrong]}]"
    return [one.row.what, f"{bound}{one.row.printed}{about}", shown(one), one.row.unit, mark]


def shown(one: Checked) -> str:
    """The right value in three digits or more: more than are printed where it is not what is printed, or digits were cut off.

    >>> from loadgauge.evidence.articles.article import Row
    >>> shown(Checked(Row(what="", unit="", by="", claim="", printed="43"), 41.13, False))
    '41.13'
    """
    if one.right is None:
        return "needs PyTorch"
    if float(one.right).is_integer():
        return f"{one.right:,.0f}"
    row = one.row
    digits = len(row.printed.partition(".")[2]) if row.printed else 2
    if one.agrees is False or row.cut or row.at_most or row.at_least or " to " in row.printed:
        digits = max(digits + 1, 2)
    # Three digits in any case.
    digits = max(digits, min(6, 2 - math.floor(math.log10(abs(one.right)))))
    return f"{one.right:,.{digits}f}"
