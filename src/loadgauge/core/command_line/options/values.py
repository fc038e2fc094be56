"""Values in the words of other tools: cards, machines, lengths, prices, and flags that are the value of another."""

import re
from collections.abc import Mapping
from functools import cache

import click

from loadgauge.core.base import Error, read_table
from loadgauge.core.base.hooks import provider
from loadgauge.core.definitions.job.job import fields
from loadgauge.core.definitions.job.sentences import DAYS
from loadgauge.core.definitions.job.spoken import ALONE_SAID, COUNT, LENGTHS, PATTERNS, VALUES, WITH_NAME
from loadgauge.core.definitions.serving.inference import fields as inference_fields
from loadgauge.core.definitions.training.frameworks import OTHER_NAMES


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
    if len(meant := {VALUES.get(field, {}).get(each, each) for each in alike(field, value)}) == 1:
        return [flag, *meant]
    if field in LENGTHS and (length := re.fullmatch(r"(\d+)([km])", value.lower())):
        return [flag, str(int(length[1]) << (10 if length[2] == "k" else 20))]
    if field == "days" and (time := re.fullmatch(r"(\d[\d.]*) ?(h|d|w|m)(?:(?:ou|ay|eek|onth)?r?s?)", value.lower())):
        return [flag, f"{float(time[1]) * DAYS[time[2]]:g}"]
    if field == "gpu" and (machine := _machine(value)):
        return [flag, *machine]
    for name, pattern, words in PATTERNS:
        if name == field and (match := re.fullmatch(pattern, value, re.IGNORECASE)):
            return match.expand(words.replace(" ", "\0")).split("\0") if words else []
    return [flag, value]


def alike(field: str, value: str) -> list[str]:
    """Return the known values of a field with the same letters and figures as one: it itself, or in another order.

    >>> alike("optimizer", "Muon"), alike("optimizer", "8bit-Adam"), alike("optimizer", "adam"), alike("gpu", "h100")
    (['muon'], ['adam8bit'], ['adam'], [])
    """
    own = fields().get(field) or inference_fields().get(field)
    if field not in VALUES and (own is None or own.kind != "choice"):
        return []
    trainers = [*OTHER_NAMES, *getattr(provider("DIALECTS"), "FILES", ())] if field == "framework" else []
    here = (*own.choices, *own.values) if own else ()
    every = list(dict.fromkeys((*here, *VALUES.get(field, ()), *trainers)))
    same = [value.lower()] if value.lower() in every else [each for each in every if _letters(each) == _letters(value)]
    return same or [each for each in every if sorted(_parts(each)) == sorted(_parts(value))]


def _letters(text: str) -> str:
    return "".join(_parts(text))


def _parts(text: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", text.lower())


def _machine(name: str) -> list[str]:
    """Return the cards of machines that a cloud rents by a name, as `--gpu` and more flags; nothing for another name.

    >>> _machine("p5.48xlarge"), _machine("2x g5.12xlarge"), _machine("h100")
    (['h100-sxm5-80gb', '--gpus', '8'], ['a10g', '--gpus', '8', '--gpus-per-node', '4'], [])
    """
    name = name.lower()
    nodes = rf"({COUNT}) ?(?:nodes?|machines?|hosts?|[x*×])(?: (?:of|with|x))?"
    if (fleet := re.fullmatch(rf"{nodes} ?({COUNT}) ?[x*×]? ?(.*[a-z].*|\d{{4}})", name)) and is_card(fleet[3]):
        return [fleet[3], "--gpus", str(int(fleet[1]) * int(fleet[2])), "--gpus-per-node", fleet[2]]
    machines = re.fullmatch(rf"(?:(?:{nodes}|({COUNT})) ?)?(?:standard_|nvidia )?((?s:.*))", name)
    assert machines is not None
    number = int(machines[1] or machines[2] or 1)
    count, _, card = read_table("instances.toml").get(machines[3].replace("gx ", "gx-"), "").partition(" ")
    if card:
        return [card, "--gpus", str(number * int(count)), *(["--gpus-per-node", count] if number > 1 else [])]
    apart = re.fullmatch(rf"({COUNT}) (.+?)|(.+) ({COUNT})", name)
    if apart and apart[2] and not is_card(apart[2]) and is_card(apart[2].removesuffix("s")):  # 8 h100s
        return [apart[2].removesuffix("s"), "--gpus", apart[1]]
    if apart is None or is_card(name) or not is_card(apart[2] or apart[3]):
        return []
    return [apart[2] or apart[3], "--gpus", apart[1] or apart[4]]
