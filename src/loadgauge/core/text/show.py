"""The one place where an answer is printed: as text, whole or in ten lines, as Markdown, as one JSON document, or as CSV."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base.errors import ConfigError, Error
from loadgauge.core.text.table import Markdown, Paper, console, document

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
        shown.text(console(), brief=how.short)
        if how.topic is None and (more := answer.follow()) is not None:
            more.text(console(), brief=True)
            answer = more
    if answer.failed:
        raise Error(answer.failed)
    return answer.code


def _flat(row: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the cells of a row, those of a record within it by both names."""
    for key, value in row.items():
        yield from _flat(value, f"{name}{key}.") if isinstance(value, Mapping) else [(f"{name}{key}", value)]


def blocks(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write an answer that is tables and notes (`table.Table`, `table.Notes`), which are short as they are."""
    for block in answer.shown:
        block.draw(target)
