"""`loadgauge article`: the tables of an article, as printed and as they are right."""

from typing import Any

import click

from loadgauge.core.answers.answer import Answer
from loadgauge.core.command_line.options.answering import answering
from loadgauge.core.command_line.options.param_types import Whole


@click.command("article")
@click.argument("number", type=Whole(1, 99))
@answering(document="each value as printed and as it is right, with its unit")
def command(number: int) -> Answer:
    """Reproduce the tables of article NUMBER: what it prints, what is right, and what is wrong in it and why.

    \b
    1  compute and memory of Megatron and LLaMA models
    2  where did the memory go: ZeRO stages and checkpointing
    3  sizing a cluster
    4  padding-free layers
    5  memory of small autograd functions (needs PyTorch)

    Every right value is computed by the functions behind the other commands, which are named under each table.
    """
    from loadgauge.evidence.articles.article import article, check_all

    document, checked = article(number), check_all(number)
    tables: list[dict[str, Any]] = [
        {"title": table.title, "commands": table.commands, "rows": [row.to_dict() for row in rows]}
        for table, rows in zip(document.table, checked, strict=True)
    ]
    return Answer(
        form="article.tables",
        writer="loadgauge.evidence.text.article:write",
        shown=(document, checked),
        document={"number": document.number, "title": document.title, "unit": document.unit, "tables": tables},
        table=[{"table": table["title"], **row} for table in tables for row in table["rows"]],
    )
