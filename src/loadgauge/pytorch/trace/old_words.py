"""Flags of `trace`, `measure` and `compare` until 0.1, in the words of `loadgauge estimate`. They are read for one release."""

from __future__ import annotations

from collections.abc import Sequence

FLAGS = {"--checkpointing": "--recompute", "--world": "--gpus"}
VALUES = {
    ("--precision", "bf16-mixed"): "bf16-autocast",
    ("--precision", "fp16-mixed"): "fp16-autocast",
    ("--attention", "sdpa"): "flash",
}
EARLIER = {("--precision", "bf16"): "bf16-pure"}
"""Words whose meaning has changed: only a document written by an earlier version is read with the old one."""


def translate(words: Sequence[str], earlier: bool = False) -> tuple[list[str], list[str]]:
    """Returns a command line in today's words, and one note for each word that was replaced.

    earlier: the words are from a document of an earlier version, where `--precision bf16` meant `bf16-pure`

    >>> translate(["gpt2", "--checkpointing", "full", "--attention=sdpa"])[0]
    ['gpt2', '--recompute', 'full', '--attention', 'flash']
    >>> translate(["--checkpointing", "selective"])
    (['--recompute', 'full', '--keep', 'default'], ['--checkpointing selective is now --recompute full --keep default'])
    """
    split: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        split += [flag, value] if equals and flag in (*FLAGS, "--attention", "--precision") else [word]
    values = {**VALUES, **EARLIER} if earlier else VALUES
    result: list[str] = []
    notes: list[str] = []
    has_keep = any(word == "--keep" or word.startswith("--keep=") for word in split)
    place = 0
    while place < len(split):
        flag, value = split[place], split[place + 1] if place + 1 < len(split) else ""
        if (flag, value) == ("--checkpointing", "selective"):
            new = ["--recompute", "full", *([] if has_keep else ["--keep", "default"])]
        elif (flag, value) in values:
            new = [flag, values[flag, value]]
        elif flag in FLAGS:
            new = [FLAGS[flag], *([value] if place + 1 < len(split) else [])]
        else:
            result.append(flag)
            place += 1
            continue
        notes.append(f"{flag} {value} is now {' '.join(new)}")
        result += new
        place += 2
    return result, notes
