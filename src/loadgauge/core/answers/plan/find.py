"""Answers to inverse questions: the longest, the fewest, the cheapest, the smallest that will do."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from loadgauge.core.answers.answer import Answer
from loadgauge.core.answers.plan.progress import clear, say
from loadgauge.core.base import NothingFits, needs, parse_count, share
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.memory.phases import Phase
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.families.catalogue import find_model
from loadgauge.core.plan import inverse
from loadgauge.core.plan.advise.replan import what_would_fit
from loadgauge.core.plan.deadline import Pace, Sized, days_of, gpus_by_date, tokens_of
from loadgauge.core.plan.request import PlanRequest, cases as planned_cases, models_named
from loadgauge.core.plan.search import Case
from loadgauge.core.resolve.reproduce import completer, documented, layout_flags
from loadgauge.core.resolve.resolve import asks_for_files
from loadgauge.core.resolve.setup import Setup

SHARE = 0.1
"""Default of the largest share of the step for exposed communication."""


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

            def timely(there: Sequence[Case]) -> Estimate:
                if not request.gpus:
                    return _by_date(request, there[-1])[0][0].best
                assert tokens is not None
                assert request.days is not None
                return inverse.in_time(there, tokens, request.days, request.margin_bytes)

            tokens = None if request.tokens is None else parse_count(request.tokens, "tokens")
            dated = timely if request.dated else None
            answers, left_out = inverse.cheapest_gpu(on, request.gpu_prices, request.margin_bytes, say, dated, tokens)
        elif request.dated:
            answers, beside = _by_date(request, cases[-1])
        else:
            answers = [_answer(request, setup, cases[-1])]
    except NothingFits as error:
        if request.dated or request.find not in ("seq-len", "micro-batch", "batch"):
            raise
        length = inverse.STEP if request.find == "seq-len" else None
        ways = what_would_fit(cases, request.margin_bytes, request.objective, 2, say, length)
        if not ways:
            raise
        raise NothingFits(f"{error}; fits with {' or '.join(way.flags for way in ways)}") from None
    finally:
        clear()
    if request.dated and request.price is not None and request.find != "gpu":
        answers = [_priced(answer, request) for answer in answers]
    jobs = [_complete(setup, answer, request)(answer.best) for answer in answers]
    documents = [_document(setup, answer, request) for answer in answers]
    sizes = [
        {
            "gpus": size.gpus,
            "fits": size.best is not None,
            "days": None if size.best is None else size.days,
            "flags": None if size.best is None else layout_flags(size.best),
        }
        for size in beside
    ]
    more = {"sizes": sizes} if sizes else {}
    return Answer(
        form="plan.find",
        writer="loadgauge.core.text.plan.inverse:write",
        shown=(request, setup, answers, jobs, _pace(request).measured, beside, left_out),
        document={"answers": documents, **more, "left_out": left_out, "assumed": setup.assumed},
        assumed=setup.assumed,
        command=jobs[0].command(),
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
    return lambda best: complete(best).replace(tokens=tokens, price=request.price, measured=_pace(request).measured)


def _priced(answer: inverse.Answer, request: PlanRequest) -> inverse.Answer:
    """An answer about a whole run, with its GPU-hours and what they cost."""
    tokens = answer.value if request.tokens is None else parse_count(request.tokens, "tokens")
    hours = 24 * inverse.days_for(answer.best, tokens) * answer.best.layout.gpus
    assert request.price is not None
    text = f"{answer.text}: {hours:,.0f} GPU-hours, {hours * request.price:,.0f} at {request.price:g} per GPU-hour"
    return answer._replace(text=text)


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
    by_date = gpus_by_date(
        case, tokens, request.days, pace, objective, margin, say, most, any_batch=_any_batch(request)
    )
    return [by_date.answer], by_date.beside


def _any_batch(request: PlanRequest) -> bool:
    """Return whether no global batch is said."""
    return request.job.global_batch is None and not asks_for_files(request.job)


def _with_loss(answer: inverse.Answer, request: PlanRequest) -> inverse.Answer:
    """The largest micro-batch, with that of a loss in chunks where the loss is the peak and nothing is said of it."""
    peak = answer.best.memory
    if peak.moments[peak.peak].phase != Phase.LOSS:
        return answer
    chunked = msgspec.structs.replace(request, job=request.job.replace(loss="chunked"))
    setup, cases = planned_cases(chunked)
    with contextlib.suppress(NothingFits):
        more = inverse.largest_micro_batch(
            cases[-1], request.objective, request.margin_bytes, say, setup.job.global_batch
        )
        verdict = more.best.memory.verdict
        if more.value > answer.value or verdict != peak.verdict:
            text = f"{answer.text}; with --loss chunked {more.value:,}{', which fits' if verdict == 'fits' else ''}"
            return answer._replace(text=text)
    return answer


def _answer(request: PlanRequest, setup: Setup, case: Case) -> inverse.Answer:
    objective, margin = request.objective, request.margin_bytes
    exposed = {"nic": inverse.smallest_nic, "link": inverse.smallest_link, "batch": inverse.smallest_batch}
    if request.find in exposed:
        return exposed[request.find](case, request.exposed or SHARE, objective, margin, say)
    if request.find == "seq-len":
        return inverse.largest_sequence(case, objective, margin, say)
    if request.find == "micro-batch":
        answer = inverse.largest_micro_batch(case, objective, margin, say, setup.job.global_batch)
        return _with_loss(answer, request) if request.job.loss is None else answer
    if request.find == "gpus":
        return inverse.fewest_gpus(case, objective, margin, say, _any_batch(request))
    models = [find_model(name) for name in models_named(request.job.model)]
    return inverse.largest_model(case, models, objective, margin, say)
