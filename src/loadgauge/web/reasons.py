"""Why a figure of the page is what it is: formula with the user's numbers, the summands, the source.

Nothing is worked out here: every number is one that the estimate has, and a formula only says how they go together, which
`tests/web/test_api_reasons.py` checks by working it out. Memory by parts is explained in `web/explain.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from loadgauge.algebra import same
from loadgauge.errors import ConfigError
from loadgauge.estimate.cost import Budget
from loadgauge.estimate.memory.phases import PARTS
from loadgauge.estimate.result import Estimate
from loadgauge.estimate.time.collectives import bus_factor
from loadgauge.estimate.time.step import Time
from loadgauge.estimate.time.traffic import Traffic
from loadgauge.estimate.workings import TimedOperation
from loadgauge.figures.lanes import KINDS, kind_of, lanes
from loadgauge.figures.network import network
from loadgauge.resolve.setup import Setup
from loadgauge.sources import cite

MOST = 12
"""Summands that are shown one by one; the others together."""
RULES = {
    "matmul": "arithmetic at the rate that products were measured to reach, and bytes at the memory's bandwidth, both counted:"
    " (arithmetic^3 + traffic^3)^(1/3), and the launch of the kernel",
    "attention": "arithmetic of the pairs that are not masked, at the rate that the attention kernel was measured to reach, and"
    " its launch",
    "memory-bound": "bytes read and written, at the share of the memory's bandwidth that such kernels were measured to reach,"
    " and their launches",
    "bubble": "the slowest stage's seconds in the schedule, played through, in which it neither computes nor sends",
    "optimizer": "the states of the weights that this rank updates, read and written once, at the memory's bandwidth; by host and"
    " PCIe where they are offloaded",
}
COLLECTIVE = (
    "calls of the step, each with its latency and its bytes on the slowest link of its group; what overlaps with compute"
    " counts only by what sticks out of it"
)
BUS = {
    "all_reduce": "2 * (n - 1) / n * S",
    "all_gather": "(n - 1) / n * S",
    "reduce_scatter": "(n - 1) / n * S",
    "all_to_all": "(n - 1) / n * S",
}
"""Bytes that one rank of n sends in a collective over S bytes, as `bus_factor` has it."""


class Number(NamedTuple):
    """A number of a formula. unit: s, B, B/s, FLOP, FLOP/s, share, count, tokens, days, hours, money, tokens/s"""

    value: float
    unit: str
    meaning: str


class Step(NamedTuple):
    """A summand. id: of the figure that explains it; note: beside it, such as how often it comes"""

    what: str
    value: float
    unit: str = "s"
    id: str = ""
    note: str = ""


def formula(what: str, letters: str, value: float, unit: str, **numbers: Number) -> dict[str, Any]:
    """Return a formula as plain values. letters: it, in the letters that `numbers` names; value: what it comes to."""
    return {
        "what": what,
        "letters": letters,
        "value": value,
        "unit": unit,
        "numbers": {name: number.value for name, number in numbers.items()},
        "units": {name: number.unit for name, number in numbers.items()},
        "meaning": {name: number.meaning for name, number in numbers.items()},
    }


def reason(given: Setup, result: Estimate, id: str) -> dict[str, Any]:
    """Explain a figure by its id: fit, step, rate, mfu, days, cost, lane/<lane> or network/<axis>/<what>.

    Returns the value and its unit, formulas, summands (`steps`), the rule, notes and sources, as plain values. Raises
    `ConfigError` for a figure that this run does not have.
    """
    name, _, rest = id.partition("/")
    if name == "fit":
        return _fit(result)
    if result.time is None or (name not in WHOLE and name not in OF_STEP):
        raise ConfigError(f"no figure {id[:60]!r} in this run", key="id")
    if name in WHOLE:
        budget = given.budget(result)
        if budget is None or (name == "cost" and budget.price is None):
            raise ConfigError(f"no figure {id[:60]!r} in this run", key="id")
        return WHOLE[name](result, result.time, budget)
    return OF_STEP[name](result, result.time, rest)


def _answer(value: float, unit: str, **more: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"rule": "", "basis": "", "formulas": [], "steps": [], "notes": [], "sources": []}
    steps = [step._asdict() for step in more.pop("steps", ())]
    sources = [{"text": text, "url": _address(text)} for text in more.pop("sources", ())]
    return {**empty, **more, "value": value, "unit": unit, "steps": steps, "sources": sources}


def _address(text: str) -> str | None:
    head, found, end = text.rpartition("(arXiv:")
    return f"https://arxiv.org/abs/{end.rstrip(')')}" if found and head else None


def _fit(result: Estimate) -> dict[str, Any]:
    """The peak as the sum of its parts, against what a program may use of the card."""
    memory = result.memory
    parts = sorted(((memory.parts[part], part) for part in PARTS if memory.parts[part]), reverse=True)
    formulas = []
    if memory.capacity is not None:
        formulas.append(
            formula(
                "left of what the card has",
                "C - M",
                memory.capacity - memory.total,
                "B",
                C=Number(memory.capacity, "B", "what a program may use of the card"),
                M=Number(memory.total, "B", "needed on the worst rank at its peak"),
            )
        )
    return _answer(
        memory.total,
        "B",
        formulas=formulas,
        steps=[Step(part, size, "B", part) for size, part in parts],
        rule="the parts of the worst rank's memory at its peak",
        notes=["80 % of published runs that the range was not made from lie within it"],
    )


# -- a step ---------------------------------------------------------------------------------------------------------------


def _step(result: Estimate, time: Time, _: str) -> dict[str, Any]:
    found = lanes(result) or []
    steps = [Step(f"lane.{lane['lane']}", lane["seconds"], "s", f"lane/{lane['lane']}") for lane in found]
    notes = ["80 % of measured steps lie within the range"]
    if time.scale != 1.0:
        notes.append("every time is rescaled by your measured run")
    return _answer(
        time.step,
        "s",
        steps=[step for step in steps if step.value],
        notes=notes,
        basis=result.basis.get("time", ""),
        rule="what is on the critical path of the slowest stage, end to end",
        sources=_kernels(result),
    )


def _kernels(result: Estimate) -> list[str]:
    """Where the rates of kernels are from."""
    known = result.workings.efficiencies
    if known.basis != "measured":
        return [known.how]
    return [str(cite(key)) for key in dict.fromkeys(key for one in known.figures.values() for key in one.sources)]


def _rate(result: Estimate, time: Time, _: str) -> dict[str, Any]:
    return _answer(
        time.tokens_per_second_per_gpu,
        "tokens/s",
        formulas=[
            formula(
                "tokens a second on each GPU",
                "D / (t * n)",
                time.tokens_per_second_per_gpu,
                "tokens/s",
                D=Number(time.tokens, "tokens", "tokens of a step, over all GPUs"),
                t=_seconds(time),
                n=_gpus(time.gpus),
            )
        ],
    )


def _seconds(time: Time) -> Number:
    return Number(time.step, "s", "seconds of a step")


def _gpus(count: int) -> Number:
    return Number(count, "count", "GPUs")


def _mfu(result: Estimate, time: Time, _: str) -> dict[str, Any]:
    work = {"t": _seconds(time), "n": _gpus(time.gpus)}
    peak = Number(time.peak_flops, "FLOP/s", "peak of one GPU in the format of the products")
    model = Number(time.model_flops, "FLOP", "model FLOPs of a step: forward, and twice that backward")
    hardware = Number(time.hardware_flops, "FLOP", "the same with what is recomputed")
    return _answer(
        time.mfu,
        "share",
        formulas=[
            formula("MFU", "F / (t * n * P)", time.mfu, "share", F=model, **work, P=peak),
            formula("HFU", "H / (t * n * P)", time.hfu, "share", H=hardware, **work, P=peak),
            formula("on each GPU", "F / (t * n)", time.model_flops_per_gpu, "FLOP/s", F=model, **work),
        ],
        sources=[str(cite("chowdhery2022")), str(cite("korthikanti2022"))],
    )


def _lane(result: Estimate, time: Time, lane: str) -> dict[str, Any]:
    found = next((one for one in lanes(result) or [] if one["lane"] == lane), None)
    if found is None:
        raise ConfigError(f"no figure {('lane/' + lane)[:60]!r} in this run", key="id")
    seconds = found["seconds"]
    if lane in KINDS:
        return _compute(result, time, lane, seconds)
    if lane in ("bubble", "optimizer"):
        how = _bubble(result, time) if lane == "bubble" else []
        return _answer(seconds, "s", rule=RULES[lane], formulas=how, basis=result.basis.get("time", ""))
    return _collectives(result, time, [row for row in result.network if row.lane == lane], seconds)


def _compute(result: Estimate, time: Time, kind: str, seconds: float) -> dict[str, Any]:
    """Every operation of one kind, the slowest first; the slowest in numbers."""
    passes = result.workings.passes
    timed = sorted((one for one in result.workings.operations if kind_of(one) == kind), key=lambda one: -one.each)
    whole = sum(one.each for one in timed)
    share = seconds / whole if whole else 0.0
    steps = [Step(f"{one.layer}: {one.operation.name}", one.each * share, note=_often(one)) for one in timed]
    first = timed[0]
    numbers = {
        "m": Number(passes, "count", "micro-batches that the stage works on in a step"),
        "l": Number(first.times, "count", "layers of this kind on the stage"),
        "f": Number(first.seconds.forward, "s", "its forward"),
        "i": Number(first.seconds.input_gradient, "s", "the gradient of its input"),
        "w": Number(first.seconds.weight_gradient, "s", "the gradient of its weight"),
    }
    letters = "f + i + w"
    if first.again:
        numbers["r"] = Number(first.seconds.forward, "s", "its forward again")
        letters += " + r"
    letters = f"m * l * ({letters})"
    if time.scale != 1.0:
        numbers["c"] = Number(time.scale, "share", "measured over predicted seconds of your run")
        letters = f"c * {letters}"
    what = f"the largest, {first.layer}: {first.operation.name}"
    formulas = [formula(what, letters, passes * first.each * time.scale, "s", **numbers)]
    flops = passes * sum(one.times * _flops(one) for one in timed)
    if flops and kind != "memory-bound":
        formulas.append(
            formula(
                "reached over all of them",
                "F / t",
                flops / seconds,
                "FLOP/s",
                F=Number(flops, "FLOP", "FLOPs of these operations on this rank in a step"),
                t=Number(seconds, "s", "their seconds"),
            )
        )
    return _answer(
        seconds,
        "s",
        formulas=formulas,
        steps=shortened(steps),
        rule=RULES[kind],
        basis=result.basis.get("time", ""),
        sources=_kernels(result),
    )


def _often(one: TimedOperation) -> str:
    return f"{one.times:g} x"


def _flops(one: TimedOperation) -> Any:
    """FLOPs of an operation in one micro-batch of one layer, recomputation included."""
    operation = one.operation
    return operation.forward_flops * (2 if one.again else 1) + operation.backward_flops


def shortened(steps: list[Step]) -> list[Step]:
    """The first summands, and the others as one."""
    rest = steps[MOST:]
    more = [Step("all others", sum(step.value for step in rest), rest[0].unit, note=f"{len(rest)} x")] if rest else []
    return steps[:MOST] + more


def _bubble(result: Estimate, time: Time) -> list[dict[str, Any]]:
    """The schedule's seconds, of them what the slowest stage works and sends."""
    clock, scale = result.workings.step, time.scale
    chunks = clock.by_stage
    total, _ = clock.pipeline_seconds(chunks, clock.send_seconds(), time.stage)
    each = sum(chunk.seconds for chunk in chunks[time.stage])
    return [
        formula(
            "idle on the slowest stage",
            "S - m * b - p",
            time.parts["bubble"],
            "s",
            S=Number(float(total) * scale, "s", "from the first forward to the last backward of the schedule"),
            m=Number(float(result.workings.passes), "count", "micro-batches that the stage works on in a step"),
            b=Number(float(each) * scale, "s", "its work on one of them, forward and backward"),
            p=Number(time.parts["pp"], "s", "its sends that nothing hides"),
        )
    ]


