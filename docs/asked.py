"""Writes docs/asked.md from docs/articles/asked.txt: questions of users, each with the command that answers it.

    python docs/asked.py

A test runs every command and looks for what its answer must have (tests/core/plan/test_questions.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
NONE = "no figure"
RANGE = re.compile(r"range ([\d,.]+)-([\d,.]+) GiB")


class Question(NamedTuple):
    """A question. source: where it was asked; command: without `loadgauge`; right: what a right answer has; open: not answered

    figure: where the figure of a right answer is from, or why there is none; empty: from the source itself
    """

    source: str
    text: str
    command: str
    right: tuple[str, ...]
    open: bool
    figure: str = ""

    def lacks(self, answer: str) -> list[str]:
        """What of a right answer an answer lacks: words, the measured memory inside the range, or the verdict of the run.

        >>> one = Question("", "", "", ("memory 14..16 GiB", "verdict fits, tight", "host"), False)
        >>> one.lacks("TIGHT 15.7 GiB of 14.8 GiB, 80 % range 14.4-21.0 GiB on the host")
        []
        >>> one.lacks("FITS 3 GiB, 80 % range 2-4 GiB")
        ['memory 14..16 GiB', 'host']
        """
        return [one for one in self.right if not _has(answer, one)]


def _has(answer: str, wanted: str) -> bool:
    kind, _, rest = wanted.partition(" ")
    if kind == "verdict":
        return any(answer.startswith(word.upper()) for word in rest.split(", "))
    label, equals, total = wanted.partition(" = ")
    if equals:
        rows = re.findall(f"{re.escape(label)} +([^A-Za-z]*)", answer)
        shown = [one.replace(",", "").rstrip(".") for row in rows for one in re.findall(r"[\d,.]*\d", row)]
        return any(_near(one, eval(total, {"__builtins__": {}})) for one in shown)
    if kind == "memory" and ".." in rest:
        measured = [float(one) for one in rest.removesuffix(" GiB").split("..")]
        shown = RANGE.search(answer)
        low, high = (float(one.replace(",", "")) for one in shown.groups()) if shown else (0.0, 0.0)
        return low <= measured[1] and measured[0] <= high
    return wanted in answer


def _near(shown: str, wanted: float) -> bool:
    """Whether a number as it is shown is one: to half a percent, or to half of its last digit.

    >>> _near("8.65", 8.649), _near("8.7", 8.649), _near("8.74", 8.649)
    (True, True, False)
    """
    last = 10.0 ** -len(shown.partition(".")[2])
    return abs(float(shown) - wanted) <= max(0.005 * wanted, 0.5001 * last if "." in shown else 0.5)


def questions() -> list[Question]:
    """Every question, in order."""
    found = []
    for line in (HERE / "articles" / "asked.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            source, text, command, right, *figure = (part.strip() for part in line.split(" | "))
            still = source.startswith("open ")
            found.append(
                Question(source.removeprefix("open "), text, command, tuple(right.split(" ; ")), still, *figure)
            )
    return found


def page() -> str:
    """The text of docs/asked.md."""
    listed = questions()
    done = sum(not one.open for one in listed)
    held = sum(not one.figure.startswith(NONE) for one in listed)
    text = f"""# Questions that users asked

Written by `python docs/asked.py`; a test runs every command. Of {len(listed)} questions, from threads on the tools'
repositories, their FAQs and their error messages, **{done} are answered ({done / len(listed):.0%})**, and **{held} are held to a
figure**. A right answer has the words beside it; where the thread says what was measured, that lies in the range or is the
verdict. `full FITS = 32*4096*4096*2/2**30`: one of the numbers after these words is the sum, to half a percent. Where a figure
is from stands beside it, unless it is the thread's or page's own; the other {len(listed) - held} say why there is none. One that
is marked open says so in an error, or lacks what is beside it.

| asked | question | a right answer has | its figure is from | command |
|---|---|---|---|---|
"""
    for one in listed:
        right = "; ".join(f"`{each}`" for each in one.right)
        mark = " **(open)**" if one.open else ""
        text += f"| {one.source} | {one.text}{mark} | {right} | {one.figure} | `loadgauge {one.command}` |\n"
    return text


if __name__ == "__main__":
    (HERE / "asked.md").write_text(page(), encoding="utf-8")
