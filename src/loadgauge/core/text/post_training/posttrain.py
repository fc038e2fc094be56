"""The plain text of a run after pre-training: the verdict, memory by phase and role, the worst phase, and the next step."""

from collections.abc import Sequence

from loadgauge.core.answers.post_training import RunOfTask
from loadgauge.core.base import gib, in_gib, provider
from loadgauge.core.post_training.memory import PhaseMemory, PostMemory
from loadgauge.core.post_training.roles import Run
from loadgauge.core.text.estimate.brief import short
from loadgauge.core.text.estimate.setup import print_assumed
from loadgauge.core.text.post_training.posttrain_time import headline, write as report_time
from loadgauge.core.text.table import Column, Paper, draw, first_line, points, section
from loadgauge.core.text.verdict import WORDS, host_verdict, host_words, left_out_words, unread_words, verdict_words


def write(answer: RunOfTask, target: Paper, *, brief: bool = False) -> None:
    """Write the answer; brief: the verdict, the run, the largest parts of the fullest phase, the step, the remedy"""
    run, memory = answer.run, answer.memory
    worst, asked = memory.worst, memory.question
    head = [
        *unread_words(answer.unread), *([] if asked is None else [f"{asked.words()}."]),
        *left_out_words(run.trained.model, run.trained.training.precision.weight),
    ]  # fmt: skip
    lines, next_steps = _lines(run, memory), _next(answer, answer.alternatives())
    took = headline(answer.time, answer.untimed)
    on_host, stated = sum(memory.host.values()), answer.job.host_memory
    host = host_verdict(on_host, stated)
    if brief:
        first = [
            *head,
            f"{_who(run)}, {run.placement.gpus:,} x {'GPU' if run.gpu is None else run.gpu.id}; fullest in {worst.name}",
        ]
        own = _own_words(answer) if next_steps and answer.job.dialect else ""
        node = f"Host memory: {host_words(on_host, stated)}" if stated else ""
        step = f"Next, in {own} {next_steps[0][next_steps[0].rindex('(') :]}" if own else "".join(next_steps[:1])
        short(memory, worst.parts, first, (*took, node, step), target, host=host)
        return
    first_line(target, f"{verdict_words(memory)}: the phase is {worst.name}{host}", *WORDS[memory.verdict])
    points(target, [*head, *lines, *took, *next_steps], "")
    roles = list(dict.fromkeys(resident.role for phase in memory.phases for resident in phase.residents))
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
    _parts(target, worst)
    if memory.host:
        rows = [[part, in_gib(nbytes, 1)] for part, nbytes in memory.host.items()]
        draw(target, [Column("of a node"), Column("GiB", "right")], rows, "Host memory")
        points(target, [f"{host_words(on_host, stated)}."], "")
    print_assumed(target, run.assumed)
    section(target, "Not counted", answer.not_counted)
    report_time(target, run, answer.time, answer.job)


def _who(run: Run) -> str:
    """Return what is trained, by which task, and the other members, whose model is named where it is another one."""
    trained = run.trained
    others = (
        name if member.model.name == trained.model.name else f"{name} {member.model.name}"
        for name, member in run.members.items()
        if not member.shares and member is not trained
    )
    return ", ".join((trained.model.name, run.task.title, *others))


def _lines(run: Run, memory: PostMemory) -> list[str]:
    task, trained, placement = run.task, run.trained, run.placement
    lines = [f"{_who(run)}, on {placement.gpus:,} x {'GPU' if run.gpu is None else run.gpu.name}."]
    if run.engine is None or memory.engine is None:
        rows = f" (each {task.rows} rows: chosen and rejected)" if task.pairs else ""
        micro = trained.layout.micro_batch // task.rows
        lines.append(f"A micro-batch of {micro}{rows}, {trained.layout.seq_len:,} tokens.")
        return lines
    sequences, engine = run.sequences, memory.engine
    where = "colocated" if placement.colocated else f"{placement.trainer} + {placement.rollout} GPUs"
    where += "".join(f", {number} of {' and '.join(names)}" for names, number in placement.apart)
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


def _next(answer: RunOfTask, remedies: Sequence[tuple[str, PostMemory]]) -> list[str]:
    memory, job = answer.memory, answer.job
    if memory.verdict in ("fits", "unknown"):
        return []
    if not remedies and (job.gpus or 1) > 1 and job.gpu is not None:
        return [f"No single setting makes {memory.worst.name} fit; other layouts: {job.command('plan')}"]
    if not remedies:
        return [
            f"No change that was tried makes {memory.worst.name} fit, alone or with others: more GPUs, or a smaller model."
        ]
    return [
        f"Next: {flags} ({WORDS[after.verdict][0].lower()}, {gib(after.decisive.total, 1)} in {after.decisive.name})"
        for flags, after in remedies
    ]


def _own_words(answer: RunOfTask) -> str:
    """Return the mildest change in the words of the user's trainer."""
    remedies, dialects = answer.alternatives(), provider("DIALECTS")
    return dialects.words_of_task(answer.job, remedies[0][0]) if remedies and dialects is not None else ""


def _parts(target: Paper, phase: PhaseMemory) -> None:
    draw(
        target,
        [Column("role"), Column("what"), Column("GiB", "right")],
        [
            [resident.role, resident.part, in_gib(resident.nbytes)]
            for resident in sorted(phase.residents, key=lambda resident: -resident.nbytes)
        ],
        f"Where it goes in {phase.name}",
    )
