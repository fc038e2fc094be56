"""Answers to inverse questions as text."""

import msgspec

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base import in_gib, seconds
from loadgauge.core.definitions.hardware.prices import listed
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.plan.deadline import Sized
from loadgauge.core.resolve.reproduce import layout_flags
from loadgauge.core.text.estimate.setup import layout_words, unit
from loadgauge.core.text.plan.plan import assumptions, table
from loadgauge.core.text.table import Column, Paper, draw, points, section, show_command
from loadgauge.core.text.verdict import question_words


def write(wrapped: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write the answers to an inverse question, each with its best layout; brief: without what lies beside it"""
    request, setup, answers, jobs, assumed, beside, left_out = wrapped.shown
    for answer in answers:
        asked = question_words(answer.best.memory)
        points(target, [answer.text[:1].upper() + answer.text[1:] + ".", *([asked] if asked else [])], "")
    if assumed is not None:
        points(target, [f"All times are at the utilisation that is assumed ({assumed}), none is predicted."], "")
    if request.find == "gpu" and request.prices is None:
        days = sorted(offer.read for offers in listed().values() for offer in offers)
        prices = f"List prices on demand, US dollars, read from {days[0]} to {days[-1]}; --prices takes yours."
        points(target, [prices], "")
    several = len(answers) > 1
    if several or not brief:
        table(target, [answer.best for answer in answers], "The best layout of each" if several else "Its best layout")
        target.print()
    for job in jobs:
        show_command(target, job.command())
    if brief:
        return
    if answers[0].curve:
        _curve(target, answers[0].curve)
    if beside:
        _beside(target, beside, answers[0].value)
    section(target, "Left out", left_out)
    assumptions(target, msgspec.structs.replace(setup, file=""))


def _curve(target: Paper, curve: tuple[Estimate, ...]) -> None:
    """Memory and speed against the micro-batch."""
    columns = [
        Column("micro-batch", "right"),
        Column("global batch", "right"),
        Column("GiB", "right"),
        Column("verdict"),
        Column(f"{unit(curve[0].model)}/s" if curve else "", "right"),
        Column("MFU", "right"),
        Column("layout", wrap=True),
    ]
    rows = [
        [
            f"{best.layout.micro_batch:,}",
            f"{best.layout.global_batch:,}",
            in_gib(best.memory.total, 1),
            best.memory.verdict,
            f"{best.timing.tokens / best.timing.step:,.0f}",
            f"{best.timing.mfu:.1%}",
            layout_flags(best).rpartition("--micro-batch")[0],
        ]
        for best in curve
    ]
    draw(target, columns, rows, "Memory and speed against the micro-batch, each with its best layout")


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
    for size in sizes:
        if size.best is None or size.best.time is None:
            rows.append([f"{size.gpus:,}", "-", "-", "-", "no layout is valid and fits"])
        else:
            time = size.best.time
            rows.append(
                [
                    f"{size.gpus:,}",
                    f"{size.days:,.1f}",
                    seconds(time.step),
                    f"{time.mfu:.1%}",
                    layout_words(size.best.layout),
                ]
            )
    draw(
        target,
        columns,
        rows,
        "Sizes beside it, each with its best layout",
        [index for index, size in enumerate(sizes) if size.gpus == chosen],
    )
