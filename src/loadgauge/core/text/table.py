"""Tables and text on the terminal, drawn with rich, which is imported only here and only when something is drawn.

A cell is never cut. On a terminal, columns of text wrap and whole columns are left out, which a line below the table
says; in a pipe a table is as wide as it needs to be, one line a row.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO, TypeAlias

import msgspec

from loadgauge.core.text.language import said

if TYPE_CHECKING:
    from rich.console import Console

Paper: TypeAlias = "Console | Markdown"
"""A terminal, a file, or a sheet of Markdown."""
GLUE = "\0"
SCREEN = 12
"""Lines of the terminal that a short answer has."""
NARROWEST = 40
"""Columns for which text is laid out where the terminal is narrower still."""
DEFAULT = 80
"""Columns of a paragraph where the width is not known."""
GAP = 3
"""Blanks between two columns of a table."""
COMFORTABLE, TIGHT = 28, 16
"""Characters that a column of text gets before optional columns are shown, and before a column is left out."""


class Column(msgspec.Struct, frozen=True):
    """A column of a table.

    wide: shown only where there is ample room; wrap: may take several lines; whole: what is typed, never broken. Where the rest
    does not fit either, the columns of the highest `rank` are left out first, from the right; the first column always stays.
    """

    name: str
    align: Literal["left", "right"] = "left"
    style: str = ""
    wide: bool = False
    wrap: bool = False
    whole: bool = False
    rank: int = 0


def printable(text: str) -> str:
    r"""Escape control, bidirectional and other invisible characters of a text; newlines stay.

    >>> printable("a\x1b[31m\u202eb\0\tc")
    'a\\x1b[31m\\u202eb\\x00 c'
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter == "\n" else " " if letter == "\t" else ascii(letter)[1:-1]
        for letter in text
    )


def console(file: TextIO | None = None, columns: int = DEFAULT) -> Console:
    """Return a console for the terminal, or for a file of that many columns. No colour except on a terminal."""
    from rich.console import Console

    width = columns if file is not None else _columns() or _terminal() or DEFAULT
    # With a height too, for rich takes a terminal without one for 80 columns if it is dumb.
    return Console(file=file, highlight=False, markup=False, emoji=False, width=width, height=25)


def plain(write: Callable[[Console], object], columns: int = DEFAULT) -> str:
    """Return what is written on a console of that many columns, without colours and the last line break."""
    write(console(lines := io.StringIO(), columns))
    return lines.getvalue().rstrip("\n")


def _columns() -> int | None:
    """The width that COLUMNS asks for; None where it is unset or no width."""
    text = os.environ.get("COLUMNS", "")
    return min(int(text), 100_000) if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) else None


def _terminal(stream: TextIO | None = None) -> int | None:
    """The width of the terminal; None where a stream (stdout) is none, or does not know."""
    stream = stream or sys.stdout
    try:
        return (os.get_terminal_size(stream.fileno()).columns or DEFAULT) if stream.isatty() else None
    except (OSError, ValueError, AttributeError):
        return None


class Markdown:
    """A sheet of Markdown, on which texts are written as on a terminal. width, encoding, is_terminal: as of a `Console`"""

    width, encoding, is_terminal = 10**6, "utf-8", False

    def __init__(self) -> None:
        self.file = io.StringIO()

    def print(self, text: object = "", *, style: str = "", **_: object) -> None:
        """Write a line: a paragraph, an item of a list, a heading, or a command that begins with blanks."""
        line = _escaped_signs(str(text))
        if style == "heading":
            line = f"## {line}"
        elif "bold" in style:
            line = f"**{line}**"
        elif line.startswith("  "):
            line = f"    {line.strip()}"
        self.file.write(f"{line}\n" if line.startswith("- ") else f"\n{line}\n" if line else "")

    def table(self, names: list[str], sides: list[str], rows: list[list[str]]) -> None:
        """Write a table, with the numbers at the right."""
        rules = ["---:" if side == "right" else "---" for side in sides]
        self.file.write("\n")
        for row in (names, rules, *rows):
            self.file.write(f"| {' | '.join(_escaped_signs(cell).replace('|', '&#124;') for cell in row)} |\n")


def _escaped_signs(text: str) -> str:
    """A text without what Markdown would take for its own signs.

    >>> _escaped_signs("a*b <c>")
    'a\\\\*b &lt;c>'
    """
    return re.sub(r"([*_`])", r"\\\1", text).replace("<", "&lt;").replace("\n", " ")


