"""`loadgauge article`: the tables of an article, as printed and as they are right."""

from __future__ import annotations

import click

from loadgauge.core.command_line.options.param_types import Whole


@click.command("article")
@click.argument("number", type=Whole(1, 99))
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
@click.option("--csv", "as_csv", is_flag=True, help="CSV, a line a value.")
def command(number: int, as_json: bool, as_csv: bool) -> None:
    """Reproduce the tables of article NUMBER: what it prints, what is right, and what is wrong in it and why.

    \b
    1  compute and memory of Megatron and LLaMA models
    2  where did the memory go: ZeRO stages and checkpointing
    3  sizing a cluster
    4  padding-free layers
    5  memory of small autograd functions (needs PyTorch)

    Every right value is computed by the functions behind the other commands, which are named under each table.
    """
    from loadgauge.core.base.errors import ConfigError
    from loadgauge.core.text.table import document
    from loadgauge.evidence.articles.article import article, check_all

    if as_json and as_csv:
        raise ConfigError("--csv and --json exclude one another")
    found = article(number)
    checked = check_all(number)
    if as_csv:
        from loadgauge.core.text.rows import print_csv

        plain = [
            {"table": table.title, **one.to_dict()}
            for table, rows in zip(found.table, checked, strict=True)
            for one in rows
        ]
        print_csv(plain, list(plain[0]))
    elif as_json:
        tables = [
            {"title": table.title, "commands": table.commands, "rows": [one.to_dict() for one in rows]}
            for table, rows in zip(found.table, checked, strict=True)
        ]
        document({"number": found.number, "title": found.title, "unit": found.unit, "tables": tables})
    else:
        from loadgauge.evidence.text.article import report

        report(found, checked)
