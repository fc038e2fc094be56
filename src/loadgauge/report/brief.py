"""The short answer: the verdict, the largest parts, the step and the remedy, in at most ten lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgauge.estimate.result import Estimate
from loadgauge.report.setup import length_words
from loadgauge.report.table import console, draw_lines, terminal_width
from loadgauge.report.verdict import WORDS, effort, question_words, range_words, verdict_words
from loadgauge.resolve.setup import Setup
from loadgauge.spec.memory_range import Counter
from loadgauge.units import gib, in_gib, seconds

if TYPE_CHECKING:
    from rich.console import Console

NARROW = 80
"""Columns of a terminal below which the short answer is the default."""
SHOWN = 5
"""Lines of parts; what they leave out is in the last one."""
BAR = 24


def narrow() -> bool:
    """Whether stdout is a terminal of fewer than `NARROW` columns."""
    width = terminal_width()
    return width is not None and width < NARROW


def brief(given: Setup, result: Estimate, counter: Counter | None = None, target: Console | None = None) -> None:
    """Print the short answer to `target`, by default the terminal."""
    from rich.text import Text

    target = target or console()
    word, style = WORDS[result.memory.verdict]
    first = Text(verdict_words(result))
    first.stylize(style, 0, len(word))
    lines = [first, Text(_run(given, result), "dim"), *(Text(line) for line in _parts(result))]
    memory = result.memory
    wide = range_words(memory)[1:] if memory.verdict == "tight" else range_words(memory)
    lines += [
        Text(line)
        for line in (_counter(result, counter), _step(result), question_words(memory), *wide, _remedy(given, result))
        if line
    ]
    draw_lines(target, lines)


def _run(given: Setup, result: Estimate) -> str:
    """What is trained, and on what."""
    layout, lora = result.layout, result.training.lora
    how = "" if lora is None else f" {lora.name},"
    where = "" if given.gpu is None else f" {layout.gpus:,} x {given.gpu.id},"
    return f"{result.model.name},{how}{where} {layout.micro_batch} x {length_words(result.model, layout.seq_len)}"


def _parts(result: Estimate) -> list[str]:
    """The largest parts at the peak, with bars; the rest together."""
    ranked = sorted(result.memory.parts.items(), key=lambda item: -item[1])
    ranked = [(part, nbytes) for part, nbytes in ranked if nbytes > 0]
    if len(ranked) > SHOWN:
        rest = ranked[SHOWN - 1 :]
        ranked = [*ranked[: SHOWN - 1], (f"{len(rest)} others", sum(nbytes for _, nbytes in rest))]
    most = max(nbytes for _, nbytes in ranked)
    return [
        f"  {part:<12}{in_gib(nbytes, 1):>9} GiB  {'█' * round(BAR * nbytes / most)}".rstrip()
        for part, nbytes in ranked
    ]


def _counter(result: Estimate, counter: Counter | None) -> str:
    if counter is None:
        return ""
    shown = result.memory.reading(counter)
    return f"{counter} shows {gib(shown.value, 1)} ({in_gib(shown.low, 1)} to {in_gib(shown.high, 1)})"


def _step(result: Estimate) -> str:
    time = result.time
    if time is None:
        return f"Peak: {result.memory.moment}"
    return f"A step: {seconds(time.step)}, {time.tokens_per_second_per_gpu:,.0f} tokens/s a GPU, MFU {time.mfu:.0%}"


def _remedy(given: Setup, result: Estimate) -> str:
    """The mildest change that makes it fit, and what it costs."""
    if result.memory.verdict in ("fits", "unknown"):
        return ""
    from loadgauge.advise.advice import advice  # only where it may not fit

    changes = advice(given)
    if not changes:
        return f"Peak: {result.memory.moment}. No change tried makes it smaller."
    best = changes[0].result
    more = effort(best, result) - 1
    cost = f", {more:+.0%} {'time' if result.time is not None else 'FLOPs'}" if abs(more) >= 0.005 else ""
    return f"Try {changes[0].flags}: {gib(best.memory.total, 1)}, {WORDS[best.memory.verdict][0]}{cost}"