def _collectives(result: Estimate, time: Time, rows: list[Traffic], seconds: float) -> dict[str, Any]:
    """The calls of one lane; the largest in numbers."""
    shown = sorted(rows, key=lambda row: -row.seconds)
    steps = [
        Step(
            row.what,
            time.scale * row.exposed_seconds,
            note=f"{row.calls_per_step:g} x {row.collective}, {row.ranks} ranks",
        )
        for row in shown
    ]
    formulas = []
    if shown:
        row = shown[0]
        numbers = {
            "n": Number(float(row.ranks), "count", "ranks of the group"),
            "S": Number(float(row.payload), "B", "bytes of the whole tensor"),
        }
        if row.collective in BUS and same(row.wire, bus_factor(row.collective, row.ranks) * row.payload):
            what = "sent by each rank in one call of the largest"
            formulas.append(formula(what, BUS[row.collective], float(row.wire), "B", **numbers))
        formulas.append(
            formula(
                "of it beside compute",
                "c * (t - e)",
                time.scale * (row.seconds - row.exposed_seconds),
                "s",
                c=Number(time.scale, "share", "measured over predicted seconds of your run"),
                t=Number(float(row.seconds), "s", "all calls of the step"),
                e=Number(float(row.exposed_seconds), "s", "on the critical path"),
            )
        )
    return _answer(
        seconds,
        "s",
        formulas=formulas,
        steps=shortened(steps),
        rule=COLLECTIVE,
        basis=result.basis.get("network", ""),
        sources=[str(cite("nccl-tests")), str(cite("nccl"))],
    )


