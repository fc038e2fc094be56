"""Every case is claimed by exactly one test, or is named here as one of a later part."""

from __future__ import annotations

import importlib
from collections import Counter

from theory import CASES, TESTED

MODULES = ("test_article1", "test_article2", "test_article3", "test_article4", "test_article5", "test_sources")

SIZES = ("13B", "65B", "175B")
NETWORK = {
    "A3-BUSFACTOR-8",
    "A3-AMDAHL-S",
    "A3-AMDAHL-E",
    *(
        f"A3-NCCL-{kind}"
        for kind in ("allreduce", "alltoall", "allgather", "reducescatter", "gather", "sendrecv", "broadcast")
    ),
    *(f"A3-TRAF-{size}-{what}" for size in SIZES for what in ("TPCALLS", "TPEL", "TPWIRE", "PPWIRE", "DPWIRE")),
    *(f"A3-BW-S{n}-{axis}-{end}" for n in range(1, 7) for axis in ("TP", "DP") for end in ("LO", "HI")),
    *(f"A3-BW-S{n}-{size}-{axis}" for n in range(1, 7) for size in SIZES for axis in ("TP", "PP", "DP")),
}
"""Collectives, traffic and bandwidth of article 3."""
LATER = NETWORK


def test_every_case_is_claimed_by_exactly_one_test() -> None:
    for module in MODULES:
        importlib.import_module(module)
    often = {name: tests for name, tests in TESTED.items() if len(set(tests)) != 1 or len(tests) != 1}
    assert not often
    assert not TESTED.keys() & LATER, "a case of a later part is tested: take it off the list"
    assert not CASES.keys() - TESTED.keys() - LATER, "cases that no test claims"
    assert not (TESTED.keys() | LATER) - CASES.keys(), "no such cases"


def test_how_many_there_are() -> None:
    groups = Counter(name.split("-")[0] for name in CASES)
    assert groups == {"A1": 18, "A2": 26, "A3": 182, "A4": 23, "A5": 20, "S": 63}
    assert len(CASES) == sum(groups.values()) == 332
    assert len(LATER) == len(NETWORK) == 103
