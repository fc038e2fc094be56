"""Tables: no number is cut at any width, what is left out is named, and no text acts on the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pickle
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings, strategies as st

import loadgauge.core.text.table as tables
from command_line import FITS, PIPELINE, TOO_BIG, document, typed
from loadgauge.core.text.table import Column, console, draw, heading, plain, points, printable

COMMANDS = (
    FITS,
    TOO_BIG,
    PIPELINE,
    "estimate mixtral-8x7b --gpu h100-sxm5-80gb --gpus 16 --ep 8 --pp 2 --global-batch 32 --tokens 1T --price 2",
    "estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --micro-batch 4 --lengths uniform:4096",
    f"{FITS} --explain activations",
    "network llama-3.1-8b --gpu h100-sxm5-80gb --gpus 16 --tp 8",
    "plan llama-3.2-1b --gpu h100-sxm5-80gb --gpus 8 --seq-len 2048 --global-batch 64 --price 2",
    "models",
    "gpus",
    "validate --source KOR",
    "equation states",
    "convert --help-all",
)
"""Command lines that print tables, and some that print none."""
NUMBER = re.compile(r"(?<![\w.,])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?%?(?![\w])")


class Drawn(NamedTuple):
    """A table as a command asked for it, and how it was fitted."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    fitted: Any


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Drawn]:
    """Every table that is drawn during the test."""
    found: list[Drawn] = []
    usual = tables._Fitted

    class Recorded(usual):  # type: ignore[valid-type, misc]
        def __init__(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], room: int | None) -> None:
            super().__init__(columns, rows, room)
            found.append(Drawn(columns, rows, self))

    monkeypatch.setattr(tables, "_Fitted", Recorded)
    return found


def name_of(column: Column) -> str:
    return " ".join(column.name.split())


def text_of(table: Drawn) -> str:
    """The table drawn again."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        draw(console(), table.columns, table.rows)
    return out.getvalue()


def check(table: Drawn, fitted: Any, text: str) -> None:
    """Every number of the columns that are shown is whole, and every other column is named."""
    told = " ".join(text.split())
    numbers = NUMBER.findall(text)
    wanted = [number for row in table.rows for index in fitted.widths for number in NUMBER.findall(row[index])]
    for number in set(wanted):
        assert numbers.count(number) >= wanted.count(number), number
    for index in fitted.left_out:
        assert name_of(table.columns[index]) in told.partition("Not shown at this width: ")[2]
    assert "…" not in text


@pytest.mark.parametrize("line", COMMANDS)
def test_no_number_of_a_command_is_cut(line: str, drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text = typed(line).out
    shown = list(drawn)
    for table in shown:
        assert not table.fitted.left_out, "in a pipe nothing is left out"
        for row in table.rows:
            cells = [cell for cell in row if cell]
            assert any(all(cell in out for cell in cells) for out in text.splitlines()), row
    for width in (40, 80, 120, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        for table in shown:
            drawn.clear()
            text = text_of(table)
            (again,) = drawn
            check(table, again.fitted, text)
            assert all(len(out) <= width for out in text.splitlines())


def test_the_tables_of_a_command_are_those_of_its_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = {line.split()[0]: line for line in typed("models").out.splitlines() if line}
    for row in document("models")["models"]:
        for key in ("num_hidden_layers", "hidden_size", "vocab_size", "positions"):
            if row[key] is not None:
                assert f"{row[key]:,}" in re.split(r" {2,}", lines[row["name"]]), (row["name"], key)
    lines = {line.split()[0]: line for line in typed("gpus").out.splitlines() if line}
    for card in document("gpus")["gpus"]:
        cells = re.split(r" {2,}", lines[card["id"]])
        assert f"{card['capacity'] / 2**30:.1f}" in cells
        if card["tdp"] is not None:
            assert f"{card['tdp']:,.0f}" in cells


def test_the_table_of_saved_is_whole(drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("COLUMNS", "40")
    text = typed("saved x*y").out
    (table,) = drawn
    check(table, table.fitted, text)


words = st.text("abcdefg_.-/1234567890, \n中", max_size=30)
numbers = st.one_of(st.integers(0, 10**12).map("{:,}".format), st.floats(0, 1e6).map("{:,.2f}".format))


@st.composite
def any_table(draw: Callable[..., Any]) -> tuple[list[Column], list[list[str]]]:
    count = draw(st.integers(1, 9))
    columns, cells = [], []
    for number in range(count):
        right = draw(st.booleans())
        columns.append(
            Column(
                f"c{number}{draw(words)}" if draw(st.booleans()) else f"c{number}", "right" if right else "left",
                wide=draw(st.booleans()), wrap=not right and draw(st.booleans()), rank=draw(st.integers(0, 2)),
            )
        )  # fmt: skip
        cells.append(draw(st.lists(numbers if right else words, min_size=3, max_size=3)))
    return columns, [list(row) for row in zip(*cells, strict=True)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(any_table(), st.sampled_from([None, 40, 80, 200]))
def test_no_number_of_any_table_is_cut(table: tuple[list[Column], list[list[str]]], width: int | None) -> None:
    columns, rows = table
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        if width is not None:
            patch.setenv("COLUMNS", str(width))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            draw(console(), columns, rows)
    fitted = tables._Fitted(columns, rows, width)
    text = out.getvalue()
    squeezed = re.sub(r"\s", "", text)
    assert 0 in fitted.widths, "the first column always stays"
    assert not (width is None and fitted.left_out)
    for row in rows:
        for index in fitted.widths:
            for number in re.findall(r"\d(?:[\d,.]*\d)?", row[index]):
                assert number in text, (number, text)
            if columns[index].align == "right":
                assert row[index] in text
    shown = "".join(sorted(re.sub(r"\s", "", "".join(row[index] for row in rows for index in fitted.widths))))
    for letter in set(shown):
        assert squeezed.count(letter) >= shown.count(letter), "no character is lost"


# -- the width ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["0", "-5", "abc", "", " ", "0000", "9" * 30, "٣", "1e3"])
def test_a_width_that_is_none_is_ignored(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("estimate gpt2 --gpu rtx4090", "gpus", "network gpt2 --gpu h100-sxm5-80gb --gpus 2")
    monkeypatch.delenv("COLUMNS", raising=False)
    usual = [typed(line) for line in lines]
    monkeypatch.setenv("COLUMNS", columns)
    assert [typed(line) for line in lines] == usual
    assert all(outcome.out for outcome in usual)


def test_any_width_prints_something(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("1", "5", "39", "100000"):
        monkeypatch.setenv("COLUMNS", columns)
        found = typed("estimate gpt2 --gpu rtx4090")
        assert found.code == 0
        assert "weights" in found.out
        assert not found.err


def on_a_terminal(line: str, columns: int, term: str) -> str:
    """What a command prints on a terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")} | {"TERM": term}
    command = [sys.executable, "-m", "loadgauge", *line.split()]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        found = b""
        with contextlib.suppress(OSError):  # Linux says so when the other end is closed.
            while chunk := os.read(ours, 65536):
                found += chunk
        process.wait()
    os.close(ours)
    return found.decode()


