"""The plain text of `plan --task generate`."""

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base import gib, in_gib, seconds
from loadgauge.core.definitions.serving.inference import FORMATS
from loadgauge.core.plan.serving import Choice
from loadgauge.core.serving.passes import AXES_OF
from loadgauge.core.text.estimate.setup import print_assumed
from loadgauge.core.text.inference import tried_words
from loadgauge.core.text.table import Column, Paper, draw, first_line, points, section, show_command
from loadgauge.core.text.verdict import WORDS, verdict_words

SAYS = {
    None: "answers most", "seq-len": "holds the longest context", "batch": "holds the most requests at a time",
    "gpus": "needs the fewest GPUs", "gpu": "costs the least",
}  # fmt: skip


def write(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write the best choice with its command, the next ones, and those between tokens a GPU and tokens a user."""
    plan, sought, top = answer.shown
    if plan.apart is not None:
        split = plan.apart
        points(
            target,
            (
                f"APART  {split.readers:,} to read, {split.generators:,} to generate, on {split.gpus:,} GPUs: {split.requests:,.3g}"
                f" requests/s; first token {seconds(split.first)}, the cache's way ({seconds(split.handing)}) included,"
                f" then {seconds(split.generating.answer.token or 0)} each.",
                "Of each side one:",
                f"  {split.reading.command}",
                f"  {split.generating.command}",
                "Together:",
            ),
            "",
        )
    if not plan.choices:
        near = plan.nearest
        lacks = near is not None and near.answer.memory.verdict != "fits"
        if near is not None and lacks:
            first_line(target, verdict_words(near.answer.memory), *WORDS[near.answer.memory.verdict])
        looked = f"{plan.looked:,} layout{'s' if plan.looked > 1 else ''} and batch{'es' if plan.looked > 1 else ''}"
        nothing = "Nothing fits" if lacks else "Nothing keeps the limits"
        points(target, [f"{nothing} of {looked} estimated; the nearest:"], "")
        points(target, plan.left_out)
        if near is not None:
            steps = [f"Try {flags}: {tried_words(other)}" for flags, other in answer.alternatives()] if lacks else []
            times = [] if lacks else [f"{tried_words(near.answer)}; {_times(near)}."]
            points(target, times, "")
            show_command(target, near.command)
            points(target, steps, "")
        return
    best = plan.choices[0]
    cards = sought == "gpu"
    kind = f" ({best.job.gpu})" if cards else ""
    most = ", the model's own" if sought == "seq-len" and best.answer.asked.context == plan.longest else ""
    points(
        target,
        [
            f"{SAYS[sought].upper()}{most}  {_words(best)}",
            f"{best.answer.model.name} on {best.answer.gpus:,} GPUs{kind}: {best.batch:,} requests of {best.answer.asked.context:,}"
            f" tokens at a time, {best.tokens:,.0f} tokens/s ({best.per_gpu:,.0f} a GPU),"
            f" {best.requests:,.3g} requests/s; {_times(best)};{_money(best)}"
            f" {gib(best.answer.memory.total, 1)} of {gib(best.answer.memory.capacity or 0, 1)}, FITS.",
        ],
        "",
    )  # fmt: skip
    show_command(target, best.command)
    if brief:
        return
    _table(target, "The best", _differing(plan.choices, cards=cards)[:top], cards=cards)
    if len(plan.front) > 1:
        each = "money" if cards else "tokens a GPU"
        _table(target, f"Between {each} and tokens a user", list(plan.front)[:top], cards=cards)
    section(target, "Left out", plan.left_out)
    print_assumed(target, plan.assumed)


def _differing(choices: tuple[Choice, ...], *, cards: bool = False) -> list[Choice]:
    """Return the best of each layout; cards: of each kind of GPU"""
    seen: dict[str, Choice] = {}
    for row in choices:
        formats = [row.request.get(name) for name in FORMATS]
        layout = f"{row.answer.gpus} {_words(row, batch=False)} {formats}"
        seen.setdefault(str(row.job.gpu) if cards else layout, row)
    return list(seen.values())


def _money(row: Choice) -> str:
    each = row.answer.money_per_million
    return f" {row.hourly:,.2f} an hour{'' if each is None else f', {each:,.2f} per 1M tokens'};" if row.hourly else ""


def _words(row: Choice, *, batch: bool = True) -> str:
    asked = row.answer.asked
    degrees = [f"--{name} {getattr(asked, name)}" for name in AXES_OF if getattr(asked, name) > 1]
    return " ".join([*degrees, *([f"--batch {asked.batch}"] if batch else [])]) or "one GPU a replica"


def _times(row: Choice) -> str:
    """Return the times of a request: of a first token and of those after it; of a score, of all that run at once."""
    asked = row.answer.asked
    if asked.task == "forward":
        return f"a pass takes {seconds(row.first)}"
    each = f", then {seconds(row.answer.token or 0)} each" if asked.answer > 1 else ""
    return f"first token {seconds(row.first)}{each}"


def _table(target: Paper, title: str, rows: list[Choice], *, cards: bool) -> None:
    cells = [
        [
            str(row.job.gpu), str(row.answer.gpus),
            *(str(getattr(row.answer.asked, name)) for name in (*AXES_OF, "replicas")),
            *(row.request.get(name, "") for name in FORMATS),
            f"{row.answer.asked.context:,}", f"{row.answer.asked.batch:,}", f"{row.per_gpu:,.0f}",
            f"{1 / row.answer.token:,.1f}" if row.answer.token else "", seconds(row.first), in_gib(row.answer.memory.total, 1),
            "" if row.answer.money_per_million is None else f"{row.answer.money_per_million:,.2f}",
            f"{row.hourly:,.2f}" if row.hourly else "",
        ]
        for row in rows
    ]  # fmt: skip
    names = [
        "GPU",
        "GPUs",
        *AXES_OF,
        "replicas",
        "weights",
        "cache",
        "context",
        "batch",
        "tok/s/GPU",
        "tok/s/user",
        "first",
        "GiB",
        "per 1M tokens",
        "per hour",
    ]
    several = {"weights", "cache"} if cards else {"GPU", "weights", "cache"}
    texts = [{row[index] for row in cells} for index in range(len(names))]
    kept = [n for n, name in enumerate(names) if any(texts[n]) and (name not in several or len(texts[n]) > 1)]
    draw(
        target,
        [Column(names[index], "right") for index in kept],
        [[row[index] for index in kept] for row in cells],
        title,
    )
