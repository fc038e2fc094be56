"""The plain text of the time of a step after pre-training: phases, what bounds it, what the whole run takes."""

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.post_training.roles import Run
from loadgauge.core.post_training.step import StepTime
from loadgauge.core.text.table import Column, Paper, draw, points


def headline(time: StepTime | None, untimed: str) -> list[str]:
    """Return the time of a step in a line, and what takes the most; or why there is none."""
    if time is None:
        return [f"No time: {untimed}."]
    most = max(time.phases, key=lambda phase: phase.seconds)
    return [
        f"A step: {seconds(time.step)} s ({seconds(time.low)}-{seconds(time.high)}), {most.name} {seconds(most.seconds)} s of it."
    ]


def write(target: Paper, run: Run, time: StepTime | None, job: Job) -> None:
    """Write the time of a step, where there is one."""
    if time is None:
        return
    rows = [
        [
            phase.name,
            phase.role,
            phase.side if time.sides else "",
            seconds(phase.seconds),
            f"{phase.seconds / time.step:.0%}",
        ]
        for phase in time.phases
    ]
    columns = [
        Column("phase"),
        Column("of"),
        Column("on" if time.sides else ""),
        Column("s", "right"),
        Column("", "right"),
    ]
    worst = max(range(len(rows)), key=lambda index: time.phases[index].seconds)
    draw(target, columns, rows, f"A step: {seconds(time.step)} s, {seconds(time.low)}-{seconds(time.high)} s", [worst])
    points(target, lines(run, time, job))


def seconds(value: float) -> str:
    """Three digits.

    >>> seconds(3.14159), seconds(314.159)
    ('3.1', '314')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def lines(run: Run, time: StepTime, job: Job) -> list[str]:
    """Return what bounds the step, and what the whole run takes."""
    sentences, phase, pace = [], time.generation, f"{time.tokens_per_second_per_gpu:,.0f}"
    if (walk := time.beside) is not None:
        sentences.append(
            f"The {time.bound} bounds the step: the trainer waits {walk.waits / time.step:.0%} of it for answers, the rollout"
            f" {walk.idle / time.step:.0%} for the trainer; answers are {walk.behind:.1f} updates old, {run.staleness} at the most;"
            f" {walk.running:,.0f} run in the mean."
        )
        if not walk.partial and walk.waits > 0:
            sentences.append("Answers that run end before weights move; with partial=true they go on (--rollout).")
    if phase is None:
        sentences.append(f"{pace} training tokens a second and GPU.")
    else:
        waits = f"{time.preempted:,.0f} sequences of a replica wait for its cache: the engine preempts and reads them again."
        alone = (
            f"{phase.running:,.0f} sequences of a replica run at first; slots are empty for {phase.idle:.0%} of the decoding, the"
            f" last tenth of the sequences takes {phase.tail / phase.seconds:.0%} of it (--explain tail)."
        )
        engine = run.engine
        if engine is not None and engine.turns > 1:
            share = engine.seen / run.sequences.answers.mean
            sentences.append(
                f"{engine.turns} turns an answer, {engine.tool or 0:g} s between two; {share:.0%} of an answer is observed:"
                " read, not made, and not trained on."
            )
        sentences += [
            *([] if walk is not None and walk.partial else [alone]),
            *([waits] if time.preempted >= 1 else []),
            f"{pace} tokens a second and GPU, prompts included.",
        ]
    if job.steps is not None:
        text = f"{job.steps:,} steps: {time.days(job.steps):,.1f} days, {time.days(job.steps) * 24 * time.gpus:,.0f} GPU-hours"
        if job.price is not None:
            text += f", {time.money(job.steps, job.price):,.0f} at {job.price:g} a GPU-hour"
        sentences.append(text + ".")
    return sentences
