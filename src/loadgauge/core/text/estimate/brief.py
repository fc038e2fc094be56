"""The short answer: the verdict, the largest parts, the step and the remedy, on one small screen."""

from collections.abc import Iterable, Mapping, Sequence

from loadgauge.core.base import Needs, days_words, gib, in_gib, provider, seconds
from loadgauge.core.definitions.training.memory_range import Counter
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import Setup
from loadgauge.core.text.estimate.setup import batch_words, length_words, rate, unit
from loadgauge.core.text.estimate.step_time import moved
from loadgauge.core.text.language import said
from loadgauge.core.text.table import ABOVE, SCREEN, Paper, first_line, height, wrapped_lines
from loadgauge.core.text.verdict import (
    WORDS,
    host_verdict,
    host_words,
    left_out_words,
    question_words,
    range_words,
    unread_words,
    verdict_words,
)

SHOWN, LEAST = 5, 2
"""Lines of parts, and where the rest is long; what they leave out is in the last one."""
BAR = 24
NAMES = {"outside": "outside tensors"}
"""Parts whose key alone does not say what they are."""


def brief(setup: Setup, result: Estimate, counter: Counter | None, target: Paper) -> None:
    """Write the short answer."""
    memory, on_host = result.memory, setup.on_host(result)
    asked = question_words(memory)
    wide = () if asked else range_words(memory)[1:] if memory.verdict == "tight" else range_words(memory)
    lines = (
        _counter(result, counter),
        _step(result),
        moved(setup, result),
        f"Host memory: {host_words(on_host, setup.job.host_memory)}" if setup.job.host_memory else "",
        _whole(setup, result),
        asked,
        _remedy(setup, result),
    )
    left_out = left_out_words(result.model, result.training.precision.weight)
    unread = " ".join(unread_words(setup.unread(result)))
    head = [*([unread] if unread else []), *left_out, _run(setup, result)]
    short(memory, memory.parts, head, lines, target, wide, host_verdict(on_host, setup.job.host_memory))


def short(
    memory: Needs,
    parts: Mapping[str, float],
    run: Iterable[str],
    lines: Iterable[str],
    target: Paper,
    remarks: Sequence[str] = (),
    host: str = "",
) -> None:
    """Print a short answer of any task: the verdict, what is run, the largest parts [bytes], and the lines that are not empty.

    remarks: before the last line, where the screen has room for them; host: `host_verdict`
    """
    run, lines = list(map(said, run)), [said(line) for line in lines if line]
    remarks = list(map(said, remarks))
    word, style = WORDS[memory.verdict]
    first = verdict_words(memory, host)
    left = SCREEN - height([*ABOVE, said(first), *run, *lines])
    shown = max(LEAST, min(SHOWN, left))
    if height(remarks) <= left - min(shown, len(parts)):
        lines[-1:-1] = remarks
    first_line(target, first, word, style)
    for text, of in ((run, "dim"), (largest_parts(parts, shown), ""), (lines, "")):
        for line in wrapped_lines(text, target.width):
            target.print(line, style=of, soft_wrap=True)


def _run(setup: Setup, result: Estimate) -> str:
    """Return what is trained, and on what."""
    layout, lora = result.layout, result.training.lora
    how = "" if lora is None else f" {lora.name},"
    where = "" if setup.gpu is None else f" {layout.gpus:,} x {setup.gpu.id},"
    if not result.model.own.has_length:
        return f"{result.model.name},{how}{where} {batch_words(result.model, layout.micro_batch, 1)}"
    return f"{result.model.name},{how}{where} {layout.micro_batch} x {length_words(result.model, layout.seq_len)}"


def largest_parts(parts: Mapping[str, float], shown: int = SHOWN) -> list[str]:
    """Return a line for each of the largest parts [bytes], with bars; the rest together.

    >>> [line.split()[:2] for line in largest_parts({"weights": 2**31, "optimizer": 2**30, "nothing": 0})]
    [['weights', '2.0'], ['optimizer', '1.0']]
    """
    from rich.cells import cell_len, set_cell_size

    ranked = sorted(parts.items(), key=lambda item: -item[1])
    ranked = [(said(NAMES.get(part, part)), nbytes) for part, nbytes in ranked if nbytes > 0]
    if len(ranked) > shown:
        rest = ranked[shown - 1 :]
        ranked = [*ranked[: shown - 1], (said(f"{len(rest)} others"), sum(nbytes for _, nbytes in rest))]
    most = max(nbytes for _, nbytes in ranked)
    width = max(12, *(cell_len(part) + 2 for part, _ in ranked))
    return [
        f"  {set_cell_size(part, width)}{in_gib(nbytes, 1):>9} GiB  {'█' * round(BAR * nbytes / most)}".rstrip()
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
        ask = (
            ". --gpu NAME says whether it fits, and how long a step takes."
            if result.memory.verdict == "unknown"
            else ""
        )
        return f"Peak: {result.memory.moment}{ask}"
    speed = f"{rate(time.tokens_per_second_per_gpu)} {unit(result.model)}/s a GPU"
    return f"A step: {seconds(time.step)}, {speed}, MFU {time.mfu:.0%}"


def _remedy(setup: Setup, result: Estimate) -> str:
    """The mildest change that makes it fit, and what it costs."""
    if result.memory.verdict in ("fits", "unknown") or (result.memory.question and result.memory.question.endless):
        return ""
    from loadgauge.core.plan.advise.advice import advice  # only where it may not fit
    from loadgauge.core.plan.advise.try_ import effort

    changes = advice(setup)
    if not changes:
        return f"Peak: {result.memory.moment}. No change tried makes it smaller."
    dialects, own = provider("DIALECTS"), ""
    chosen, *others = changes
    if dialects is not None:
        # Of what fits, a trainer that is named does what it has keys for.
        told = [chosen, *(each for each in others if each.result.memory.fits)] if setup.job.dialect else [chosen]
        words = ((each, dialects.words(setup, resolve_job(each.job, setup.model))) for each in told)
        chosen, own = next((pair for pair in words if pair[1]), (chosen, ""))
        if not own and setup.job.dialect:
            own = dialects.words(setup, resolve_job(chosen.job, setup.model), lacking=9)
    best = chosen.result
    more, of = effort(best, result) - 1, "time" if result.time is not None else "FLOPs"
    cost = f", {more + 1:.3g} x the {of}" if more >= 1 else f", {more:+.0%} {of}" if abs(more) >= 0.005 else ""
    start, end = (
        ("Nearest:", "; more GPUs, or a smaller model") if best.memory.verdict == "does not fit" else ("Try", "")
    )
    line = f"{start} {chosen.flags}: {gib(best.memory.total, 1)}, {WORDS[best.memory.verdict][0]}{cost}{end}"
    return f"{line}\n  In {own}" if own else line


def _whole(setup: Setup, result: Estimate) -> str:
    """The whole run, where its tokens are given: days, GPU-hours and money."""
    budget = setup.budget(result)
    if budget is None:
        return ""
    cost = "" if budget.cost is None else f", {budget.cost:,.0f} at {budget.price:g} per GPU-hour (your currency)"
    return f"The run: {days_words(budget.days)}, {budget.gpu_hours:,.0f} GPU-hours{cost}"
