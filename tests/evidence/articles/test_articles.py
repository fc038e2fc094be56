"""`loadgauge article`: whatever is not as printed says why, and is told. What is right of each row: test_recomputed.py."""

from __future__ import annotations

import csv
import io
import re
from importlib.util import find_spec
from typing import Any

import pytest

from command_line import document, typed
from loadgauge.evidence.articles.article import Row, article, check_all, numbers, verdicts
from loadgauge.evidence.articles.quantities import QUANTITIES


@pytest.mark.parametrize("number", numbers())
def test_what_differs_says_why_and_nothing_else_does(number: int) -> None:
    for table, rows in zip(article(number).table, check_all(number), strict=True):
        for one in rows:
            assert (one.agrees is None) == (not one.row.printed or one.right is None)
            assert (one.agrees is False) == bool(one.wrong)
            # A row's own reason is for what is wrong.
            assert not one.row.wrong or one.agrees is not True, one.row.what
        assert not table.wrong or any(one.wrong == table.wrong or one.right is None for one in rows), (
            "a reason for nothing"
        )


def row_of(**fields: Any) -> Row:
    """A row with these fields."""
    return Row(what="", unit="", by="", claim="", **fields)


@pytest.mark.parametrize(
    ("row", "right", "agrees"),
    [
        (row_of(printed="43"), 43.49, True), (row_of(printed="43"), 43.51, False), (row_of(printed="43"), 42.49, False),
        (row_of(printed="99.5", cut=True), 99.599, True), (row_of(printed="99.5", cut=True), 99.499, False),
        (row_of(printed="2", exact=True), 2, True), (row_of(printed="2", exact=True), 1.84, False),
        (row_of(printed="5", at_most=True), 5, True), (row_of(printed="5", at_most=True), 5.1, False),
        (row_of(printed="1", at_least=True), 1.19, True), (row_of(printed="1", at_least=True), 0.95, False),
        (row_of(printed="30 to 80"), 81.01, False), (row_of(printed="30 to 80", within=0.02), 81.01, True),
        (row_of(printed="30 to 80", within=0.02), 28.2, False), (row_of(printed="100 to 300"), 299.98, True),
    ],
)  # fmt: skip
def test_what_agrees(row: Row, right: float, agrees: bool) -> None:
    low, high = row.bounds
    assert (low <= right <= high) == agrees


def test_a_claim_is_wrong_in_part_where_only_some_rows_are() -> None:
    found = verdicts(3)
    assert found["3.5"] == "wrong"
    assert found["3.34"] == found["3.37"] == "wrong in part"
    assert found["3.4"] == found["3.30"] == ""
    assert "3.29" not in found, "nothing is printed"


def test_every_quantity_is_used() -> None:
    rows = [row for number in numbers() for table in article(number).table for row in table.row]
    assert {row.by for row in rows} | {row.of["by"] for row in rows if row.by == "ratio"} == set(QUANTITIES)


def test_the_corrections_are_told() -> None:
    """The audit's list of what is wrong: a reader of the text finds each."""
    told = {number: typed(f"article {number}").out for number in numbers()}
    for number, words in (
        (1, ["LLaMA has no dropout", "masks of dropout stay one byte", "more than 12", "8.0625 h^2"]),
        (2, ["square root is taken of gigabytes", "no second one", "depends on the network"]),
        (3, ["inference has no backward", "44 cards hold the states", "gathered once more", "2.8 hours", "need less"]),
        (4, ["half of the kernel's own output", "copies without padding", "counted twice"]),
        (5, ["plain SGD keeps nothing", *(["slip of units"] if find_spec("torch") else [])]),
    ):
        text = " ".join(told[number].split())
        assert all(word in text for word in words), number
        marks = {int(mark) for mark in re.findall(r"WRONG \[(\d+)\]", text)}
        assert marks == set(range(1, len(marks) + 1))
        assert all(text.count(f"[{mark}]") >= 2 for mark in marks), "each mark has its reason below"


def test_json_and_csv() -> None:
    tables = document("article 1")["tables"]
    rows = [row for table in tables for row in table["rows"]]
    lines = list(csv.DictReader(io.StringIO(typed("article 1 --csv").out)))
    assert [float(line["right"]) for line in lines] == [row["right"] for row in rows]
    assert [line["table"] for line in lines] == [table["title"] for table in tables for _ in table["rows"]]


def test_what_is_refused() -> None:
    for line in ("article 6", "article", "article x", "article 1 --csv --json"):
        assert typed(line).code == 2
    assert "articles 1 to 5" in typed("article 6").err
