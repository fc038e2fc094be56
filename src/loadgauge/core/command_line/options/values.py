"""Values in the words of other tools: cards, machines, lengths, prices, and flags that are the value of another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

import click

from loadgauge.core.base import read_table
from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.job.job import fields
from loadgauge.core.definitions.job.spoken import ALONE_SAID, COUNT, LENGTHS, PATTERNS, VALUES, WITH_NAME
from loadgauge.core.definitions.serving.inference import fields as inference_fields


@cache
def is_card(name: str) -> bool:
    """Return whether a name is that of a GPU. ``is_card("dgx h100"), is_card("8 h100") == (True, False)``"""
    from loadgauge.core.definitions.hardware.hardware import gpu

    try:
        return bool(re.search("[a-z]|\\d{4}", name.lower())) and bool(gpu(name))
    except Error:
        return False


def card(word: str) -> list[str]:
    """Return the flags for words that name a card, or several; nothing where they name none."""
    flags = value_in("gpu", ["--gpu", word])
    return flags if flags[0] != "--gpu" or is_card(flags[1]) else []


def as_value(plain: str, options: Mapping[str, click.Option]) -> list[str]:
    """Return the words here of a flag that is the value of another, or another with its value; nothing where it is none.

    >>> options = {f"--{name}": click.Option([f"--{name}"]) for name in ("optimizer", "offload", "schedule")}
    >>> [as_value(word, options) for word in ("galore", "offload-experts", "dualpipe", "expert")]
    [['--optimizer', 'galore'], ['--offload', 'experts'], ['--schedule', 'dualpipe'], []]
    """
    for field in ALONE_SAID:
        own = fields().get(field) or inference_fields()[field]
        flag, values = field.replace("_", "-"), {*own.choices, *own.values, *VALUES.get(field, ())}
        for start in ("", f"{flag}-"):
            value = plain.removeprefix(start)
            among = [each for each in (value, value.replace("-", "_")) if each in values]
            if f"--{flag}" in options and plain.startswith(start) and among and (start or field not in WITH_NAME):
                return [f"--{flag}", among[0]]
    return ["--context", plain] if re.fullmatch(r"\d+[km]", plain) and "--context" in options else []


def value_in(field: str, taken: list[str]) -> list[str]:
    """Return a flag and its value in the words here."""
    flag, value = taken[:2]
    if field == "weight_format":
        value = value.lower()
    if value.lower() in VALUES.get(field, {}):
        return [flag, VALUES[field][value.lower()]]
    if field in LENGTHS and (length := re.fullmatch(r"(\d+)([km])", value.lower())):
        return [flag, str(int(length[1]) << (10 if length[2] == "k" else 20))]
    if field == "gpu" and (machine := _machine(value)):
        return [flag, *machine]
    for name, pattern, words in PATTERNS:
        if name == field and (match := re.fullmatch(pattern, value, re.IGNORECASE)):
            return match.expand(words.replace(" ", "\0")).split("\0") if words else []
    return [flag, value]


def _machine(name: str) -> list[str]:
    """Return the cards of machines that a cloud rents by a name, as `--gpu` and more flags; nothing for another name.

    >>> _machine("p5.48xlarge"), _machine("2x g5.12xlarge"), _machine("h100")
    (['h100-sxm5-80gb', '--gpus', '8'], ['a10g', '--gpus', '8', '--gpus-per-node', '4'], [])
    """
    if fleet := re.fullmatch(
        rf"({COUNT}) ?(?:nodes?|machines?|hosts?|[x*×])(?: (?:of|with|x))? ?({COUNT}) ?[x*×]? ?(.*[a-z].*)",
        name.lower(),
    ):
        return [fleet[3], "--gpus", str(int(fleet[1]) * int(fleet[2])), "--gpus-per-node", fleet[2]]
    several = re.fullmatch(rf"({COUNT}) (.+)|(.+) ({COUNT})", name)
    if several and is_card(several[2] or several[3]) and not is_card(name):
        return [several[2] or several[3], "--gpus", several[1] or several[4]]
    machines = re.fullmatch(rf"(?:({COUNT}) ?[x*×] ?)?(?:standard_)?((?s:.*))", name.lower())
    assert machines is not None
    count, _, card = read_table("instances.toml").get(machines[2], "").partition(" ")
    if not card:
        return []
    several = ["--gpus-per-node", count] if int(machines[1] or 1) > 1 else []
    return [card, "--gpus", str(int(machines[1] or 1) * int(count)), *several]