@pytest.mark.parametrize(("columns", "term"), [(40, "dumb"), (80, "xterm-256color"), (200, "dumb"), (0, "dumb")])
def test_a_terminal_shows_whole_numbers(columns: int, term: str) -> None:
    text = re.sub(r"\x1b\[[\d;]*m", "", on_a_terminal("models llama --full", columns, term))
    if term == "dumb":
        assert "\x1b" not in text
    lines = {line.split()[0]: re.split(r" {2,}", line.strip()) for line in text.splitlines() if line.strip()}
    assert max(len(line.rstrip()) for line in text.splitlines()) <= (columns or 80)
    for row in document("models llama")["models"]:
        cells = lines.get(row["name"])
        if cells is None:
            assert columns == 40, "only there names of models wrap"
            continue
        assert f"{row['num_hidden_layers']:,}" in cells
        if columns != 40:
            assert f"{row['hidden_size']:,}" in cells
            assert f"{row['vocab_size']:,}" in cells


# -- text of others ----------------------------------------------------------------------------------------------------

HOSTILE = "a\x1b[31mb\u202ec\0d\x07e\u2066f\u200bg\x9bh\u2028i\U000e0041j"


def test_text_of_others_cannot_act_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            target = console()
            draw(target, [Column(HOSTILE), Column("b", wrap=True)], [[HOSTILE, HOSTILE]], HOSTILE)
            heading(target, HOSTILE)
            points(target, [HOSTILE])
        assert all(letter.isprintable() or letter == "\n" for letter in out.getvalue())
        assert "\\u202e" in out.getvalue()
        assert "\\x1b[31m" in out.getvalue()


def test_documents_read_the_same_and_act_on_nothing() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        tables.document({"text": HOSTILE, "more": "\x7f\ud7ff中é", "count": [1, 2.5]})
    assert all(letter.isprintable() or letter == "\n" for letter in out.getvalue())
    assert "中é" in out.getvalue()
    assert json.loads(out.getvalue()) == {"schema": 1, "text": HOSTILE, "more": "\x7f\ud7ff中é", "count": [1, 2.5]}


@given(st.text(max_size=40))
def test_printable_text_is_printable(text: str) -> None:
    assert all(letter.isprintable() or letter == "\n" for letter in printable(text))
    assert printable(printable(text)) == printable(text)


def test_a_snapshot_with_hostile_names(tmp_path: Path) -> None:
    frames = [{"name": HOSTILE, "filename": "train.py", "line": 3}]
    event = {"action": "alloc", "addr": 10, "size": 5, "stream": 0, "frames": frames}
    blocks = [{"address": 10, "size": 5, "state": "active_allocated", "frames": frames}]
    segment = {"device": 0, "address": 0, "total_size": 100, "blocks": blocks}
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[event]]}))
    found = typed(["why", str(tmp_path / "snapshot.pickle")])
    assert found.code == 0
    assert "train.py:3" in found.out
    assert all(letter.isprintable() or letter == "\n" for letter in found.out)


# -- streams that are closed or full -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        ("estimate gpt2 >&-", 2, "loadgauge: standard output is closed\n"),
        ("estimate gpt2 --json >&-", 2, "loadgauge: standard output is closed\n"),
        ("estimate nothing.json 2>/dev/full", 2, ""),
        ("estimate nothing.json 2>&-", 2, ""),
        ("estimate gpt2 >/dev/full", 2, "loadgauge: No space left on device\n"),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_and_full_streams(
    redirection: str, code: int, said: str, unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    found = subprocess.run(
        ["/bin/sh", "-c", f"{shlex.quote(sys.executable)} -m loadgauge {redirection}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stderr) == (code, said)


def test_what_is_typed_is_never_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of models and GPUs stand whole on a small terminal; other columns give way."""
    monkeypatch.setenv("COLUMNS", "40")
    row = ["granite-4.0-h-small", "a type of many words", "1,234,567"]
    columns = [Column("model", whole=True), Column("type", rank=1), Column("parameters", "right")]
    assert row[0] in plain(lambda target: draw(target, columns, [row]), 40)
    columns[0] = Column("model")
    assert row[0] not in plain(lambda target: draw(target, columns, [row]), 40)
