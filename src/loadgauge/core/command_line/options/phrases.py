"""A command line as a sentence: words without dashes after a model, in the flags that they stand for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import click

from loadgauge.core.base.errors import Error
from loadgauge.core.command_line.options.names import known_as
from loadgauge.core.command_line.options.typed import bare, pieces_of
from loadgauge.core.command_line.options.values import as_value, card, is_card
from loadgauge.core.definitions.job.job import Job, fields
from loadgauge.core.definitions.job.sentences import BETWEEN, FILLERS, UNITS
from loadgauge.core.definitions.job.spoken import (
    COUNTS,
    HARMLESS,
    MODEL,
    NUMBERED,
    RENAMED,
    SWITCHES,
    VALUES,
    WORDED,
)

LONGEST = 6
"""Words of the longest phrase: 4 nodes of 8 h100 80gb."""
NUMBER = r"[$€£¥]?\d\S*"
"""Pattern of a value that begins with a figure."""


def phrased(words: Sequence[str], options: Mapping[str, click.Option]) -> tuple[list[str], dict[str, str]]:
    """Return a command line with the flags that its bare words stand for, and each phrase that was taken, by its flags.

    options: of the command, by each of their names. What nobody knows stays as it is, for the command to refuse.

    >>> options = {name: click.Option([name]) for name in ("--gpu", "--gpus", "--tp", "--seq-len", "--micro-batch")}
    >>> phrased("train gpt2 on 2 h100 with tp 2".split(), options)[0]
    ['gpt2', '--gpu', '2 h100', '--tp', '2']
    >>> phrased(["gpt2", "nonsense", "--gpu", "h100"], options)
    (['gpt2', 'nonsense', '--gpu', 'h100'], {})
    """
    named = any(bare(word) in (*MODEL, "model") for word in words if word.startswith("-"))
    result: list[str] = []
    taken: dict[str, str] = {}
    rest = list(words)
    while rest:
        run = list(takewhile(lambda word: not word.startswith("-"), rest))
        if not run:
            result.append(rest.pop(0))
            if rest and "=" not in result[-1] and not rest[0].startswith("-") and _takes(result[-1], rest[0], options):
                result.append(rest.pop(0))
            continue
        whole = len(run) == 1 and len(rest) == 1 and not named
        count, flags = (1, run) if whole or Path(run[0]).exists() else _phrase(run, options) or _model(run, named)
        named = named or flags == run[:count] or flags[:1] == ["-".join(run[:count])]
        if flags not in (run[:count], []):
            taken[" ".join(flags)] = " ".join(run[:count])
        result += flags
        del rest[:count]
    return result, taken


def model_in(words: Sequence[str]) -> list[str] | None:
    """Return the words before a model, among those before the first flag; None where there is no model.

    >>> model_in(["can", "I", "train", "llama", "3.1", "8b", "--tp", "2"]), model_in(["nonsense"])
    (['can', 'I', 'train'], None)
    """
    bare_ones = list(takewhile(lambda word: not word.startswith("-"), words))
    at = (n for n, word in enumerate(bare_ones) if word.lower() not in FILLERS)
    return next(
        (
            bare_ones[:n]
            for n in at
            if _model(bare_ones[n:], named=False)[1] != [bare_ones[n]] or is_model(bare_ones[n])
        ),
        None,
    )


def is_model(name: str) -> bool:
    """Return whether a name is that of a model."""
    from loadgauge.core.resolve.model import found_model

    try:
        return found_model(Job(model=name)).spec is not None
    except Error:
        return False


def valued(name: str, options: Mapping[str, click.Option]) -> str:
    """Return the flag with a value that a name stands for, here or in another tool, in whatever spelling; empty for none."""
    known = "" if name in BETWEEN or re.fullmatch("[a-z][a-z-]+|r", name) is None else name
    own = options.get(f"--{known}")
    if known and own is None and not any(known in table for table in (RENAMED, COUNTS, HARMLESS, NUMBERED)):
        known = "".join(known_as(known, options)[:1])
        own = options.get(f"--{known}")
    has = (
        not own.is_flag
        if own is not None
        else known in RENAMED or known in COUNTS or known in HARMLESS or known in NUMBERED
    )
    return f"--{known}" if has else ""


def _noun(words: Sequence[str]) -> str:
    """Return words as the name of a flag. ``_noun(["Micro", "batch_size"]) == "micro-batch-size"``"""
    return "-".join(words).lower().replace("_", "-")


def _takes(flag: str, after: str, options: Mapping[str, click.Option]) -> bool:
    """Return whether a flag takes the word after it."""
    name = bare(flag)
    own = options.get(flag, options.get(f"--{name}"))
    if own is not None:
        return not own.is_flag or after.lower() in ("true", "false")
    word = after.lower().partition(" ")[0].replace("-", "_")
    figure = re.match(r"\d|r=|true|false|yes|no$", word) is not None
    return name not in SWITCHES or word in WORDED.get(name, {}) or figure


def _model(run: Sequence[str], named: bool) -> tuple[int, list[str]]:
    """Return how many words name the model, and its name; the first word as it is where none does."""
    for count in range(1, 1 if named else min(LONGEST, len(run) + 1)):
        if is_model("-".join(run[:count])):
            return count, ["-".join(run[:count])]
    return 1, list(run[:1])


def _phrase(run: Sequence[str], options: Mapping[str, click.Option]) -> tuple[int, list[str]] | None:
    """Return how many of the first words are one phrase, and its flags; None where they are none."""
    for count in range(min(LONGEST, len(run)), 0, -1):
        words = [word.rstrip("?,;.") for word in run[:count]]
        flags = next(_readings(words, options), None)
        if (
            flags
            and flags[0] == "--gpu"
            and count > 1
            and words[-1].isdecimal()
            and not is_card(words[-1])
            and run[count:]
        ):
            after = [words[-1], run[count].rstrip("?,;.")]  # of h100 100 users
            if next(_readings(after, options), None) is not None:
                continue
        if flags is not None:
            return count, flags
    return None


def _readings(words: Sequence[str], options: Mapping[str, click.Option]) -> Iterator[list[str]]:
    """Give the flags that words stand for together, the surest first."""
    text, (first, *others), last = " ".join(words), words, words[-1]
    joined = _noun(words)
    if not others:
        key, _, value = first.partition("=")
        if value and (flag := valued(_noun([key]), options)):
            yield [flag, value]
        if text.lower() in FILLERS:
            yield []
        if pieces_of(first, options) != [first]:
            yield pieces_of(first, options)
    if is_card(text) or card(text):
        yield ["--gpu", text]
    if others and re.fullmatch(NUMBER, last) and (flag := valued(_noun(words[:-1]), options)):
        yield [flag, last]
    if others and re.fullmatch(NUMBER, first) and (flag := valued(_noun(others), options)):
        yield [flag, first]
    for pattern, flag in UNITS:
        if flag in options and re.fullmatch(pattern, text, re.IGNORECASE):
            yield [flag, text.replace(" ", "")]
    if len(others) == 1:
        if last.lower().replace("-", "_") in WORDED.get(bare(first), {}):
            yield [f"--{first}", last]
        field = RENAMED.get(bare(first), f"--{bare(first)}")[2:].replace("-", "_")
        own = fields().get(field)
        if own is not None and last in (*own.choices, *own.values, *VALUES.get(field, ())):
            yield [f"--{first}", last]
    if joined in SWITCHES or joined == "qlora" or (not joined[:1].isdecimal() and as_value(joined, options)):
        yield [f"--{joined}"]
