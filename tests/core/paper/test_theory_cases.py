"""Every case is claimed by exactly one test."""

from __future__ import annotations

import importlib
from collections import Counter

import pytest

from theory import CASES, TESTED

MODULES = (
    "test_article1", "test_article2", "test_article3", "test_article3_network", "test_article4", "test_article5",
    "test_sources",
)  # fmt: skip


@pytest.mark.slow
def test_every_case_is_claimed_by_exactly_one_test() -> None:
    for module in MODULES:
        importlib.import_module(module)
    often = {name: tests for name, tests in TESTED.items() if len(set(tests)) != 1 or len(tests) != 1}
    assert not often
    assert not CASES.keys() - TESTED.keys(), "cases that no test claims"
    assert not TESTED.keys() - CASES.keys(), "no such cases"


def test_how_many_there_are() -> None:
    groups = Counter(name.split("-")[0] for name in CASES)
    assert groups == {"A1": 18, "A2": 26, "A3": 182, "A4": 23, "A5": 20, "S": 63}
    assert len(CASES) == sum(groups.values()) == 332