def _network(result: Estimate, time: Time, rest: str) -> dict[str, Any]:
    """The bandwidth that an axis needs, from the bytes and the seconds it has for them."""
    axis, _, what = rest.partition("/")
    rows: Iterable[dict[str, Any]] = network(result) or ()
    found = next((row for row in rows if row["axis"] == axis and row["what"] == what), None)
    if found is None:
        raise ConfigError(f"no figure {('network/' + rest)[:60]!r} in this run", key="id")
    window = Number(
        found["window_seconds"],
        "s",
        "seconds of compute that it can overlap with"
        if found["overlapped"]
        else "seconds that it may add to the step, 5 % of compute",
    )
    carried = Number(found["bytes_per_step"], "B", "bytes that the link carries in a step, per GPU")
    formulas = []
    if found["window_seconds"]:
        formulas.append(formula("needed", "B / w", found["need"], "B/s", B=carried, w=window))
    if found["seconds"]:
        formulas.append(
            formula(
                "reached, latency included",
                "B / t",
                found["reached"],
                "B/s",
                B=carried,
                t=Number(found["seconds"], "s", "seconds of all its calls"),
            )
        )
    rule = "overlapped communication must end when compute does; other communication may add 5 % of compute"
    return _answer(found["need"], "B/s", formulas=formulas, rule=rule, sources=[str(cite("nccl-tests"))])


