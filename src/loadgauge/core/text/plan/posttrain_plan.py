"""The plain text of `plan --task`: the fastest step that fits, its command, and why the next one lost."""

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base import gib, in_gib
from loadgauge.core.plan import posttrain
from loadgauge.core.resolve.posttrain import resolve_posttrain
from loadgauge.core.text.post_training.posttrain_time import lines, seconds
from loadgauge.core.text.table import Column, Paper, draw, first_line, heading, points, show_command
from loadgauge.core.text.verdict import WORDS

FOUND = {
    "seq_len": "The longest sequence that fits [tokens]", "answers": "The longest answers that fit [tokens]",
    "gpus": "The fewest GPUs that fit, of powers of two", "samples": "The most answers to a prompt that fit, of powers of two",
    "micro_batch": "The largest micro-batch that fits, of powers of two",
    "utilization": "The largest share of a card for the engine that fits",
    "staleness": "The fewest updates that answers may be old, for a step as short as with more (0: none; of powers of two)",
}  # fmt: skip


def write(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write the plan; brief: the best run alone."""
    plan, sought, value, others = answer.shown
    if value is not None:
        more = " (the most that is tried)" if value == posttrain.MOST.get(str(sought)) else ""
        target.print(f"{FOUND[str(sought)]}: {value:,}{more}", style="bold", soft_wrap=True)
    counted = f"{plan.candidates:,} candidates timed, {plan.looked:,} looked at in memory"
    if plan.best is None:
        if plan.nearest is None:
            points(target, [f"Nothing fits: {counted}."], "")
            return
        held = plan.nearest.memory
        short, worst = held.verdict == "does not fit", held.decisive
        word, style = ("NOTHING FITS", "bold red") if short else WORDS[held.verdict]
        line = (
            f"{word}  no layout {'fits' if short else 'is sure to fit'}: in the nearest {worst.name} needs {in_gib(worst.total, 1)}"
            f" of {gib(held.capacity or 0, 1)}, range {in_gib(worst.low, 1)}-{gib(worst.high, 1)}."
        )
        first_line(target, line, word, style)
        show_command(target, plan.nearest.job.command(), "The nearest:")
        if others:
            heading(target, "What would make it fit, each re-planned")
            draw(
                target,
                [Column("step", "right"), Column("GiB", "right"), Column("change"), Column("flags", wrap=True)],
                [
                    [f"{seconds(held.time.step)} s", in_gib(held.memory.decisive.total, 1), each.words, each.flags]
                    for each in others
                    for held in (each.choice,)
                ],
            )
        points(target, ["", f"{counted}."], "")
        return
    best = plan.best
    time, worst = best.time, best.memory.decisive
    step = f"{seconds(time.step)} s a step ({seconds(time.low)}-{seconds(time.high)} s); {gib(worst.total, 1)} in {worst.name}"
    first_line(target, f"BEST  {step}", "BEST", "bold")
    show_command(target, best.job.command())
    run, _ = resolve_posttrain(best.job)
    points(target, lines(run, time, best.job), "")
    if brief:
        return
    rows = [_row("best", best)]
    if plan.runner_up is not None:
        rows.append(_row("runner-up", plan.runner_up))
    names = ["", "placement", "tp pp ep zero", "recompute", "micro-batch", "log-probs", "rollout", "s", "GiB"]
    shown = [index for index, cells in enumerate(zip(*rows, strict=True)) if any(cells)]
    columns = [Column(names[index], "right" if index > 6 else "left") for index in shown]
    draw(target, columns, [[row[index] for index in shown] for row in rows], counted, [0])
    if plan.why:
        points(target, [f"The runner-up lost: {plan.why}."])


def _row(name: str, choice: posttrain.Choice) -> list[str]:
    job = choice.job
    return [
        name,
        job.placement or "",
        f"{job.tp or 1}  {job.pp or 1}  {job.ep or 1}  {job.zero}",
        job.recompute or "",
        str(job.micro_batch),
        "" if job.logprob_batch is None else str(job.logprob_batch),
        job.rollout or "",
        seconds(choice.time.step),
        in_gib(choice.memory.decisive.total, 1),
    ]
