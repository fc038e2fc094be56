"""Names of flags by their parts: other spellings of one that is known, here or in another tool."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain

import click

from loadgauge.core.base import read_table
from loadgauge.core.command_line.options.typed import bare
from loadgauge.core.command_line.options.values import as_value, card
from loadgauge.core.definitions.job.sentences import NEGATIONS, PARTS
from loadgauge.core.definitions.job.spoken import (
    ASKED,
    COUNTS,
    ENGINES,
    HARMLESS,
    LAYOUTS,
    MODEL,
    NUMBERED,
    RENAMED,
    SWITCHES,
    WORDED,
)

ALONE = (("checkpoint",), ("impl",), ("num",))
"""Parts that say different things where they stand alone."""
TABLES = (RENAMED, COUNTS, SWITCHES, ASKED, dict.fromkeys(HARMLESS, "harmless"), WORDED, NUMBERED)
"""Tables of names, the first of which that has one says what it means."""


def parts_of(name: str) -> tuple[str, ...]:
    """Return the parts of a flag's name that tell it from others, in one spelling and order.

    >>> parts_of("maxSeqLength") == parts_of("max-sequence-len"), parts_of("use_grad_ckpt") == parts_of("gradient-checkpointing")
    (True, True)
    >>> parts_of("num-gpus") == parts_of("gpu"), parts_of("max-batch") == parts_of("batch")
    (False, False)
    """
    words = re.split("[-_.]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower())
    return tuple(sorted(part for word in words for part in PARTS.get(word, word).split()))


def known_as(name: str, options: Mapping[str, click.Option]) -> list[str]:
    """Return another spelling of a flag's name that is known, with `false` after it where it is denied; nothing for none.

    name: without dashes before it. A spelling that stands for two flags is none.

    >>> options = {f"--{name}": click.Option([f"--{name}"]) for name in ("gpu", "gpus", "micro-batch")}
    >>> [known_as(name, options) for name in ("gpuType", "numGpus", "microbatchsize", "no-grad-ckpt", "use-gpus", "xyzzy")]
    [['gpu-type'], ['num-gpus'], ['micro-batch-size'], ['grad-ckpt', 'false'], [], []]
    """
    if exact := _same(name, options):
        return [exact]
    denied = re.match(NEGATIONS, name.lower().replace("_", "-"))
    other = _same(name[denied.end() :], options) if denied else ""
    return [other, "false"] if len(SWITCHES.get(other, ())) > 1 else []


def respelled(words: Sequence[str], options: Mapping[str, click.Option]) -> tuple[list[str], dict[str, str]]:
    """Return a command line with flags that nobody knows in the spelling that is known, and the typed ones by those.

    >>> respelled(["gpt2", "--gpuType=l4", "--xyzzy"], {"--gpu": click.Option(["--gpu"])})
    (['gpt2', '--gpu-type=l4', '--xyzzy'], {'--gpu-type': '--gpuType'})
    """
    result: list[str] = []
    typed: dict[str, str] = {}
    for word in words:
        flag, equals, value = word.partition("=")
        plain = bare(flag)
        usual = re.fullmatch(r"--?[A-Za-z][\w-]{2,}", flag) is None or _is_known(plain, options)
        new = [] if usual or card(plain) or as_value(plain, options) else known_as(flag.lstrip("-"), options)
        if new[1:] and equals:
            new = []
        result += [f"--{new[0]}{equals}{value}", *new[1:]] if new else [word]
        typed |= {" ".join([f"--{new[0]}", *new[1:]]): flag} if new else {}
    return result, typed


@cache
def _of_engines() -> frozenset[str]:
    """Return names that engines alone have, which are read with their server."""
    from loadgauge.core.definitions.serving.rollout import Engine

    table = read_table("engine_flags.toml")
    listed = (
        *table["small"],
        *table["instead"],
        *" ".join(table[kind] for kind in ("switches", "nothing", "alone")).split(),
    )
    return frozenset(
        (*listed, *(name.replace("_", "-") for name in Engine.__struct_fields__), *ENGINES, *LAYOUTS, *MODEL)
    )


def _is_known(name: str, options: Mapping[str, click.Option]) -> bool:
    """Return whether a name is one of the command, of another tool or of an engine, as it is."""
    return f"--{name}" in options or any(name in table for table in (*TABLES, _of_engines()))


def _same(name: str, options: Mapping[str, click.Option]) -> str:
    """Return the known name with the same letters, or the same parts; empty where there is none, or two that differ."""
    own = {each.lstrip("-"): each for each in options}
    raw = re.split("[-_]", name.lower())
    for spelled in (lambda each: re.sub("[-_]", "", each.lower()), parts_of):
        key = spelled(name)
        alike = [each for each in (*own, *chain(*TABLES)) if spelled(each) == key]
        if spelled is parts_of and len(key) < 2:  # one word, which may say several things
            alike = [each for each in alike if key not in ALONE or {*key} <= {*raw} & {*each.split("-")}]
            alike = [each for each in alike if each not in HARMLESS]
        if raw[0] in ("use", "enable", "do", "is"):
            alike = [each for each in alike if not _has_value(each, options)]
        elif raw[-1] in ("size", "degree"):
            alike = [each for each in alike if _has_value(each, options) or each in HARMLESS]
        if len({str(next((table[each] for table in TABLES if each in table), f"--{each}")) for each in alike}) == 1:
            return max(alike, key=lambda each: (each in own, each in WORDED, each))
    return ""


def _has_value(name: str, options: Mapping[str, click.Option]) -> bool:
    """Return whether a known name is that of a flag that nothing says without a value."""
    own = options.get(f"--{name}")
    return not own.is_flag if own is not None else name in RENAMED or name in COUNTS
