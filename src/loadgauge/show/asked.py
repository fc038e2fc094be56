"""Questions the other way round, told: the longest, the fewest, the cheapest, the smallest that will do."""

from __future__ import annotations

from typing import Any

from loadgauge.errors import ConfigError
from loadgauge.families.catalogue import models as catalogue
from loadgauge.families.catalogue import resolve
from loadgauge.search import questions
from loadgauge.search.plan import Case
from loadgauge.search.questions import Answer
from loadgauge.show.plan import ANY, clear, say
from loadgauge.show.planned import assumed, table
from loadgauge.show.table import console, document, heading, points

SHARE = 0.1
"""Of a step, what communication may take where the user does not say."""


def found(cases: list[Case], asked: dict[str, Any], *, as_json: bool) -> int:
    """Answers and prints; the exit code. `NothingFits` where there is no answer."""
    rest: list[str] = []
    try:
        if asked["find"] == "gpu":
            answers, rest = questions.cheapest_gpu(cases, _prices(asked["prices"]), asked["margin"], say)
        else:
            answers = [_answer(cases[-1], asked)]
    finally:
        clear()
    if as_json:
        document(
            {
                "answers": [{"text": one.text, "value": one.value, "layout": one.best.to_dict()} for one in answers],
                "left_out": rest,
                "assumed": asked["assumed"],
            }
        )
        return 0
    target = console()
    for answer in answers:
        points(target, [answer.text[:1].upper() + answer.text[1:] + "."], "")
    several = len(answers) > 1
    table(target, [one.best for one in answers], "Each with its best layout" if several else "With the best layout")
    if rest:
        heading(target, "Left out")
        points(target, rest)
    assumed(target, asked)
    return 0


def _answer(case: Case, asked: dict[str, Any]) -> Answer:
    find, objective, margin = asked["find"], asked["objective"], asked["margin"]
    if find == "seq-len":
        return questions.largest_sequence(case, objective, margin, say)
    if find == "micro-batch":
        return questions.largest_micro_batch(case, objective, margin)
    if find == "gpus":
        return questions.fewest_gpus(case, objective, margin, say)
    if find == "nic":
        return questions.smallest_nic(case, asked["exposed"] or SHARE, objective, margin, say)
    return questions.largest_model(case, [resolve(name) for name in named(asked["model"])], objective, margin, say)


def named(text: str) -> list[str]:
    """The models of the catalogue that a MODEL stands for: all of them, or those that begin so.

    >>> named("qwen3-3")
    ['qwen3-30b-a3b', 'qwen3-32b']
    """
    names = [name for name in catalogue() if text.lower() == ANY or name.startswith(text.lower())]
    if not names:
        raise ConfigError(f"no model of the catalogue begins with {text!r}; {ANY!r} means all of them")
    return names


def _prices(text: str) -> dict[str, float]:
    """Prices of kinds of GPU, as in `h100-sxm5-80gb=2.5,a100-sxm4-80gb=1.6`."""
    prices = {}
    for word in text.split(","):
        name, _, price = word.strip().partition("=")
        try:
            prices[name] = float(price)
        except ValueError:
            prices[name] = -1.0
        if not 0 < prices[name] < float("inf"):
            raise ConfigError(f"must be GPU=PRICE,GPU=PRICE, got {word.strip()!r}", key="prices")
    return prices
