"""The one place where an answer is printed: as text, whole or in ten lines, as Markdown, as one JSON document, or as CSV."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base.errors import ConfigError, Error
from loadgauge.core.text.language import said
from loadgauge.core.text.table import ABOVE, SCREEN, Markdown, Paper, console, document

if TYPE_CHECKING:
    from rich.console import Console

BLOCKS = "loadgauge.core.text.show:blocks"
"""The writer of answers that are tables and notes."""


class How(NamedTuple):
    """The form in which an answer is asked for. topic: to be explained; plot, figure: to be drawn; the others: how it is printed"""

    json: bool = False
    csv: bool = False
    markdown: bool = False
    brief: bool | None = None
    topic: str | None = None
    plot: str | None = None
    figure: str = "all"

    @property
    def short(self) -> bool:
        """Return whether a text is short: where it is asked for, and by default on a terminal; an explanation is whole."""
        return self.topic is None and sys.stdout.isatty() if self.brief is None else self.brief

    def check(self) -> None:
        """Raise `ConfigError` where two forms are asked for, or a figure without a file."""
        forms = [name for name in ("json", "csv", "markdown") if getattr(self, name)]
        if self.brief is not None and forms and not self.markdown:
            forms.append("brief" if self.brief else "full")
        if len(forms) > 1:
            raise ConfigError(f"--{forms[0]} and --{forms[1]} exclude one another")
        if self.plot is None and self.figure != "all":
            raise ConfigError("needs --plot FILE, whose figure it chooses", key="figure")


def show(answer: Answer, how: How) -> int:
    """Print an answer, or what explains a number of it, and return its exit code. Raises `ConfigError`."""
    shown = answer if how.topic is None else answer.why(how.topic)
    if how.plot is not None:
        answer.plot(Path(how.plot), how.figure)
    if how.json:
        document(shown.to_dict())
    elif how.csv:
        from loadgauge.core.text.rows import print_csv  # with the sweeps

        rows = [dict(_flat(row)) for row in shown.table] or [
            {**entry.keys, "value": entry.value, "unit": entry.unit} for entry in shown.ledger()
        ]
        print_csv(rows, list(dict.fromkeys(name for row in rows for name in row)))
    elif how.markdown:
        paper = Markdown()
        shown.text(paper, brief=how.short)
        sys.stdout.write(paper.file.getvalue())
    else:
        write_screen(shown, console(), how.short)
        if how.topic is None and (more := answer.follow()) is not None:
            write_screen(more, console(), True)
            answer = more
    if answer.failed:
        raise Error(answer.failed)
    return answer.code


def write_screen(answer: Answer, target: Console, brief: bool) -> None:
    """Write an answer; brief, on a terminal: what one small screen has, and how many lines are left."""
    if not brief or not target.is_terminal:
        answer.text(target, brief=brief)
        return
    with target.capture() as kept:
        answer.text(target, brief=True)
    lines = kept.get().rstrip("\n").split("\n")
    if taken(lines, target.width) > SCREEN:
        lines = [line for line in lines if seen(line).strip()]
    shown = len(lines)
    while taken([*lines[:shown], ""][: len(lines)], target.width) > SCREEN:
        shown -= 1
    more = [] if shown == len(lines) else [said(f"{len(lines) - shown} more lines: --full")]
    target.file.write("\n".join([*lines[:shown], *more, ""]))


def taken(lines: Iterable[str], width: int) -> int:
    """Return the lines of a terminal that some lines take, with those above them."""
    from rich.cells import cell_len

    return sum(max(1, -(-cell_len(seen(line)) // width)) for line in [*ABOVE, *lines])


def seen(line: str) -> str:
    """Return a line without its colours. ``seen("\\x1b[1mFITS\\x1b[0m") == "FITS"``"""
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def _flat(row: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the cells of a row, those of a record within it by both names."""
    for key, value in row.items():
        yield from _flat(value, f"{name}{key}.") if isinstance(value, Mapping) else [(f"{name}{key}", value)]


def blocks(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write an answer that is tables and notes (`table.Table`, `table.Notes`), which are short as they are."""
    for block in answer.shown:
        block.draw(target)
