"""`loadgauge fleet --explain`: each number of a fleet's answer, as formulas with the run's numbers in them."""

from __future__ import annotations

import math

from loadgauge.core.answers.why.reason import Line, Reason, line
from loadgauge.core.base.errors import ConfigError, suggest
from loadgauge.fleets.fleet import Fleet
from loadgauge.fleets.load import together
from loadgauge.fleets.simulate import NAMES, closed_form

SIMULATED = "simulated"
WORDS = {
    "progress": "steps that count", "slow machines": "all wait for the slowest machine, or for capped power",
    "without a replica": "capacity that is lacking while a replica has no host", "checkpoints": "all wait for a copy of the state",
    "work done twice": "since the last checkpoint that could be read", "noticing": "until a failure is noticed",
    "diagnosing": "until it is known which host failed", "swapping hosts": "until a spare is in its place",
    "waiting for a host": "no spare is left, until one is repaired", "restarting": "processes connect, and read the checkpoint",
    "warming up": "until steps are as fast as before", "maintenance": "planned stops", "idle spares": "hosts that stand ready",
}  # fmt: skip
TOPICS = ("days", "goodput", "failures", "checkpoint", "tokens-per-second", "gpu-hours", "money", "energy", "tiers")


def reason(found: Fleet, topic: str) -> Reason:
    """Return why a number is what it is. Raises `ConfigError` for an unknown topic."""
    run, time = found.run, found.estimate.timing
    lines: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()
    name = topic.replace("-", " ")
    if name in NAMES:
        share = found.names[name]
        return Reason(
            topic=topic,
            what=WORDS[name],
            value=share,
            unit="share",
            basis=SIMULATED,
            rule=f"mean over {found.options.runs:,} runs of its seconds times GPUs, over all of the fleet's",
            columns=("a second of a GPU is", "share"),
            rows=tuple((one, value) for one, value in found.names.items()),
            notes=("The shares of all names add up to 1.",),
        )
    if topic == "days":
        steps = line(
            "Steps alone",
            "T / D * t",
            run.work,
            "s",
            {
                "T": ("tokens of the run", found.tokens),
                "D": ("tokens of a step", time.tokens),
                "t": ("seconds of a step", time.step),
            },
        )
        return Reason(
            topic=topic,
            what="median of the simulated runs",
            value=found.days[1],
            unit="days",
            basis=SIMULATED,
            rule="steps over goodput, run by run",
            lines=(steps,),
            columns=("of the runs", "days"),
            rows=tuple(zip(("10 %", "50 %", "90 %"), found.days, strict=True)),
            see=("--explain goodput",),
        )
    if topic == "goodput":
        notes = (f"By the closed form, with all in the middle of its range: {closed_form(run):.2%} (daly2006).",)
        return Reason(
            topic=topic,
            what="share of the time that is progress, median",
            value=found.goodput[1],
            unit="share",
            basis=SIMULATED,
            rule="seconds of steps that count over all seconds, failure by failure",
            columns=("a second of a GPU is", "share"),
            rows=tuple(found.names.items()),
            notes=notes,
            sources=("daly2006", *found.failures.source),
        )
    if topic == "failures":
        rate = found.failures.rate * found.failures.unplanned()
        if rate:
            lines = (
                line(
                    "Time between interruptions of the job",
                    "1 / (n * r)",
                    1 / (run.gpus * rate),
                    "s",
                    {
                        "n": ("GPUs", run.gpus),
                        "r": ("interruptions of a GPU and second, in the middle of the range", rate),
                    },
                ),
            )
        rows = tuple((part.name, found.failures.share(part), part.needs) for part in found.failures.parts)
        return Reason(
            topic=topic,
            what=found.failures.name,
            value=found.interruptions[1],
            unit="interruptions",
            basis="published",
            rule="exponential times between failures, with the sum of all GPUs' rates; each run draws its rate from the range",
            lines=lines,
            columns=("what", "share", "needs"),
            rows=rows,
            sources=found.failures.source,
        )
    if topic == "checkpoint":
        each = found.nbytes / run.gpus
        lines = (
            line(
                "Time to write it",
                "B / S",
                found.nbytes / found.storage,
                "s",
                {"B": ("bytes of the state", found.nbytes), "S": ("bandwidth of the storage", found.storage)},
            ),
        )
        mean = (
            math.inf if not found.failures.rate else 1 / (run.gpus * found.failures.rate * found.failures.unplanned())
        )
        if found.options.checkpoint in ("sync",) and math.isfinite(mean):
            lines += (
                line(
                    "Interval that loses least",
                    "(2 * C * M) ** 0.5",
                    math.sqrt(2 * run.stall * mean),
                    "s",
                    {"C": ("seconds that all wait", run.stall), "M": ("seconds between failures", mean)},
                ),
            )
        notes = (
            f"All wait {run.stall:.3g} s for it; it can be read after another {run.lag:.3g} s; reading takes {run.reload:.3g} s.",
            f"One GPU's part has {each / 1e9:.3g} GB. The interval is a whole number of steps, and no shorter than writing takes.",
        )
        return Reason(
            topic=topic,
            what=f"{found.checkpoint.way}, seconds of work between two",
            value=None if math.isinf(run.every) else run.every,
            unit="s",
            basis="derived",
            rule="young1974, in whole steps",
            lines=lines,
            notes=notes,
            sources=("young1974",),
        )
    if topic == "tokens-per-second":
        lines = (
            line(
                "Tokens of progress a second",
                "T / (d * 86400)",
                found.tokens_per_second,
                "tokens/s",
                {"T": ("tokens of the run", found.tokens), "d": ("days of the median run", found.days[1])},
            ),
        )
        return Reason(
            topic=topic,
            what="of the median run",
            value=found.tokens_per_second,
            unit="tokens/s",
            basis=SIMULATED,
            rule="tokens over time",
            lines=lines,
        )
    if topic in ("gpu-hours", "money"):
        lines = (
            line(
                "GPU-hours",
                "d * 24 * n",
                found.gpu_hours,
                "h",
                {"d": ("days, median", found.days[1]), "n": ("GPUs, spares too", found.gpus)},
            ),
        )
        if topic == "gpu-hours":
            return Reason(
                topic=topic,
                what="of the median run",
                value=found.gpu_hours,
                unit="GPU-hours",
                basis=SIMULATED,
                rule="days times GPUs",
                lines=lines,
            )
        if found.price is None:
            raise ConfigError("goes with --price, that of a GPU-hour", key="explain")
        lines += (
            line(
                "Money",
                "h * p",
                found.price * found.gpu_hours,
                "money",
                {"h": ("GPU-hours", found.gpu_hours), "p": ("price of one", found.price)},
            ),
        )
        return Reason(
            topic=topic,
            what="of the median run",
            value=found.price * found.gpu_hours,
            unit="money",
            basis=SIMULATED,
            rule="GPU-hours times their price",
            lines=lines,
        )
    if topic == "energy":
        if found.watts is None or found.kilowatt_hours is None:
            raise ConfigError("no source states the power of this GPU", key="explain")
        lines = (
            line(
                "Energy",
                "d * 24 * n * w / 1000",
                found.kilowatt_hours,
                "kWh",
                {"d": ("days, median", found.days[1]), "n": ("GPUs", run.gpus), "w": ("watts of one", found.watts)},
            ),
        )
        return Reason(
            topic=topic,
            what="an upper bound, without hosts and cooling",
            value=found.kilowatt_hours,
            unit="kWh",
            basis="datasheet",
            rule="power times time",
            lines=lines,
        )
    if topic == "tiers":
        if not found.load:
            raise ConfigError("needs --topology, and more than one node", key="explain")
        done = together(found.load)
        notes = tuple(
            f"{axis}: {value:.3g} s, if all axes sent at once from the start and shared links fairly"
            for axis, value in done.items()
        )
        return Reason(
            topic=topic,
            what="share of a step that a GPU's part of the busiest tier carries bytes",
            value=max(load.busy for load in found.load),
            unit="share",
            basis="derived",
            rule="bytes that leave a unit below, over the shares of its GPUs in the links",
            columns=("tier", "GB a step", "GB/s", "busy"),
            rows=tuple((load.tier, load.carried / 1e9, load.bandwidth / 1e9, load.busy) for load in found.load),
            notes=notes,
            sources=("bertsekas1992",),
        )
    known = (*TOPICS, *(one.replace(" ", "-") for one in NAMES))
    raise ConfigError(
        f"nothing called {topic!r}{suggest(topic, known) or ' (known: ' + ', '.join(known) + ')'}", key="explain"
    )
