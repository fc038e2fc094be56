"""The plain text of a run after pre-training: the verdict, memory by phase and role, the worst phase, and the next step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadgauge.core.answers.post_training import NOT_COUNTED
from loadgauge.core.base.units import gib, in_gib
from loadgauge.core.post_training.explain import Explained
from loadgauge.core.post_training.memory import PhaseMemory, PostMemory
from loadgauge.core.post_training.roles import Run
from loadgauge.core.text.estimate.brief import short
from loadgauge.core.text.estimate.setup import print_assumed
from loadgauge.core.text.table import Column, console, draw, heading, points
from loadgauge.core.text.verdict import WORDS, host_words, left_out_words, unread_words, verdict_words


def report(
    run: Run,
    memory: PostMemory,
    remedies: Sequence[tuple[str, PostMemory]] = (),
    took: Sequence[str] = (),
    host_memory: str | None = None,
) -> None:
    """Print the answer. remedies: flags that were tried, with the memory of the run under them; took: lines about its time;
    host_memory: of a node, as it is stated"""
    target, worst = console(), memory.worst
    target.print(f"{verdict_words(memory)}: the phase is {worst.name}", style=WORDS[memory.verdict][1], soft_wrap=True)
    lines = [*_unread(run, memory), *_left_out(run), *_lines(run, memory), *took, *_next(memory, remedies)]
    points(target, lines, "")
    roles = list(dict.fromkeys(one.role for phase in memory.phases for one in phase.residents))
    rows = [
        [
            phase.name,
            phase.side,
            *(in_gib(phase.of(role)) if phase.of(role) else "" for role in roles),
            in_gib(phase.total),
            f"{in_gib(phase.low, 1)}-{in_gib(phase.high, 1)}",
        ]
        for phase in memory.phases
    ]
    columns = [Column("phase"), Column("on"), *(Column(role, "right") for role in roles)]
    draw(
        target,
        [*columns, Column("together", "right"), Column("range", "right")],
        rows,
        "GiB on the fullest card, by phase and role",
        [index for index, phase in enumerate(memory.phases) if phase is worst],
    )
    _parts(worst)
    if memory.host:
        rows = [[what, in_gib(nbytes, 1)] for what, nbytes in memory.host.items()]
        draw(target, [Column("of a node"), Column("GiB", "right")], rows, "Host memory")
        points(target, [f"{host_words(sum(memory.host.values()), host_memory)}."], "")
    print_assumed(target, run.assumed)
    heading(target, "Not counted")
    points(target, [*(item.note for item in run.uncounted if item.note), *NOT_COUNTED])


def brief(run: Run, memory: PostMemory, remedies: Sequence[tuple[str, PostMemory]], took: Sequence[str]) -> None:
    """Print the answer in ten lines: the verdict, the run, the largest parts of the fullest phase, the step, the remedy."""
    first = [*_unread(run, memory), *_left_out(run), f"{_lines(run, memory)[0]} Fullest in {memory.worst.name}."]
    short(memory, memory.worst.parts, first, (*took, *_next(memory, remedies)[:1]))


def _unread(run: Run, memory: PostMemory) -> list[str]:
    """The keys of job files that are not counted, and the one that decides."""
    items = [item.document(memory.unread) for item in run.uncounted if item.file]
    asked = memory.question
    return [*unread_words(items), *([] if asked is None else [f"{asked.words()}."])]


def _left_out(run: Run) -> list[str]:
    return left_out_words(run.trained.model, run.trained.training.precision.weight)


def _lines(run: Run, memory: PostMemory) -> list[str]:
    task, trained, placement = run.task, run.trained, run.placement
    card = "GPU" if run.gpu is None else run.gpu.name
    others = ", ".join(
        f"{name} {member.model.name}"
        for name, member in run.members.items()
        if not member.shares and member is not trained
    )
    lines = [
        f"{trained.model.name}, {task.title}{', with ' + others if others else ''}, on {placement.gpus:,} x {card}."
    ]
    if run.engine is None or memory.engine is None:
        rows = f" (each {task.rows} rows: chosen and rejected)" if task.pairs else ""
        micro = trained.layout.micro_batch // task.rows
        lines.append(f"A micro-batch of {micro}{rows}, {trained.layout.seq_len:,} tokens.")
        return lines
    sequences, engine = run.sequences, memory.engine
    where = "colocated" if placement.colocated else f"{placement.trainer} + {placement.rollout} GPUs"
    lines.append(
        f"A step: {sequences.prompts:,} prompts x {sequences.samples} answers, {sequences.prompt:,} + {sequences.answers.mean:,.0f}"
        f" tokens in the mean, {sequences.longest:,} at most; {run.engine.text()}, {run.replicas} replicas, {where}."
    )
    if engine.unstarted:
        return lines  # why is where the time would be
    waits = f"; {engine.asked - engine.running:,} wait or are preempted" if engine.preempts else ""
    lines.append(
        f"Cache: {gib(engine.pool, 1)}, {engine.running:,} of {engine.asked:,} sequences of a replica run at once{waits}."
    )
    return lines


def _next(memory: PostMemory, remedies: Sequence[tuple[str, PostMemory]]) -> list[str]:
    if memory.verdict in ("fits", "unknown"):
        return []
    if not remedies:
        return [
            f"No change that was tried makes {memory.worst.name} fit, alone or with others: more GPUs, or a smaller model."
        ]
    return [
        f"Next: {flags} ({WORDS[found.verdict][0].lower()}, {gib(found.decisive.total, 1)} in {found.decisive.name})"
        for flags, found in remedies
    ]


def _parts(phase: PhaseMemory) -> None:
    rows = [[one.role, one.part, in_gib(one.nbytes)] for one in sorted(phase.residents, key=lambda one: -one.nbytes)]
    draw(console(), [Column("role"), Column("what"), Column("GiB", "right")], rows, f"Where it goes in {phase.name}")


def explained(found: Explained, *, as_json: bool) -> None:
    """Print the reasons of a part."""
    if as_json:
        from loadgauge.core.text.table import document as print_document

        print_document(msgspec.to_builtins(found))
        return
    rows = [[line.what, line.formula, line.numbers, line.value] for line in found.lines]
    columns = [Column(found.part), Column("formula", wrap=True), Column("numbers", wrap=True), Column("", "right")]
    draw(console(), columns, rows, f"Why {found.part} is as large as it is")
    points(console(), [f"Source: {found.source}."])
