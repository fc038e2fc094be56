"""Answers to inverse questions as text: the longest, the fewest, the cheapest, the smallest that will do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base import in_gib, needs, parse_count, seconds, share
from loadgauge.core.definitions.hardware.prices import listed
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.families.catalogue import find_model
from loadgauge.core.plan import inverse
from loadgauge.core.plan.deadline import Pace, Sized, days_of, gpus_by_date, tokens_of
from loadgauge.core.plan.request import PlanRequest, cases as planned_cases, models_named
from loadgauge.core.plan.search import Case
from loadgauge.core.resolve.reproduce import completer, documented, layout_flags
from loadgauge.core.resolve.resolve import asks_for_files
from loadgauge.core.resolve.setup import Setup
from loadgauge.core.text.estimate.setup import layout_words
from loadgauge.core.text.plan.plan import assumptions, table
from loadgauge.core.text.plan.progress import clear, say
from loadgauge.core.text.table import Column, Paper, draw, heading, points, show_command
from loadgauge.core.text.verdict import question_words

SHARE = 0.1
"""Default of the largest share of the step for exposed communication."""


def write(found: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write the answers to an inverse question, each with its best layout; brief: without what lies beside it"""
    request, setup, answers, beside, left_out = found.shown
    for answer in answers:
        asked = question_words(answer.best.memory)
        points(target, [answer.text[:1].upper() + answer.text[1:] + ".", *([asked] if asked else [])], "")
    if (assumed := _pace(request).measured) is not None:
        points(target, [f"All times are at the utilisation that is assumed ({assumed}), none is predicted."], "")
    if request.find == "gpu" and request.prices is None:
        days = sorted(offer.read for offers in listed().values() for offer in offers)
        prices = f"List prices on demand, US dollars, read from {days[0]} to {days[-1]}; --prices takes yours."
        points(target, [prices], "")
    several = len(answers) > 1
    table(target, [answer.best for answer in answers], "The best layout of each" if several else "Its best layout")
    target.print()
    for answer in answers:
        show_command(target, _complete(setup, answer, request)(answer.best).command())
    if brief:
        return
    if answers[0].curve:
        _curve(target, answers[0].curve)
    if beside:
        _beside(target, beside, answers[0].value)
    if left_out:
        heading(target, "Left out")
        points(target, left_out)
    assumptions(target, msgspec.structs.replace(setup, file=""))


def found(request: PlanRequest) -> Answer:
    """Answer an inverse question (`find`), with progress on the terminal. Raises `NothingFits` without an answer."""
    setup, cases = planned_cases(request)
    left_out: list[str] = []
    beside: tuple[Sized, ...] = ()
    try:
        if request.find == "gpu":

            def on(name: str) -> list[Case]:
                there = request.job.replace(gpu=name)
                return planned_cases(msgspec.structs.replace(request, job=there))[1]

            within = (parse_count(request.tokens, "tokens"), request.days) if request.tokens and request.days else None
            answers, left_out = inverse.cheapest_gpu(on, request.gpu_prices, request.margin_bytes, say, within)
        elif request.dated:
            answers, beside = _by_date(request, cases[-1])
        else:
            answers = [_answer(request, setup, cases[-1])]
    finally:
        clear()
    documents = [_document(setup, answer, request) for answer in answers]
    sizes = [
        {
            "gpus": one.gpus,
            "fits": one.best is not None,
            "days": None if one.best is None else one.days,
            "flags": None if one.best is None else layout_flags(one.best),
        }
        for one in beside
    ]
    more = {"sizes": sizes} if sizes else {}
    return Answer(
        form="plan.find",
        writer="loadgauge.core.text.plan.inverse:write",
        shown=(request, setup, answers, beside, left_out),
        document={"answers": documents, **more, "left_out": left_out, "assumed": setup.assumed},
        assumed=setup.assumed,
        command=_complete(setup, answers[0], request)(answers[0].best).command(),
    )


def _job(setup: Setup, best: Estimate) -> Job:
    """The job, of the model that an answer is about."""
    return setup.job if setup.model.name == best.model.name else setup.job.replace(model=best.model.name)


def _complete(setup: Setup, answer: inverse.Answer, request: PlanRequest) -> Callable[[Estimate], Job]:
    """Writes the job of an estimate, with the whole run and the utilisation that an answer about dates rests on."""
    complete = completer(_job(setup, answer.best))
    if not request.dated:
        return complete
    tokens = f"{answer.value:.0f}" if request.find == "tokens" else request.tokens
    return lambda best: complete(best).replace(tokens=tokens, measured=_pace(request).measured)


