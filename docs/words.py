"""Writes docs/words.md from docs/articles/words.txt: words that tools share and mean differently, as they are read here.

    python docs/words.py

A test reads every line as its tool's job file (tests/job_files/test_words.py).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import loadgauge
from loadgauge.job_files.dialects import dialect

HERE = Path(__file__).parent
SUFFIXES = {"json": ".json", "argv": ".sh", "toml": ".toml", "yaml": ".yaml"}


class Word(NamedTuple):
    """A word of a tool: lines of its job file, its meaning there, and the fact that it is here, with its value."""

    word: str
    tool: str
    lines: str
    meaning: str
    fact: str
    value: str

    def read(self) -> tuple[str, str]:
        """Return the tool and the value that the lines are read as, in a file of the tool's syntax."""
        text = self.lines.replace("\\n", "\n")
        syntax = {"{": "json", "-": "argv", "[": "toml"}.get(text[0], "yaml")
        start = dialect(self.tool).blank.get("argv", "") if syntax == "argv" else ""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"job{SUFFIXES[syntax]}"
            file.write_text(f"{start.rstrip()} {text}\n" if start else f"{text}\n", encoding="utf-8")
            job = loadgauge.read(file, gpus=8, dialect=self.tool)
        return job.dialect, str(job.facts[self.fact].value)


def words() -> tuple[Word, ...]:
    """Return the lines of the list."""
    lines = (HERE / "articles" / "words.txt").read_text(encoding="utf-8").splitlines()
    return tuple(Word(*(cell.strip() for cell in line.split(" | "))) for line in lines if not line.startswith("#"))


def page() -> str:
    """Return the text of docs/words.md."""
    rows = "\n".join(
        f"| {each.word} | {dialect(each.tool).title} | `{each.lines.replace(chr(92) + 'n', '; ')}` | {each.meaning} |"
        f" `{each.fact}` {each.read()[1]} |"
        for each in words()
    )
    return f"""# Words that tools share

Written by `python docs/words.py`: each line is read as its tool's job file, and a test holds it to its meaning there.

| word | tool | as it is written | what it means there | read as |
|---|---|---|---|---|
{rows}
"""


if __name__ == "__main__":
    (HERE / "words.md").write_text(page(), encoding="utf-8")
