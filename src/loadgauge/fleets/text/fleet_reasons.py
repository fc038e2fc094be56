"""`loadgauge fleet --explain`: each number of a fleet's answer, as formulas with the run's numbers in them."""

import math

from loadgauge.core.answers.why.reason import Line, Reason, line
from loadgauge.core.base.errors import ConfigError, refuse, suggest
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


def reason(result: Fleet, topic: str) -> Reason:
    """Return why a number is what it is. Raises `ConfigError` for an unknown topic."""
    run, time = result.run, result.estimate.timing
    lines: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()
    name = topic.replace("-", " ")
    if name in NAMES:
        share = result.names[name]
        return Reason(
            topic=topic,
            what=WORDS[name],
            value=share,
            unit="share",
            basis=SIMULATED,
            rule=f"mean over {result.options.runs:,} runs of its seconds times GPUs, over all of the fleet's",
            columns=("a second of a GPU is", "share"),
            rows=tuple((key, value) for key, value in result.names.items()),
            notes=("The shares of all names add up to 1.",),
        )
    if topic == "days":
        steps = line(
            "Steps alone",
            "T / D * t",
            run.work,
            "s",
            {
                "T": ("tokens of the run", result.tokens),
                "D": ("tokens of a step", time.tokens),
                "t": ("seconds of a step", time.step),
            },
        )
        return Reason(
            topic=topic,
            what="median of the simulated runs",
            value=result.days[1],
            unit="days",
            basis=SIMULATED,
            rule="steps over goodput, run by run",
            lines=(steps,),
            columns=("of the runs", "days"),
            rows=tuple(zip(("10 %", "50 %", "90 %"), result.days, strict=True)),
            see=("--explain goodput",),
        )
    if topic == "goodput":
        notes = (f"By the closed form, with all in the middle of its range: {closed_form(run):.2%} (daly2006).",)
        return Reason(
            topic=topic,
            what="share of the time that is progress, median",
            value=result.goodput[1],
            unit="share",
            basis=SIMULATED,
            rule="seconds of steps that count over all seconds, failure by failure",
            columns=("a second of a GPU is", "share"),
            rows=tuple(result.names.items()),
            notes=notes,
            sources=("daly2006", *result.failures.source),
        )
    if topic == "failures":
        rate = result.failures.rate * result.failures.unplanned()
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
        rows = tuple((part.name, result.failures.share(part), part.needs) for part in result.failures.parts)
        return Reason(
            topic=topic,
            what=result.failures.name,
            value=result.interruptions[1],
            unit="interruptions",
            basis="published",
            rule="exponential times between failures, with the sum of all GPUs' rates; each run draws its rate from the range",
            lines=lines,
            columns=("what", "share", "needs"),
            rows=rows,
            sources=result.failures.source,
        )
    if topic == "checkpoint":
        each = result.nbytes / run.gpus
        lines = (
            line(
                "Time to write it",
                "B / S",
                result.nbytes / result.storage,
                "s",
                {"B": ("bytes of the state", result.nbytes), "S": ("bandwidth of the storage", result.storage)},
            ),
        )
        mean = (
            math.inf
            if not result.failures.rate
            else 1 / (run.gpus * result.failures.rate * result.failures.unplanned())
        )
        if result.options.checkpoint in ("sync",) and math.isfinite(mean):
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
            what=f"{result.checkpoint.way}, seconds of work between two",
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
                result.tokens_per_second,
                "tokens/s",
                {"T": ("tokens of the run", result.tokens), "d": ("days of the median run", result.days[1])},
            ),
        )
        return Reason(
            topic=topic,
            what="of the median run",
            value=result.tokens_per_second,
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
                result.gpu_hours,
                "h",
                {"d": ("days, median", result.days[1]), "n": ("GPUs, spares too", result.gpus)},
            ),
        )
        if topic == "gpu-hours":
            return Reason(
                topic=topic,
                what="of the median run",
                value=result.gpu_hours,
                unit="GPU-hours",
                basis=SIMULATED,
                rule="days times GPUs",
                lines=lines,
            )
        if result.price is None:
            raise ConfigError("needs --price, that of a GPU-hour", key="explain")
        lines += (
            line(
                "Money",
                "h * p",
                result.price * result.gpu_hours,
                "money",
                {"h": ("GPU-hours", result.gpu_hours), "p": ("price of one", result.price)},
            ),
        )
        return Reason(
            topic=topic,
            what="of the median run",
            value=result.price * result.gpu_hours,
            unit="money",
            basis=SIMULATED,
            rule="GPU-hours times their price",
            lines=lines,
        )
    if topic == "energy":
        if result.watts is None or result.kilowatt_hours is None:
            raise ConfigError("no source states the power of this GPU", key="explain")
        lines = (
            line(
                "Energy",
                "d * 24 * n * w / 1000",
                result.kilowatt_hours,
                "kWh",
                {"d": ("days, median", result.days[1]), "n": ("GPUs", run.gpus), "w": ("watts of one", result.watts)},
            ),
        )
        return Reason(
            topic=topic,
            what="an upper bound, without hosts and cooling",
            value=result.kilowatt_hours,
            unit="kWh",
            basis="datasheet",
            rule="power times time",
            lines=lines,
        )
    if topic == "tiers":
        refuse(not result.load, "needs --topology, and more than one node", key="explain")
        done = together(result.load)
        notes = tuple(
            f"{axis}: {value:.3g} s, if all axes sent at once from the start and shared links fairly"
            for axis, value in done.items()
        )
        return Reason(
            topic=topic,
            what="share of a step that a GPU's part of the busiest tier carries bytes",
            value=max(load.busy for load in result.load),
            unit="share",
            basis="derived",
            rule="bytes that leave a unit below, over the shares of its GPUs in the links",
            columns=("tier", "GB a step", "GB/s", "busy"),
            rows=tuple((load.tier, load.carried / 1e9, load.bandwidth / 1e9, load.busy) for load in result.load),
            notes=notes,
            sources=("bertsekas1992",),
        )
    topics = (*TOPICS, *(key.replace(" ", "-") for key in NAMES))
    raise ConfigError(
        f"nothing called {topic!r}{suggest(topic, topics) or ' (topics: ' + ', '.join(topics) + ')'}", key="explain"
    )