OF_STEP: dict[str, Callable[[Estimate, Time, str], dict[str, Any]]] = {
    "step": _step,
    "rate": _rate,
    "mfu": _mfu,
    "lane": _lane,
    "network": _network,
}


# -- the whole run ----------------------------------------------------------------------------------------------------------


def _days(result: Estimate, time: Time, budget: Budget) -> dict[str, Any]:
    tokens = Number(budget.tokens, "tokens", "tokens of the whole run")
    numbers = {"T": tokens, "D": Number(time.tokens, "tokens", "tokens of a step, over all GPUs"), "t": _seconds(time)}
    letters = "T / D * t / 86400"
    notes = []
    if budget.goodput != 1.0:
        numbers["g"] = Number(budget.goodput, "share", "share of time that is progress, failures counted")
        letters = "T / D * t / g / 86400"
        notes.append("time lost to failures, checkpoints and restarts is counted")
    days = Number(budget.days, "days", "days of the whole run")
    return _answer(
        budget.days,
        "days",
        notes=notes,
        formulas=[
            formula("days", letters, budget.days, "days", **numbers),
            formula("GPU-hours", "24 * d * n", budget.gpu_hours, "hours", d=days, n=_gpus(budget.gpus)),
        ],
        sources=[str(cite(key)) for key in (("young1974", "daly2006") if budget.goodput != 1.0 else ())],
    )


def _cost(result: Estimate, time: Time, budget: Budget) -> dict[str, Any]:
    assert budget.cost is not None
    assert budget.price is not None
    return _answer(
        budget.cost,
        "money",
        formulas=[
            formula(
                "cost",
                "24 * d * n * p",
                budget.cost,
                "money",
                d=Number(budget.days, "days", "days of the whole run"),
                n=_gpus(budget.gpus),
                p=Number(budget.price, "money", "your price of a GPU-hour"),
            )
        ],
    )


WHOLE: dict[str, Callable[[Estimate, Time, Budget], dict[str, Any]]] = {"days": _days, "cost": _cost}

FIGURES = frozenset({"fit", *OF_STEP, *WHOLE})
"""What can be asked for, by the first word of its id."""