def room() -> int | None:
    """Return the characters that a line of a table may have; None in a pipe without COLUMNS."""
    width = _columns() or _terminal()
    return None if width is None else max(width, NARROWEST)


def draw(
    target: Paper,
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    title: str = "",
    strong: Sequence[int] = (),
) -> None:
    """Print a table with a line under its head. `strong`: indices of the rows in bold."""
    from rich.cells import cell_len

    if title:
        heading(target, title)
    names = [printable("\n".join(map(said, column.name.split("\n")))) for column in columns]
    worded = [not column.whole for column in columns]
    cells = [[printable(said(cell) if word else cell) for word, cell in zip(worded, row, strict=True)] for row in rows]
    if isinstance(target, Markdown):
        target.table(names, [column.align for column in columns], cells)
        return
    fitted = _Fitted(columns, cells, room())
    # Not rich's Table, which would measure, wrap and align every cell once more: half of the time of a report.
    between, rule = (" | ", "-+-") if not target.encoding.startswith("utf") else ("   ", "───")
    shown = [columns[index] for index in fitted.widths]
    table = [[wrapped(row[index], width) for index, width in fitted.widths.items()] for row in (names, *cells)]
    widths = [max(cell_len(line) for row in table for line in row[index]) for index in range(len(shown))]
    for number, row in enumerate(table):
        styles = ["dim" if number == 0 else column.style for column in shown]
        for line in itertools.zip_longest(*row, fillvalue=""):
            aligned = [_align(*cell) for cell in zip(line, shown, widths, strict=True)]
            _print_line(target, aligned, styles, between, bold=number - 1 in strong)
        if number == 0:
            _print_line(target, [rule[0] * width for width in widths], [], rule)
    if left_out := [name for index in fitted.left_out if (name := " ".join(names[index].split()))]:
        there = f"a terminal of {fitted.whole} columns, a pipe, or --json"
        points(target, [f"Not shown at this width: {', '.join(left_out)} (needs {there})."], "", "dim")


class _Fitted:
    """Which columns of a table are shown, and how wide each is, in `room` characters (None: as many as it takes).

    widths: by the index of the column; whole: characters from which on no column is left out
    """

    def __init__(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int | None) -> None:
        from rich.cells import cell_len

        self.columns = columns
        texts = [[column.name, *(row[index] for row in rows)] for index, column in enumerate(columns)]
        self.natural = [max(cell_len(line) for text in mine for line in text.split("\n")) for mine in texts]
        words = [[word for text in mine for word in text.split()] for mine in texts]
        longest = [max(map(cell_len, mine), default=0) for mine in words]
        # No number is broken, whatever the width.
        numbers = [max((len(number) for word in mine for number in NUMBER.findall(word)), default=0) for mine in words]
        self.least = [
            self.natural[index]
            if column.align == "right" or column.whole
            else max(numbers[index], min(longest[index], TIGHT))
            for index, column in enumerate(columns)
        ]
        self.ample = [
            max(self.least[index], min(self.natural[index], COMFORTABLE)) if column.wrap else self.natural[index]
            for index, column in enumerate(columns)
        ]
        every = list(range(len(columns)))
        self.whole = self._sum(self.ample, every)
        shown = every if room is None else self._chosen(every, room)
        self.widths = {index: self.natural[index] for index in shown}
        if room is not None:
            self._shrink(room)
        self.left_out = [index for index in every if index not in shown]

    @property
    def width(self) -> int:
        """Characters of a line of the table."""
        return sum(self.widths.values()) + GAP * (len(self.widths) - 1)

    def _sum(self, widths: Sequence[int], shown: Sequence[int]) -> int:
        return sum(widths[index] for index in shown) + GAP * (len(shown) - 1)

    def _chosen(self, shown: list[int], room: int) -> list[int]:
        """The columns left when the dispensable ones are dropped: first those for wide terminals, then by rank."""
        for widths, dispensable in (
            (self.ample, [index for index in shown[1:] if self.columns[index].wide]),
            (self.least, shown[1:]),
        ):
            order = sorted(dispensable, key=lambda index: (self.columns[index].rank, index))
            while order and self._sum(widths, shown) > room:
                dropped = order.pop()
                shown = [index for index in shown if index != dropped]
        return shown

    def _shrink(self, room: int) -> None:
        """Takes from the widest columns of text until the table fits, from those that may wrap first."""
        for wrap in (True, False):
            while self.width > room:
                open_ = [
                    index
                    for index, width in self.widths.items()
                    if self.columns[index].wrap is wrap and width > self.least[index]
                ]
                if not open_:
                    break
                self.widths[max(open_, key=lambda index: self.widths[index])] -= 1