def _document(setup: Setup, answer: inverse.Answer, request: PlanRequest) -> dict[str, Any]:
    """An answer for JSON."""
    complete = _complete(setup, answer, request)
    fields = {"text": answer.text, "value": answer.value, "best": documented(answer.best, complete)}
    if answer.curve:
        fields |= {"tight": answer.tight, "dividing": answer.dividing}
        fields["curve"] = [_point(best) | {"command": complete(best).command()} for best in answer.curve]
    return fields


def _point(best: Estimate) -> dict[str, Any]:
    """A point of the curve of memory and speed against the micro-batch."""
    return {
        "micro_batch": int(best.layout.micro_batch),
        "global_batch": int(best.layout.global_batch),
        "memory": needs(best.memory),
        "step": best.timing.step,
        "tokens_per_second": best.timing.tokens / best.timing.step,
        "tokens_per_second_per_gpu": best.timing.tokens_per_second_per_gpu,
        "mfu": best.timing.mfu,
        "flags": layout_flags(best),
    }


def _curve(target: Paper, curve: tuple[Estimate, ...]) -> None:
    """Memory and speed against the micro-batch."""
    columns = [
        Column("micro-batch", "right"),
        Column("global batch", "right"),
        Column("GiB", "right"),
        Column("verdict"),
        Column("tokens/s", "right"),
        Column("MFU", "right"),
        Column("layout", wrap=True),
    ]
    rows = []
    for best in curve:
        layout = layout_flags(best).rpartition("--micro-batch")[0]
        rows.append(
            [
                f"{best.layout.micro_batch:,}",
                f"{best.layout.global_batch:,}",
                in_gib(best.memory.total, 1),
                best.memory.verdict,
                f"{best.timing.tokens / best.timing.step:,.0f}",
                f"{best.timing.mfu:.1%}",
                layout,
            ]
        )
    draw(target, columns, rows, "Memory and speed against the micro-batch, each with its best layout")


def _pace(request: PlanRequest) -> Pace:
    """The utilisation that a request assumes, if any."""
    assumed = request.mfu or request.hfu
    key = "mfu" if request.mfu else "hfu"
    return Pace(None if assumed is None else share(assumed, key), hardware=request.mfu is None)


def _by_date(request: PlanRequest, case: Case) -> tuple[list[inverse.Answer], tuple[Sized, ...]]:
    """The answer about a whole run, and the sizes beside it."""
    pace = _pace(request)
    objective, margin = request.objective, request.margin_bytes
    tokens = None if request.tokens is None else parse_count(request.tokens, "tokens")
    if request.find == "days":
        assert tokens is not None
        return [days_of(case, tokens, pace, objective, margin)], ()
    assert request.days is not None
    if request.find == "tokens":
        return [tokens_of(case, request.days, pace, objective, margin)], ()
    assert tokens is not None
    most = case.space.gpus if request.gpus else 10**6
    free = request.job.global_batch is None and not asks_for_files(request.job)
    found = gpus_by_date(case, tokens, request.days, pace, objective, margin, say, most, any_batch=free)
    return [found.answer], found.beside


def _beside(target: Paper, sizes: tuple[Sized, ...], chosen: int) -> None:
    """Days on the sizes beside the answer."""
    columns = [
        Column("GPUs", "right"),
        Column("days", "right"),
        Column("step", "right"),
        Column("MFU", "right"),
        Column("layout", wrap=True),
    ]
    rows = []
    for one in sizes:
        if one.best is None or one.best.time is None:
            rows.append([f"{one.gpus:,}", "-", "-", "-", "no layout is valid and fits"])
            continue
        time = one.best.time
        rows.append(
            [f"{one.gpus:,}", f"{one.days:,.1f}", seconds(time.step), f"{time.mfu:.1%}", layout_words(one.best.layout)]
        )
    strong = [index for index, one in enumerate(sizes) if one.gpus == chosen]
    draw(target, columns, rows, "Sizes beside it, each with its best layout", strong)


def _answer(request: PlanRequest, setup: Setup, case: Case) -> inverse.Answer:
    objective, margin = request.objective, request.margin_bytes
    if request.find == "seq-len":
        return inverse.largest_sequence(case, objective, margin, say)
    if request.find == "micro-batch":
        return inverse.largest_micro_batch(case, objective, margin, say, setup.job.global_batch)
    if request.find == "gpus":
        return inverse.fewest_gpus(case, objective, margin, say)
    if request.find == "nic":
        return inverse.smallest_nic(case, request.exposed or SHARE, objective, margin, say)
    if request.find == "link":
        return inverse.smallest_link(case, request.exposed or SHARE, objective, margin, say)
    if request.find == "batch":
        return inverse.smallest_batch(case, request.exposed or SHARE, objective, margin, say)
    models = [find_model(name) for name in models_named(request.job.model)]
    return inverse.largest_model(case, models, objective, margin, say)
