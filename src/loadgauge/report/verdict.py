"""The verdict in words, as every report of an estimate begins."""

from __future__ import annotations

from loadgauge.estimate.result import Estimate, Memory
from loadgauge.units import gib, in_gib

WORDS = {
    "fits": ("FITS", "bold green"),
    "tight": ("TIGHT", "bold yellow"),
    "does not fit": ("DOES NOT FIT", "bold red"),
    "unknown": ("NEEDS", "bold"),
}
"""The verdict, and its colour."""
ENDINGS = {
    "fits": ", which fits too.",
    "tight": ", which is TIGHT.",
    "does not fit": ", which DOES NOT FIT.",
    "unknown": ".",
}
"""How a line about a worst case ends, by its verdict."""
STYLES = {"tight": "yellow", "does not fit": "red"}
"""Colours of such a line."""


def verdict_words(result: Estimate) -> str:
    """Return the verdict with what it needs of the capacity and the range of that.

    >>> from loadgauge import Layout, estimate, model
    >>> verdict_words(estimate(model("gpt2"), Layout(seq_len=1024))).split()[0]
    'NEEDS'
    """
    memory = result.memory
    capacity = "" if memory.capacity is None else f" of {gib(memory.capacity, 1)}"
    own = memory.range_of()
    return f"{WORDS[memory.verdict][0]}  {gib(memory.total, 1)}{capacity}, 80 % range {in_gib(own.low, 1)}-{gib(own.high, 1)}"


def outcome_words(memory: Memory) -> list[str]:
    """Return a line for each way in which the run may train as well, for all that is said, far from the assumed one."""
    lines = []
    for outcome in memory.outcomes:
        shown = memory.range_of(outcome)
        needs = f"{gib(shown.value, 1)}, 80 % range {in_gib(shown.low, 1)}-{gib(shown.high, 1)}"
        lines.append(f"Not said, and not assumed: {outcome.flag}, {needs}{ENDINGS[memory.verdict_of(shown)]}")
    return lines


def why_tight(memory: Memory) -> str:
    """Return what a tight verdict means for this run; empty for any other."""
    if memory.verdict != "tight" or memory.capacity is None:
        return ""
    own = memory.verdict_of(memory.range_of())
    if own != "tight" and memory.outcomes:
        as_assumed = "fits" if own == "fits" else "does not fit"
        return f"As assumed it {as_assumed}; what is not said decides. --allow-tight takes that for a yes."
    over = memory.range_of().high - memory.capacity
    return f"It may fit: the range reaches {gib(over, 1)} beyond the card's memory. --allow-tight takes that for a yes."


def effort(other: Estimate, result: Estimate) -> float:
    """Return the cost of a sequence in `other` relative to `result`: time where it is known, else FLOPs."""
    if other.time is not None and result.time is not None:
        return other.time.step / other.time.tokens / (result.time.step / result.time.tokens)
    here = result.flops.hardware / result.layout.global_batch
    return float(other.flops.hardware / other.layout.global_batch / here)
