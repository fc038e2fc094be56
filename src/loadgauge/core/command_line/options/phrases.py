"""A command line as a sentence: words without dashes after a model, in the flags that they stand for."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import click

from loadgauge.core.base import is_script, provider
from loadgauge.core.command_line.options.names import known_as
from loadgauge.core.command_line.options.typed import bare, pieces_of
from loadgauge.core.command_line.options.values import alike, as_value, card, is_card
from loadgauge.core.definitions.job.job import fields
from loadgauge.core.definitions.job.sentences import BETWEEN, FILLERS, NUMBERS, UNITS
from loadgauge.core.definitions.job.spoken import (
    ASKED,
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
VALUED = (RENAMED, COUNTS, HARMLESS, NUMBERED)
"""Tables of names that have a value."""
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
        whole = (len(run) == 1 and len(rest) == 1) or Path(run[0]).exists()
        size = 0 if named else 1 if whole else _model(run)
        phrase = (size, ["-".join(run[:size])]) if size else _phrase(run, options)
        count, flags = phrase or _unknown(run, options, named)
        named = named or flags == run[:count] or flags[:1] == ["-".join(run[:count])]
        if phrase is not None and flags not in (run[:count], []):
            taken[" ".join(flags)] = " ".join(run[:count])
        result += flags
        del rest[:count]
    return result, taken


def model_in(words: Sequence[str]) -> list[str] | None:
    """Return the words before a model, among those before the first flag; None where there is no model.

    >>> model_in(["can", "I", "train", "llama", "3.1", "8b", "--tp", "2"]), model_in(["nonsense"])
    (['can', 'I', 'train'], None)
    """
    run = list(takewhile(lambda word: not word.startswith("-"), words))
    return next((run[:n] for n in range(len(run)) if _model(run[n:])), None)


def is_model(name: str) -> bool:
    """Return whether a name is that of a model. Nothing of a model's own code runs for it."""
    from loadgauge.core.families import catalogue

    return is_script(name) or getattr(provider("MODEL_SOURCES"), "of_library", bool)(name) or catalogue.is_named(name)


def valued(name: str, options: Mapping[str, click.Option]) -> str:
    """Return the flag with a value that a name stands for, here or in another tool, in whatever spelling; empty for none."""
    spelled = "" if name in (*BETWEEN, "model") or re.fullmatch("[a-z][a-z-]+|r", name) is None else name
    own = options.get(f"--{spelled}")
    if spelled and own is None and not any(spelled in table for table in VALUED):
        spelled = "".join(known_as(spelled, options)[:1])
        own = options.get(f"--{spelled}")
    has = any(spelled in table for table in VALUED) if own is None else not own.is_flag
    return f"--{spelled}" if has else ""


def _words(run: Sequence[str]) -> list[str]:
    """Return words without marks at their ends, and numbers in figures. ``_words(["two", "h100,"]) == ["2", "h100"]``"""
    return [NUMBERS.get(word.lower(), word.rstrip("?,;.:")) for word in run]


def _noun(words: Sequence[str]) -> str:
    """Return words as the name of a flag. ``_noun(["Micro", "batch_size", "of"]) == "micro-batch-size"``"""
    return "-".join(word for word in words if word != "of").lower().replace("_", "-")


def _takes(flag: str, after: str, options: Mapping[str, click.Option]) -> bool:
    """Return whether a flag takes the word after it."""
    name = bare(flag)
    own = options.get(flag, options.get(f"--{name}"))
    if own is not None:
        return not own.is_flag or after.lower() in ("true", "false")
    word = after.lower().partition(" ")[0].replace("-", "_")
    figure = re.match(r"\d|r=|true|false|yes|no$", word) is not None
    return name not in SWITCHES or word in WORDED.get(name, {}) or figure


def _model(run: Sequence[str]) -> int:
    """Return how many of the first words name a model: 0 where they do not, or without the first of them too."""
    names = ["-".join(run[:count]) for count in range(1, min(LONGEST, len(run) + 1)) if run[0].lower() not in FILLERS]
    size = next((count for count, name in enumerate(names, 1) if is_model(name)), 0)
    sized = size and re.fullmatch(r"[\dx.]+[bm]", "".join(run[size : size + 1]).lower())  # of llama3 8b
    size += bool(sized and is_model("-".join(run[: size + 1])))
    return 0 if size > 1 and is_model("-".join(run[1:size])) else size


def _unknown(run: Sequence[str], options: Mapping[str, click.Option], named: bool) -> tuple[int, list[str]]:
    """Return the first word as it is, or with those after it that are no phrase, as a model's name would be."""
    ends = (
        n
        for n in range(1, len(run))
        if named or run[n].lower() in FILLERS or _phrase(run[n:], options) or _model(run[n:])
    )
    count = next(ends, len(run))
    return count, ["-".join(run[:count])]


def _phrase(run: Sequence[str], options: Mapping[str, click.Option]) -> tuple[int, list[str]] | None:
    """Return how many of the first words are one phrase, and its flags; None where they are none."""
    for count in range(min(LONGEST, len(run)), 0, -1):
        words = _words(run[:count])
        flags = next(_readings(words, options), None)
        counted = flags and flags[0] == "--gpu" and count > 1 and words[-1].isdecimal() and not is_card(words[-1])
        after = _readings(_words(run[count - 1 : count + 1]), options) if counted and run[count:] else iter(())
        if flags is not None and next(after, None) is None:  # of h100 100 users the 100 are no cards
            return count, flags
    return None


def _readings(words: Sequence[str], options: Mapping[str, click.Option]) -> Iterator[list[str]]:
    """Give the flags that words stand for together, the surest first."""
    text, (first, *others), last = " ".join(words), words, words[-1]
    joined = _noun(words)
    if not others:
        pairs = [pair.partition("=")[::2] for pair in re.split(r",(?=[\w-]+=)", first)]
        names = [valued(_noun([key]), options) if value else "" for key, value in pairs]
        if all(names):
            yield [each for name, (_, value) in zip(names, pairs, strict=True) for each in (name, value)]
        if text.lower() in FILLERS:
            yield []
        if pieces_of(first, options) != [first]:
            yield pieces_of(first, options)
    if (is_card(text) or card(text)) and first not in FILLERS:
        yield ["--gpu", text]
    for noun, value in ((words[:-1], last), (others, first)) if others else ():
        flag = valued(_noun(noun), options) if re.fullmatch(NUMBER, value) else ""
        if flag and not (bare(flag) in NUMBERED and is_card(value)):  # lora 4090
            yield [flag, value]
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
    if (
        joined in SWITCHES
        or joined == "qlora"
        or (not joined[:1].isdecimal() and as_value(joined, options)[:1] not in ([], ["--topology"]))
    ):
        yield [f"--{joined}"]
    if denied := known_as(joined, options)[1:]:
        yield [f"--{known_as(joined, options)[0]}", *denied]
    if others and alike("optimizer", joined):
        yield ["--optimizer", joined]
    if others and joined in ASKED:  # which says what is meant
        yield [f"--{joined}"]
