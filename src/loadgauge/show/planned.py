"""A plan, told: the best layouts, why the second one lost, the Pareto front; or the nearest miss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loadgauge.errors import ConfigError, NothingFits
from loadgauge.estimate.result import Estimate
from loadgauge.families.catalogue import models as catalogue
from loadgauge.families.catalogue import resolve
from loadgauge.search.changes import what_next, what_would_fit
from loadgauge.search.plan import Case, Plan, plan
from loadgauge.show.plan import clear, progress
from loadgauge.show.request import Job
from loadgauge.show.table import GLUE, Column, console, document, draw, heading, points
from loadgauge.show.timing import LANES, seconds
from loadgauge.units import GIB

if TYPE_CHECKING:
    from rich.console import Console


def answer(given: Job, cases: list[Case], asked: dict[str, Any], *, as_json: bool) -> int:
    """Plans and prints; the exit code."""
    if asked["find"] is not None or asked["prices"] is not None:
        return _found(cases, asked, as_json=as_json)
    try:
        found = plan(
            cases, objective=asked["objective"], margin=asked["margin"], top=asked["top"], progress=progress
        )  # fmt: skip
    except NothingFits as error:
        clear()
        return _nothing(error, cases, asked, as_json=as_json)
    clear()
    changes = what_next(cases[-1], found.layouts[0], asked["margin"], asked["objective"]) if asked["what_next"] else []
    if as_json:
        document(
            {
                "objective": found.objective,
                "margin": found.margin,
                "layouts": [result.to_dict() for result in found.layouts],
                "pareto": [result.to_dict() for result in found.pareto],
                "evaluated": found.evaluated,
                "valid": found.valid,
                "fitting": found.fitting,
                "seconds": found.seconds,
                "why": why(found),
                "changes": [change.to_dict() for change in changes],
                "assumed": asked["assumed"],
            }
        )
        return 0
    target = console()
    _best(target, found)
    _table(target, found.layouts, "The best layouts" if len(found.layouts) > 1 else "The best layout")
    reasons = why(found)
    if reasons:
        heading(target, "Why the second one lost")
        points(target, reasons)
    _table(target, _thinned(found.pareto), "Less memory for more time: the Pareto front")
    if changes:
        heading(target, "What to change next, each planned anew")
        points(target, [change.line() for change in changes])
    points(
        target,
        [
            "",
            f"{found.evaluated:,} combinations looked at, {found.valid:,} layouts can exist, {found.fitting:,} fit;"
            f" {found.seconds:,.1f} s.",
        ],
        "",
        style="dim",
    )
    if found.moved:
        points(target, [f"Estimated one by one, {found.moved} of the first took another place."], "", style="dim")
    if asked["assumed"]:
        heading(target, "Assumed, as you did not say")
        glued = (f"{flag} {value}".replace(" ", GLUE) for flag, value in asked["assumed"].items())
        points(target, [", ".join(glued)], "")
    return 0


def flags_of(result: Estimate) -> str:
    """The layout as flags of `loadgauge estimate`."""
    layout = result.layout
    words = [
        f"--{name} {value}" for name in ("tp", "pp", "vpp", "cp", "ep", "etp") if (value := getattr(layout, name)) > 1
    ]
    words += [f"--zero {layout.zero}"] if layout.zero else []
    words += [f"--replicas {layout.replicas}"] if layout.replicas > 1 else []
    words += ["--sequence-parallel"] if layout.sequence_parallel else []
    if layout.pp > 1 and layout.schedule not in ("1f1b", "interleaved"):
        words.append(f"--schedule {layout.schedule}")
    words += [f"--recompute {layout.recompute}"] if layout.recompute.mode != "none" else []
    if layout.stage_layers is not None:
        words.append(f"--stage-layers {','.join(map(str, layout.stage_layers))}")
    return " ".join([*words, f"--micro-batch {layout.micro_batch}"])


def _best(target: Console, found: Plan) -> None:
    from rich.text import Text

    best = found.layouts[0]
    assert best.time is not None
    line = Text(f"BEST  {flags_of(best)}")
    line.stylize("bold green", 0, 4)
    target.print(line, soft_wrap=True)
    memory, time = best.memory, best.time
    assert memory.capacity is not None
    card = best.cluster.gpu.name if best.cluster is not None else ""
    points(
        target,
        [
            f"{best.model.name} on {best.layout.gpus:,} x {card}: a step of {best.layout.global_batch:,} sequences takes"
            f" {seconds(time.step)} ({seconds(time.low)} to {seconds(time.high)}), {time.tokens_per_second_per_gpu:,.0f}"
            f" tokens/s/GPU, MFU {time.mfu:.1%}; {memory.total / GIB:,.1f} of {memory.capacity / GIB:,.1f} GiB"
            f" ({memory.verdict}).",
        ],
        "",
    )


def _table(target: Console, results: tuple[Estimate, ...] | list[Estimate], title: str) -> None:
    several = len({result.layout.gpus for result in results}) > 1
    names = ("dp", "tp", "pp", "vpp", "cp", "ep", "etp", "zero")
    shown = [name for name in names if any(getattr(result.layout, name) > int(name != "zero") for result in results)]
    columns = [
        Column("#", "right"), *([Column("GPUs", "right")] if several else []), Column("step", "right"),
        Column("GiB", "right"), Column("MFU", "right"), *(Column(name, "right") for name in shown),
        Column("batch", "right"), Column("sp"), Column("recompute"), Column("schedule", wide=True),
    ]  # fmt: skip
    rows = []
    for number, result in enumerate(results, 1):
        layout = result.layout
        assert result.time is not None
        rows.append(
            [
                str(number), *([f"{layout.gpus:,}"] if several else []), seconds(result.time.step),
                f"{result.memory.total / GIB:,.1f}", f"{result.time.mfu:.1%}",
                *(_degree(layout, name) for name in shown), str(layout.micro_batch),
                "yes" if layout.sequence_parallel else "no", str(layout.recompute), layout.schedule if layout.pp > 1 else "",
            ]
        )  # fmt: skip
    draw(target, columns, rows, title)


def _degree(layout: Any, name: str) -> str:
    value = str(getattr(layout, name))
    return f"{value} / {layout.replicas}" if name == "zero" and layout.replicas > 1 else value


def _thinned(results: tuple[Estimate, ...], most: int = 8) -> list[Estimate]:
    """Some of the front, both ends among them."""
    if len(results) <= most:
        return list(results)
    places = sorted({round(number * (len(results) - 1) / (most - 1)) for number in range(most)})
    return [results[place] for place in places]


def why(found: Plan) -> list[str]:
    """What the second layout spends more time on than the first, and what less; in memory where that decided."""
    if len(found.layouts) < 2:
        return []
    best, other = found.layouts[:2]
    assert best.time is not None
    assert other.time is not None
    more = other.time.step - best.time.step
    lines = [f"{flags_of(other)}"]
    if abs(more) < 1e-4 * best.time.step and found.objective in ("time", "throughput", "money"):
        less = other.memory.total - best.memory.total
        word = f"needs {less / GIB:,.2f} GiB more" if less > 0 else "has more to set up"
        lines.append(f"as fast within 0.01 %, but {word}" if more >= 0 else "as fast within 0.01 %")
        return lines
    lines.append(f"{seconds(abs(more))} {'slower' if more > 0 else 'faster'} a step ({more / best.time.step:+.1%}):")
    changes = {lane: other.time.parts[lane] - best.time.parts[lane] for lane in best.time.parts}
    for lane, change in sorted(changes.items(), key=lambda item: -abs(item[1]))[:4]:
        if abs(change) > 0.02 * abs(more) and change:
            lines.append(f"{seconds(abs(change))} {'more' if change > 0 else 'less'} in {LANES[lane]}")
    return lines


def _found(cases: list[Case], asked: dict[str, Any], *, as_json: bool) -> int:
    """The answer to a question the other way round."""
    from loadgauge.search import questions

    case, how = cases[-1], (asked["objective"], asked["margin"])
    if asked["prices"] is not None:
        answers = questions.cheapest_gpu(case, _prices(asked["prices"]), asked["margin"])
    elif asked["find"] == "seq-len":
        answers = [questions.largest_sequence(case, *how)]
    elif asked["find"] == "micro-batch":
        answers = [questions.largest_micro_batch(case, *how)]
    elif asked["find"] == "gpus":
        answers = [questions.fewest_gpus(case, *how)]
    elif asked["find"] == "nic":
        answers = [questions.smallest_nic(case, asked["exposed"] or 0.1, *how)]
    else:
        answers = [questions.largest_model(case, [resolve(name) for name in catalogue()], *how)]
    if as_json:
        document(
            {
                "answers": [{"text": one.text, "value": one.value, "layout": one.best.to_dict()} for one in answers],
                "assumed": asked["assumed"],
            }
        )
        return 0
    target = console()
    for answer in answers:
        target.print(answer.text[:1].upper() + answer.text[1:] + ".", soft_wrap=True)
    _table(
        target,
        [one.best for one in answers],
        "With the best layout" if len(answers) == 1 else "Each with its best layout",
    )
    return 0


def _prices(text: str) -> dict[str, float]:
    """Prices of kinds of GPU, as in `h100-sxm5-80gb=2.5,a100-sxm4-80gb=1.6`."""
    prices = {}
    for word in text.split(","):
        name, _, price = word.strip().partition("=")
        try:
            prices[name] = float(price)
        except ValueError:
            prices[name] = -1.0
        if not 0 < prices[name] < float("inf"):
            raise ConfigError(f"must be GPU=PRICE,GPU=PRICE, got {word.strip()!r}", key="prices")
    return prices


def _nothing(error: NothingFits, cases: list[Case], asked: dict[str, Any], *, as_json: bool) -> int:
    """The nearest miss and what would make it fit; exit code 1."""
    nearest: Any = error.nearest
    changes = what_would_fit(cases, asked["margin"], asked["objective"])
    if as_json:
        document(
            {
                "objective": asked["objective"], "layouts": [], "pareto": [], "nearest": nearest.to_dict(),
                "missing": error.missing, "changes": [change.to_dict() for change in changes],
                "assumed": asked["assumed"],
            }
        )  # fmt: skip
        return 1
    target = console()
    text = str(error)
    target.print(f"NOTHING FITS  {text}.", soft_wrap=True, style="bold red")
    points(target, [f"The nearest: {flags_of(nearest)}; its peak is {nearest.memory.moment}."], "")
    heading(target, "What would make it fit")
    lines = [change.line() for change in changes]
    points(
        target,
        lines or ["nothing that was tried: offload, an 8-bit optimizer, LoRA, QLoRA, more GPUs, half the length"],
    )
    return 1
