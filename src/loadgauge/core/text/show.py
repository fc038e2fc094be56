"""The one place where an answer is printed: as text, whole or in ten lines, as Markdown, as one JSON document, or as CSV."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base.errors import ConfigError, Error
from loadgauge.core.text.table import Markdown, console, document


class How(NamedTuple):
    """The form in which an answer is asked for. topic: to be explained; file, figure: to be drawn; the others: how it is printed"""

    json: bool = False
    csv: bool = False
    markdown: bool = False
    brief: bool | None = None
    topic: str | None = None
    file: str | None = None
    figure: str = "all"

    @property
    def short(self) -> bool:
        """Return whether a text is short: where it is asked for, and by default on a terminal."""
        return sys.stdout.isatty() if self.brief is None else self.brief

    def check(self) -> None:
        """Raise `ConfigError` where two forms are asked for, or a figure without a file."""
        forms = [name for name in ("json", "csv", "markdown") if getattr(self, name)]
        if self.brief is not None and forms and not self.markdown:
            forms.append("brief" if self.brief else "full")
        if len(forms) > 1:
            raise ConfigError(f"--{forms[0]} and --{forms[1]} exclude one another")
        if self.file is None and self.figure != "all":
            raise ConfigError("needs --plot FILE, whose figure it chooses", key="figure")


def show(answer: Answer, how: How) -> int:
    """Print an answer, or what explains a number of it, and return its exit code. Raises `ConfigError`."""
    shown = answer if how.topic is None else answer.why(how.topic)
    if how.file is not None:
        answer.plot(Path(how.file), how.figure)
    if how.json:
        document(shown.to_dict())
    elif how.csv:
        from loadgauge.core.text.rows import print_csv  # with the sweeps

        rows = shown.table or [{**entry.keys, "value": entry.value, "unit": entry.unit} for entry in shown.ledger()]
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
