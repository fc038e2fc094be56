"""Questions the other way round, told: the longest, the fewest, the cheapest, the smallest that will do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from loadgauge.errors import ConfigError
from loadgauge.estimate.result import Estimate
from loadgauge.families.catalogue import find_model
from loadgauge.families.catalogue import models as catalogue
from loadgauge.plan import inverse as questions
from loadgauge.plan.inverse import Answer
from loadgauge.plan.plan import Case
from loadgauge.report.plan import assumed, table
from loadgauge.report.progress import clear, say
from loadgauge.report.table import Column, console, document, draw, heading, points
from loadgauge.resolve.reproduce import completer, documented, layout_flags, show_command
from loadgauge.resolve.setup import Setup
from loadgauge.spec.job import Job
from loadgauge.units import GIB

if TYPE_CHECKING:
    from rich.console import Console

ANY = "any"
"""In the place of a MODEL: the whole catalogue, for --find model."""
SHARE = 0.1
"""Of a step, what communication may take where the user does not say."""


def found(given: Setup, cases: list[Case], asked: dict[str, Any], *, as_json: bool) -> int:
    """Answers and prints; the exit code. `NothingFits` where there is no answer."""
    rest: list[str] = []
    if asked["find"] == "micro-batch":
        asked["assumed"].pop("--global-batch", None)
    try:
        if asked["find"] == "gpu":
            answers, rest = questions.cheapest_gpu(cases, _prices(asked["prices"]), asked["margin"], say)
        else:
            answers = [_answer(given, cases[-1], asked)]
    finally:
        clear()
    if as_json:
        document(
            {
                "answers": [_plain(given, one) for one in answers],
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
    _commands(target, given, answers)
    if answers[0].curve:
        _curve(target, answers[0].curve)
    if rest:
        heading(target, "Left out")
        points(target, rest)
    assumed(target, asked)
    return 0


def _request(given: Setup, best: Estimate) -> Job:
    """The job of the job, of the model that an answer is about."""
    if given.model.name == best.model.name:
        return given.job
    return msgspec.structs.replace(given.job, model=best.model.name)


def _plain(given: Setup, answer: Answer) -> dict[str, Any]:
    """An answer for JSON."""
    complete = completer(_request(given, answer.best))
    found = {"text": answer.text, "value": answer.value, "layout": documented(answer.best, complete)}
    if answer.curve:
        found |= {"roomy": answer.roomy, "dividing": answer.dividing}
        found["curve"] = [_point(best) | {"command": complete(best).command()} for best in answer.curve]
    return found


def _point(best: Estimate) -> dict[str, Any]:
    """A point of the curve of memory and speed against the micro-batch."""
    assert best.time is not None
    return {
        "micro_batch": int(best.layout.micro_batch), "global_batch": int(best.layout.global_batch),
        "memory": best.memory.total, "verdict": best.memory.verdict, "step": best.time.step,
        "tokens_per_second": best.time.tokens / best.time.step,
        "tokens_per_second_per_gpu": best.time.tokens_per_second_per_gpu, "mfu": best.time.mfu, "flags": layout_flags(best),
    }  # fmt: skip


def _curve(target: Console, curve: tuple[Estimate, ...]) -> None:
    """Memory and speed against the micro-batch."""
    columns = [
        Column("micro-batch", "right"), Column("global batch", "right"), Column("GiB", "right"), Column("verdict"),
        Column("tokens/s", "right"), Column("MFU", "right"), Column("layout", wrap=True),
    ]  # fmt: skip
    rows = []
    for best in curve:
        assert best.time is not None
        layout = layout_flags(best).rpartition("--micro-batch")[0]
        rows.append([
            f"{best.layout.micro_batch:,}", f"{best.layout.global_batch:,}", f"{best.memory.total / GIB:,.1f}",
            best.memory.verdict, f"{best.time.tokens / best.time.step:,.0f}", f"{best.time.mfu:.1%}", layout,
        ])  # fmt: skip
    draw(target, columns, rows, "Memory and speed against the micro-batch, each with its best layout")


def _commands(target: Console, given: Setup, answers: list[Answer]) -> None:
    """The command line of each answer."""
    target.print()
    for answer in answers:
        show_command(target, completer(_request(given, answer.best))(answer.best).command())


def _answer(given: Setup, case: Case, asked: dict[str, Any]) -> Answer:
    find, objective, margin = asked["find"], asked["objective"], asked["margin"]
    if find == "seq-len":
        return questions.largest_sequence(case, objective, margin, say)
    if find == "micro-batch":
        return questions.largest_micro_batch(case, objective, margin, say, given.job.global_batch)
    if find == "gpus":
        return questions.fewest_gpus(case, objective, margin, say)
    if find == "nic":
        return questions.smallest_nic(case, asked["exposed"] or SHARE, objective, margin, say)
    return questions.largest_model(case, [find_model(name) for name in named(asked["model"])], objective, margin, say)


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
