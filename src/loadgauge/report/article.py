"""An article as text: its tables with printed and right values, and what is wrong in it and why."""

from __future__ import annotations

from collections.abc import Sequence

from loadgauge.articles.article import Article, Checked
from loadgauge.report.table import Column, console, draw, heading, points


def report(article: Article, checked: Sequence[Sequence[Checked]]) -> None:
    """Print an article. checked: the rows of each of its tables"""
    target = console()
    target.print(f"Article {article.number}: {article.title}", style="bold", soft_wrap=True)
    points(target, [article.about + (f" In it, {article.unit}." if article.unit else "")], "")
    reasons: dict[str, list[str]] = {}
    for table, rows in zip(article.table, checked, strict=True):
        lines = []
        for one in rows:
            mark = {None: "", True: "agrees", False: "WRONG"}[one.agrees]
            if one.agrees is False:
                reasons.setdefault(one.row.wrong, []).append(one.row.what)
                mark += f" [{list(reasons).index(one.row.wrong) + 1}]"
            bound = "<= " if one.row.at_most else ">= " if one.row.at_least else ""
            lines.append([one.row.what, f"{bound}{one.row.printed}", shown(one), one.row.unit, mark])
        columns = [
            Column("quantity", wrap=True), Column("printed", "right"), Column("right", "right"), Column("unit"), Column(""),
        ]  # fmt: skip
        draw(target, columns, lines, table.title)
        points(target, [f"{one.row.what}: {one.row.note}" for one in rows if one.row.note], "- ", "dim")
        for command in table.commands:
            target.print(f"  {command}", style="dim", soft_wrap=True)
    if reasons:
        heading(target, "What is wrong in the article, and why")
        points(target, [f"[{number}] {reason}." for number, reason in enumerate(reasons, 1)], "")
    flat = [one for rows in checked for one in rows]
    agree, differ = (sum(one.agrees is word for one in flat) for word in (True, False))
    target.print()
    unprinted = f", {len(flat) - agree - differ} without a printed value" if len(flat) > agree + differ else ""
    points(target, [f"{len(flat)} values: {agree} as printed, {differ} wrong in the article{unprinted}."], "", "dim")
    if any(one.right is None for one in flat):
        points(target, ["Values that are traced need PyTorch: pip install torch."], "", "dim")


def shown(one: Checked) -> str:
    """The right value, with more digits than are printed where it is not what is printed, or digits were cut off.

    >>> from loadgauge.articles.article import Row
    >>> shown(Checked(Row(what="", unit="", by="", printed="43"), 45.53, False))
    '45.53'
    """
    if one.right is None:
        return "needs PyTorch"
    if float(one.right).is_integer():
        return f"{one.right:,.0f}"
    digits = len(one.row.printed.partition(".")[2]) if one.row.printed else 2
    if one.agrees is False:
        digits = max(digits + 1, 2)
    elif one.row.cut or one.row.at_most or one.row.at_least:
        digits += 1
    while digits < 6 and one.right and float(f"{one.right:.{digits}f}") == 0:
        digits += 1
    return f"{one.right:,.{digits}f}"