NUMBER = re.compile(r"\d(?:[\d,.]*\d)?%?")
"""A number as tables print it."""
PIECE = re.compile(rf"{NUMBER.pattern}|[^\W\d]+|.", re.DOTALL)
"""What a word may be broken into: numbers, runs of letters, signs."""


def wrapped(text: str, width: int) -> list[str]:
    """Wrap a text into lines of at most `width` characters. Long words are broken, numbers never.

    >>> wrapped("kept by attention.residual_dropout of 14,336 B", 16)
    ['kept by', 'attention.', 'residual_dropout', 'of 14,336 B']
    >>> wrapped("14,336", 3)
    ['14,336']
    """
    return [line for paragraph in text.split("\n") for line in folded(paragraph, width, broken=True)]


def _pieces(word: str, width: int) -> list[str]:
    """The parts of a word that is wider than a line; numbers stay whole."""
    from rich.cells import chop_cells

    runs = PIECE.findall(word)
    return [part for piece in runs for part in ([piece] if piece[0].isdigit() else chop_cells(piece, max(width, 1)))]


def _align(text: str, column: Column, width: int) -> str:
    """The text with as many blanks as fill the width of its column."""
    from rich.cells import cell_len

    blanks = " " * (width - cell_len(text))
    return blanks + text if column.align == "right" else text + blanks


def _print_line(target: Paper, cells: Sequence[str], styles: Sequence[str], between: str, bold: bool = False) -> None:
    """Prints a line of a table, however wide; to a file, without styles and without blanks at its end."""
    if not target.is_terminal:
        target.file.write(f"{between.join(cells).rstrip()}\n")
    else:
        from rich.text import Text

        line = Text(between).join(
            Text(cell, f"{'bold ' if bold else ''}{style}".strip())
            for cell, style in itertools.zip_longest(cells, styles, fillvalue="")
        )
        target.print(line, soft_wrap=True)


class Table(NamedTuple):
    """A table as data; strong: indices of the rows in bold"""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    title: str = ""
    strong: Sequence[int] = ()

    def draw(self, target: Paper) -> None:
        """Print it."""
        draw(target, *self)


class Lines(NamedTuple):
    """Lines as data that are never broken, for they are there to be copied."""

    lines: Sequence[str]
    style: str = ""

    def draw(self, target: Paper) -> None:
        """Print them."""
        for line in self.lines:
            target.print(said(line), style=self.style, soft_wrap=True)


Block: TypeAlias = "Table | Lines | Notes"


class Notes(NamedTuple):
    """Lines as data, below a title or an empty line where they have one."""

    lines: Sequence[str]
    title: str = ""
    mark: str = "- "
    style: str = ""
    gap: bool = False

    def draw(self, target: Paper) -> None:
        """Print them."""
        if self.title:
            heading(target, self.title)
        elif self.gap:
            target.print()
        points(target, self.lines, self.mark, self.style)


def heading(target: Paper, text: str) -> None:
    """Print a heading after an empty line."""
    target.print()
    points(target, [text], "", "heading" if isinstance(target, Markdown) else "bold")


def section(target: Paper, title: str, lines: Sequence[str], mark: str = "- ") -> None:
    """Print a list below its heading; nothing where it is empty."""
    if lines:
        heading(target, title)
        points(target, lines, mark)


def points(target: Paper, lines: Iterable[str], mark: str = "- ", style: str = "") -> None:
    """Print a list, wrapped and indented; a mark of "" gives paragraphs. `GLUE` is a non-breaking space."""
    for line in map(said, lines):
        if isinstance(target, Markdown):
            target.print(f"{mark if mark == '- ' else ''}{printable(line.replace(GLUE, ' '))}", style=style)
            continue
        plain_line = GLUE.join(printable(part) for part in line.split(GLUE))
        for part in folded(mark + plain_line, max(target.width, NARROWEST), " " * len(mark)) if line else ():
            target.print(part, soft_wrap=True, style=style)


UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]i?B|[KMGT]B/s|[mu]?s|h|MWh|TFLOP/s)\b)")
"""The blank between a number and its unit, where no line ends."""
WORD = re.compile(r"\s*（*(?:[⺀-⿿ぁ-鿿]{1,12}|[^\s⺀-￮]+|[⺀-￮])[，。；：！？）、]*")
"""A word, or some Chinese ones, with the signs of their sentence: they stay on one line."""


def folded(text: str, width: int, indent: str = "", *, broken: bool = False) -> list[str]:
    """Wrap a text at words, or between Chinese ones, and no number from its unit.

    indent: of the lines after the first; broken: whether words that are wider than a line are

    >>> folded("A step: 2.57 s, MFU 51%", 14, "  ")
    ['A step:', '  2.57 s, MFU', '  51%']
    """
    from rich.cells import cell_len

    lines = [""]
    for word in (each.replace(GLUE, " ") for each in WORD.findall(UNIT.sub(GLUE, text))):
        for piece in _pieces(word, width) if broken and cell_len(word.strip()) > width else [word]:
            if lines[-1].strip() and cell_len(lines[-1] + piece) > width:
                lines.append(indent + piece.lstrip())
            else:
                lines[-1] += piece
    return [line.rstrip() for line in lines]


def wrapped_lines(lines: Iterable[str], width: int) -> list[str]:
    """Return lines of text wrapped at words, the rest of each further in.

    >>> wrapped_lines(["Try --zero 3: 1.5 GiB", "  In trl: fsdp: true"], 16)
    ['Try --zero 3:', '  1.5 GiB', '  In trl: fsdp:', '    true']
    """
    each = [line for text in lines for line in printable(text).split("\n")]
    return [part for line in each for part in folded(line, width, " " * (2 + len(line) - len(line.lstrip())))]


def height(lines: Iterable[str]) -> int:
    """Lines of the terminal that some lines of text take, wrapped at words."""
    from rich.cells import cell_len

    width = room() or DEFAULT
    return sum(max(1, -(-cell_len(line) // width)) for line in wrapped_lines(lines, width))


def print_note(text: str) -> None:
    """Print a line on standard error, wrapped at words where that is a terminal."""
    width = _terminal(sys.stderr)
    if sys.stderr is not None:
        print(*([text] if width is None else folded(text, _columns() or width, "  ")), sep="\n", file=sys.stderr)


def show_command(target: Paper, command: str, title: str = "To reproduce it:") -> None:
    """Print a command line unwrapped, on a line of its own, so that it can be copied whole."""
    target.print(said(title))
    target.print(f"  {command}", soft_wrap=True)


def first_line(target: Paper, line: str, word: str, style: str) -> None:
    """Print the first line of an answer, the word that it begins with in a style: one line, but wrapped on a terminal."""
    from rich.text import Text

    line = printable(said(line))
    first, *others = folded(line, target.width, "  ") if target.is_terminal else [line]
    text = Text("\n".join([first, *others]))
    text.stylize(style, 0, len(said(word)))
    target.print(text, soft_wrap=True)


def bar(target: Paper, share: float, width: int = 10) -> str:
    """Return a horizontal bar for a share between 0 and 1, `width` characters at 1."""
    if "utf" not in target.encoding.lower():
        return "#" * round(max(0.0, min(1.0, share)) * width)
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


ABOVE: list[str] = []
"""Lines on standard error before the answer, which share its screen."""

SCHEMA = 1
"""Version of the documents' shape (`loadgauge schema`): another number where a key changes its meaning or goes."""


def document(value: Any) -> None:
    """Print one JSON document on stdout, with the version of its shape.

    Characters that a terminal would not show, or act on, are escaped.
    """
    plain = value if isinstance(value, dict) else msgspec.to_builtins(value)
    value = {"schema": SCHEMA, **plain}
    try:
        text = msgspec.json.format(msgspec.json.encode(value, enc_hook=float), indent=2).decode()
    except UnicodeEncodeError:  # A path that is not Unicode.
        text = json.dumps(value, indent=2)
    sys.stdout.write("".join(map(_escaped, text)) if not text.replace("\n", " ").isprintable() else text)
    sys.stdout.write("\n")


def _escaped(letter: str) -> str:
    """A character of a JSON document, as an escape where it is not printable."""
    return letter if letter.isprintable() or letter == "\n" else json.dumps(letter)[1:-1]
