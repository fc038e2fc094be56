"""The answer of `loadgauge check`: a table of jobs, on the terminal or as Markdown for a pull request."""

import re
from collections.abc import Sequence
from typing import Any

from loadgauge.core.base.errors import YES
from loadgauge.core.plan.advise.budget import QUANTITIES, Checked
from loadgauge.core.text.table import Column, console, draw, points, printable
from loadgauge.core.text.verdict import unread_words
from loadgauge.job_files.exchange import JobFile
from loadgauge.job_files.reading.documents import load


def lines(checked: Sequence[Checked]) -> list[str]:
    """Return what is wrong, a line each."""
    return [
        f"{check.name}: {text.removeprefix(f'{check.name}: ')}"
        for check in checked
        for text in (*check.problems, *([check.error] if check.error else ()))
    ]


def warnings(checked: Sequence[Checked]) -> list[str]:
    """Return what keys of the files that are not counted can do, a line each."""
    return [
        f"{check.name}: {line}" for check in checked if check.now is not None for line in unread_words(check.now.unread)
    ]


def line_of(text: str, key: str) -> int | None:
    """Return the line of a file that says a key, of several keys the first; None where it has none of that name.

    >>> line_of("# lr: 1\\na:\\n  lr: 1\\nb:\\n  lr: 2\\n", "b.lr"), line_of("x --bf16", "--bf16 and --tp"), line_of("", "a")
    (5, 1, None)
    """

    def after(part: str, end: int) -> re.Match[str] | None:
        pattern = re.compile(rf"^[^#\n]*?(?<![\w.-]){re.escape(part)}(?![\w-])", re.MULTILINE)
        return pattern.search(text, text.rfind("\n", 0, end) + 1)

    first = key.partition(" and ")[0]
    match = after(first, 0)
    for part in () if match else first.lstrip("-+").split("."):
        match = after(part, match.end() if match else 0)
        if match is None:
            break
    return None if match is None else text.count("\n", 0, match.end()) + 1


def facts_of_file(file: JobFile) -> list[tuple[str, Any, str, int | None]]:
    """Return each fact and each unread key of a job file, with its value, its source or its effect, and its line."""
    text, tool = load(file.file), f"{file.dialect} {file.version}".strip()
    rows = [
        (name, fact.value, f"default of {tool}" if fact.default and not fact.key.startswith("#") else fact.key)
        for name, fact in file.facts.items()
    ]
    counted = {item.key: "is not counted, and in the range" for item in file.uncounted}
    aside = {**dict.fromkeys(counted, ""), **file.aside}
    rows += [(key, value, counted.get(key, "changes neither memory nor time")) for key, value in aside.items()]
    return [(name, value, says, line_of(text, says if name in file.facts else name)) for name, value, says in rows]


def report_facts(file: JobFile) -> None:
    """Print what a job file says: each fact, what says it, and in which line."""
    target = console()
    target.print(f"{file.file} is read as {file.dialect} {file.version}".rstrip())
    rows = [[name, str(value)[:80], says, str(line or "")] for name, value, says, line in facts_of_file(file)]
    wide = [Column("value", "left", wrap=True), Column("says it", "left", wrap=True)]
    draw(target, [Column("fact", "left"), *wide, Column("line")], rows)


def table(checked: Sequence[Checked]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows: a job each, with every quantity that one of them has, and its change over the base."""
    names = [
        name for name in QUANTITIES if any(check.now is not None and name in check.now.values for check in checked)
    ]
    rows = []
    for check in checked:
        state = "ok" if check.code == YES else "cannot tell" if not check.problems else "FAILS"
        row = [check.name, state, "" if check.now is None else check.now.verdict]
        for name in names:
            value = None if check.now is None else check.now.values.get(name)
            more = check.change(name)
            shown = "" if value is None else QUANTITIES[name].show(value)
            row.append(shown if more is None else f"{shown} ({more:+.1%})" if abs(more) >= 0.0005 else f"{shown} (=)")
        rows.append(row)
    return ["job", "", "fit", *names], rows


def report(checked: Sequence[Checked]) -> None:
    """Print the table and what is wrong."""
    target = console()
    head, rows = table(checked)
    columns = [Column(name, "right" if name in QUANTITIES else "left", wrap=name == "job") for name in head]
    draw(target, columns, rows)
    if problems := lines(checked):
        target.print()
        points(target, problems)
    if told := warnings(checked):
        target.print()
        points(target, told, style="dim")


def markdown(checked: Sequence[Checked]) -> str:
    """Return the same for a pull request.

    >>> from loadgauge.core.plan.advise.budget import Figures
    >>> print(markdown([Checked(name="a.yaml", now=Figures("fits", 2.0**34, {"memory": 2.0**33}))]))
    | job |  | fit | memory |
    |---|---|---|--:|
    | a.yaml | ok | fits | 8.00 GiB |
    """

    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(_cell(cell) for cell in cells)} |"

    head, rows = table(checked)
    marks = [":" if name in QUANTITIES else "" for name in head]
    text = [row(head), f"|{'|'.join(f'--{mark}' if mark else '---' for mark in marks)}|", *map(row, rows)]
    problems = [*lines(checked), *warnings(checked)]
    return "\n".join([*text, *([""] if problems else []), *(f"- {_cell(line)}" for line in problems)])


def _cell(text: str) -> str:
    """A text that ends no cell and no line, and is no markup."""
    for letter in "\\|<>`*_[]":
        text = text.replace(letter, f"&#{ord(letter)};" if letter in "|<>" else f"\\{letter}")
    return " ".join(printable(text).split())
