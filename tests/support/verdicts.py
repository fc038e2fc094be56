"""The four definitions of a verdict, checked on an answer by plain comparisons."""

from __future__ import annotations

from math import isclose
from typing import Any

from loadgauge.core.base.units import GIB

WORDS = {"fits": "FITS", "tight": "TIGHT", "depends": "DEPENDS", "does not fit": "DOES NOT FIT", "unknown": "NEEDS"}


def defined(memory: dict[str, Any]) -> str:
    """The verdict of a document's memory by the definitions alone."""
    low, high, capacity = memory["low"], memory["high"], memory["capacity"]
    if capacity is None:
        return "unknown"
    if low > capacity:
        return "does not fit"
    if high > capacity:
        return "tight"
    return "fits" if memory.get("widest", memory)["high"] <= capacity else "depends"


def code_of(verdict: str, *, allow_tight: bool = False) -> int:
    """The exit code that belongs to a verdict."""
    return 0 if verdict in ("fits", "unknown") or (verdict == "tight" and allow_tight) else 1


def violations(memory: dict[str, Any], code: int, line: str, *, allow_tight: bool = False) -> list[str]:
    """What of an answer goes against the definitions. memory: the document's; line: the first one of the text"""
    verdict, found = memory["verdict"], []
    expected = defined(memory)
    if verdict != expected:
        found.append(f"the verdict is {verdict}, by the range {expected}")
    if code != code_of(expected, allow_tight=allow_tight):
        found.append(f"exit code {code} of {expected}")
    if not memory["low"] <= memory["total"] <= memory["high"]:
        found.append("the value is outside its range")
    if memory["fits"] is not (None if expected == "unknown" else expected == "fits"):
        found.append(f"fits is {memory['fits']}")
    room = "" if memory["capacity"] is None else f" of {memory['capacity'] / GIB:,.1f} GiB"
    if not line.startswith(f"{WORDS[expected]}  {memory['total'] / GIB:,.1f} GiB{room}"):
        found.append(f"the text begins with {line[:60]!r}")
    if f"80 % range {memory['low'] / GIB:,.1f}-{memory['high'] / GIB:,.1f} GiB" not in line:
        found.append("the text has another range")
    question = memory.get("question")
    if expected == "depends" and question is None:
        found.append("nothing is named that decides")
    if question is not None:
        own, *others = question["choices"]
        if not all(
            isclose(own[name], memory[name], rel_tol=1e-12) for name in ("total", "low", "high")
        ):  # sums in another order
            found.append("the assumed answer is not the run")
        for choice in question["choices"]:
            if choice["verdict"] != defined({**choice, "capacity": memory["capacity"]}):
                found.append(f"the verdict of {choice['value']}")
        if all(choice["verdict"] in ("fits", verdict) for choice in others):
            found.append("no answer makes it worse")
    return found
