"""The verdict in words, as every report of an estimate begins."""

from collections.abc import Mapping, Sequence
from typing import Any

from loadgauge.core.base import Needs, count, gib, host_holds, in_gib
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.estimate.result import Memory

WORDS = {
    "fits": ("FITS", "bold green"),
    "tight": ("TIGHT", "bold yellow"),
    "depends": ("DEPENDS", "bold magenta"),
    "does not fit": ("DOES NOT FIT", "bold red"),
    "unknown": ("NEEDS", "bold"),
}
"""The verdict, and its colour."""
ENDINGS = {
    "fits": ", which fits too.",
    "tight": ", which is TIGHT.",
    "depends": ", which DEPENDS.",
    "does not fit": ", which DOES NOT FIT.",
    "unknown": ".",
}
"""How a line about a worst case ends, by its verdict."""
WIDE = 0.25
"""Half the width of a range, as a share of the memory, from which on the answer says what makes it wide."""
SHOWN = 2.0**27
"""Bytes below which no amount is shown."""
CAUSES = {
    "spread": "how far measured runs of other people lie from predictions",
    "outside": "the CUDA context and buffers outside PyTorch, which weigh much in a small job",
    "--lengths": "micro-batches of long sequences alone; --lengths with a shorter longest one narrows it",
}
"""What makes a range wide, where no flag says it."""
STYLES = {"tight": "yellow", "depends": "magenta", "does not fit": "red"}
"""Colours of such a line."""


def host_words(nbytes: float, stated: str | None) -> str:
    """Return what a node's memory must hold, and the verdict of one that is stated.

    >>> host_words(300 * 2**30, "256GiB")
    '300.0 GiB on a node, of 256GiB: DOES NOT FIT'
    """
    if stated is None:
        return f"{gib(nbytes, 1)} on a node"
    return (
        f"{gib(nbytes, 1)} on a node, of {stated}: {WORDS['fits' if host_holds(nbytes, stated) else 'does not fit'][0]}"
    )


def host_verdict(nbytes: float, stated: str | None) -> str:
    """Return the end of an answer's first line where a node's memory is stated and does not hold so many bytes, else nothing.

    >>> host_verdict(300 * 2**30, "256GiB"), host_verdict(200 * 2**30, "256GiB")
    ('; its host DOES NOT HOLD its part', '')
    """
    return "" if host_holds(nbytes, stated) else "; its host DOES NOT HOLD its part"


def verdict_words(memory: Needs, host: str = "") -> str:
    """Return the verdict with what it needs of the capacity and the range of that, as every answer begins.

    host: `host_verdict`

    >>> from loadgauge import estimate
    >>> verdict_words(estimate("gpt2", seq_len=1024).memory).split()[0]
    'NEEDS'
    """
    capacity = "" if memory.capacity is None else f" of {gib(memory.capacity, 1)}"
    ends = f"{in_gib(memory.low, 1)}-{gib(memory.high, 1)}"
    return f"{WORDS[memory.verdict][0]}  {gib(memory.total, 1)}{capacity}, 80 % range {ends}{host}"


def question_words(memory: Memory) -> str:
    """Return the unsaid thing that decides and what each answer comes to; empty where none decides."""
    return "" if memory.question is None else f"{memory.question.words()}."


def unread_words(unread: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each thing that keys of a job file which are not counted can do, with these keys.

    unread: as documents have them (`Setup.unread`)

    >>> key = {"key": "tiled", "effect": "saves", "low_bytes": 2.0**31, "high_bytes": 0.0, "class": "bounded"}
    >>> unread_words([key])
    ['Not read, can only save: tiled (at most 2.0 GiB).']
    """
    lines: dict[str, list[str]] = {}
    for key in unread:
        if key["effect"] == "none":
            continue
        effect = {"saves": "can only save", "costs": "can only cost", "either": "can save or cost"}[key["effect"]]
        most = max(key["low_bytes"] or 0.0, key["high_bytes"] or 0.0)
        much = (
            f"at most {gib(most, 1)}" if most >= SHOWN else "time alone" if not most else f"less than {gib(SHOWN, 1)}"
        )
        if key["high_bytes"] is None:
            effect, much = "may change memory, by how much is not known", ""
        lines.setdefault(effect, []).append(f"{key['key']}{f' ({much})' if much else ''}")
    return [f"Not read, {effect}: {', '.join(keys)}." for effect, keys in lines.items()]


def left_out_words(model: ModelSpec, each: float) -> list[str]:
    """Return a line about the towers of the model that a verdict leaves out; none where it has none.

    each: bytes of a weight
    """
    towers = [
        f"{tower.name} ({count(tower.parameters)} parameters, at least {gib(each * tower.parameters)})"
        if tower.parameters
        else f"{tower.name} (its size is not known here)"
        for tower in model.left_out
    ]
    flags = {"vision_config": "--pictures 1x1024x768", "audio_config": "--audio 30"}
    flag = next(
        (flags[key] for tower in model.left_out if tower.layers and (key := tower.name.rpartition(".")[2]) in flags), ""
    )
    counts = f"; {flag} counts it" if flag else ""
    return [f"Left out: {', '.join(towers)}, with its activations and time{counts}."] if towers else []


def range_words(memory: Memory) -> list[str]:
    """Return what a tight verdict means, and what makes a range wide."""
    lines = []
    if memory.verdict == "tight" and memory.capacity is not None:
        over = gib(memory.high - memory.capacity, 1)
        lines.append(
            f"It may fit: the range reaches {over} beyond the card's memory; --allow-tight takes that for a yes."
        )
    half = (memory.high - memory.low) / 2 / memory.total
    if half > WIDE:
        cause, _ = max(memory.widths.items(), key=lambda item: item[1])
        lines.append(
            f"The range is wide, {half:.0%} either way, mostly for {CAUSES.get(cause, f'{cause}, which is not said')}."
        )
    return lines
