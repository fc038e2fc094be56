"""An article as text: its tables with printed and right values, and what is wrong in it and why."""

import math
from collections.abc import Mapping

from loadgauge.core.answers.answer import Answer
from loadgauge.core.text.table import Column, Paper, draw, points, section
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
    flat = [check for rows in checked for check in rows]
    wrong = dict.fromkeys(check.wrong for check in flat if check.agrees is False)
    reasons = {reason: number for number, reason in enumerate(wrong, 1)}
    for table, rows in () if brief else zip(article.table, checked, strict=True):
        draw(target, COLUMNS, [_cells(check, reasons) for check in rows], table.title)
        points(target, [f"{check.row.what}: {check.row.note}" for check in rows if check.row.note], "- ", "dim")
        for command in table.commands:
            target.print(f"  {command}", style="dim", soft_wrap=True)
    why = [f"[{number}] {reason}." for reason, number in reasons.items()]
    section(target, "What is wrong in the article, and why", why, "")
    agree, differ = (sum(check.agrees is word for check in flat) for word in (True, False))
    target.print()
    unprinted = f", {len(flat) - agree - differ} without a printed value" if len(flat) > agree + differ else ""
    points(target, [f"{len(flat)} values: {agree} as printed, {differ} wrong in the article{unprinted}."], "", "dim")
    if agree + differ:
        points(target, [AGREES], "", "dim")
    if any(check.right is None for check in flat):
        points(target, ["Values that are traced need PyTorch: pip install torch."], "", "dim")


def _cells(check: Checked, reasons: Mapping[str, int]) -> list[str]:
    """A row of a table; reasons: their numbers"""
    bound = "<= " if check.row.at_most else ">= " if check.row.at_least else ""
    about = f" ±{100 * check.row.within:g} %" if check.row.within else ""
    mark = "" if check.agrees is None else "agrees" if check.agrees else f"WRONG [{reasons[check.wrong]}]"
    return [check.row.what, f"{bound}{check.row.printed}{about}", shown(check), check.row.unit, mark]


def shown(check: Checked) -> str:
    """The right value in three digits or more: more than are printed where it is not what is printed, or digits were cut off.

    >>> from loadgauge.evidence.articles.article import Row
    >>> shown(Checked(Row(what="", unit="", by="", claim="", printed="43"), 41.13, False))
    '41.13'
    """
    if check.right is None:
        return "needs PyTorch"
    if float(check.right).is_integer():
        return f"{check.right:,.0f}"
    row = check.row
    digits = len(row.printed.partition(".")[2]) if row.printed else 2
    if check.agrees is False or row.cut or row.at_most or row.at_least or " to " in row.printed:
        digits = max(digits + 1, 2)
    # Three digits in any case.
    digits = max(digits, min(6, 2 - math.floor(math.log10(abs(check.right)))))
    return f"{check.right:,.{digits}f}"
