"""A whole run on a fleet: a step's estimate, failures, spares, checkpoints and recovery, simulated together."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import msgspec

from loadgauge.core.base import ConfigError, NotStated, Size, above_zero, needs, parse_count, refuse, share
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.states.states import model_states
from loadgauge.core.estimate.time.cost import DAY, HOUR, checkpoint_interval
from loadgauge.fleets.failures import Checkpoint, Failures, Recovery, Span, checkpoint, failures, span
from loadgauge.fleets.load import Load, loads
from loadgauge.fleets.simulate import Outcome, Run, away, capacity, closed_form, simulate

HOST_STORAGE = 2e12 / 3072
"""Byte/s of storage for each host, where none is said: Llama 3's 3,072 hosts sustained 2 TB/s together (source: llama3)."""
HOST_COPY = 25e9
"""Byte/s at which a GPU's state is copied to its host's memory, over half of a PCIe 4 x16 link or better."""
COMPUTE = ("forward", "backward", "recompute", "loss")
RUNS = 1000


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Questions about a fleet, as text; each field is a flag of `loadgauge fleet`."""

    failures: str = "studies"
    spares: str = "1%"
    checkpoint: str = "async"
    storage: str | None = None
    recover: str = "restart"
    detect: str | None = None
    diagnose: str | None = None
    swap: str | None = None
    restart: str | None = None
    repair: str | None = None
    machines: str | None = None
    power_cap: str | None = None
    runs: int = RUNS
    seed: int = 0

    def recovery(self) -> Recovery:
        """Return the times of recovery."""
        refuse(
            self.recover not in ("restart", "elastic", "reroute"),
            f"must be restart, elastic or reroute, got {self.recover!r}",
            key="recover",
        )
        stated: dict[str, Any] = {"way": self.recover}
        for name in ("detect", "diagnose", "swap", "restart"):
            text = getattr(self, name)
            if text is not None:
                stated[name] = span(text, name)
        if self.repair is not None:
            stated["repair"] = span(self.repair, "repair").middle
        return msgspec.structs.replace(Recovery(), **stated)


def hosts_of(text: str, gpus: int, node: int) -> int:
    """Return the number of spare hosts: a number of them, or a share of the job's GPUs. Raises `ConfigError`.

    >>> hosts_of("2%", 16384, 8), hosts_of("20", 16384, 8), hosts_of("0", 8, 8)
    (41, 20, 0)
    """
    try:
        if text.rstrip().endswith("%"):
            return math.ceil(share(text, "spares") * gpus / node) if float(text.rstrip(" %")) else 0
        hosts = int(text)
    except ValueError as error:
        if isinstance(error, ConfigError) and "-" not in text:
            raise
        raise ConfigError(f"must be hosts or a share such as 2%, not below 0, got {text!r}", key="spares") from None
    refuse(hosts < 0, f"must be hosts or a share such as 2%, not below 0, got {text!r}", key="spares")
    return hosts


def state_bytes(result: Estimate) -> float:
    """Return the bytes of a checkpoint: weights, master weights and moments, each once; with adapters theirs alone."""
    training, count = result.training, result.params
    if training.lora is not None:
        workings = result.workings
        rows = ((layer, times) for stage in workings.stages for _, layer, _, times in workings.layers(stage))
        count = sum(
            times * weight.numel * weight.shards
            for layer, times in rows
            for operation in layer
            for weight in operation.weights
            if weight.trainable
        )
    states = model_states(count, training.precision, training.optimizer)
    return float(states.weights + states.optimizer - training.precision.main_gradient * count)


def replica(result: Estimate) -> int:
    """Return the GPUs that stop when one of them does: those of a copy of the model, with all the ranks that hold a part of it."""
    layout = result.layout
    shares = layout.zero == 3 or (layout.zero == 2 and result.training.framework.fully_shards)
    return int(layout.tp * layout.pp * (layout.zero_ranks if shares else layout.cp))


def slowest(sigma: float, hosts: int) -> tuple[float, float]:
    """Return the share by which the slowest of so many hosts is slower (10 and 90 %), their speeds being normal.

    >>> [round(value, 3) for value in slowest(0.01, 2048)]
    [0.032, 0.04]
    """
    usual = NormalDist()
    ends = (usual.inv_cdf(quantile ** (1 / hosts)) * sigma for quantile in (0.1, 0.9))
    low, high = (max(0.0, value / (1 - value)) if value < 1 else math.inf for value in ends)
    return low, high


class Case(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A run on a fleet before it is simulated."""

    run: Run
    tokens: float
    failures: Failures
    checkpoint: Checkpoint
    nbytes: float
    storage: float
    watts: float | None
    assumed: dict[str, str]


class Fleet(Case, frozen=True, kw_only=True):
    """A run on a fleet, and what its simulations say."""

    estimate: Estimate
    options: Options
    outcome: Outcome
    price: float | None = None

    @property
    def gpus(self) -> int:
        """GPUs with the spares."""
        return self.run.gpus + self.run.spares * self.run.node

    @property
    def step(self) -> float:
        """Seconds of a step, as the planner has it."""
        return self.estimate.timing.step

    @property
    def days(self) -> tuple[float, float, float]:
        """Days of the run at 10, 50 and 90 % of the simulated runs."""
        return self.outcome.quantiles(self.outcome.seconds / DAY)

    @property
    def goodput(self) -> tuple[float, float, float]:
        """Share of the time that is progress, at 10, 50 and 90 %."""
        return self.outcome.quantiles(self.outcome.goodput)

    @property
    def names(self) -> dict[str, float]:
        """Share of all seconds of all GPUs, spares too, by `simulate.NAMES`: the mean of the runs."""
        whole = float(self.outcome.seconds.mean())
        return {name: float(values.mean()) / whole for name, values in self.outcome.names.items()}

    @property
    def tokens_per_second(self) -> float:
        """Tokens of progress a second, in the median run."""
        return self.tokens / (self.days[1] * DAY)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours in the median run, spares too."""
        return self.days[1] * 24 * self.gpus

    @property
    def kilowatt_hours(self) -> float | None:
        """Energy at the thermal design power, or the cap, of every GPU but idle spares: an upper bound [kWh]."""
        return None if self.watts is None else self.days[1] * 24 * self.run.gpus * self.watts / 1000

    @property
    def interruptions(self) -> tuple[float, float, float]:
        """Unplanned interruptions of the run, at 10, 50 and 90 %."""
        return self.outcome.quantiles(self.outcome.interruptions)

    @property
    def load(self) -> tuple[Load, ...]:
        """Load of each tier in a step."""
        return loads(self.estimate)

    def again(self, result: Estimate | None = None, runs: int | None = None, **changes: Any) -> Fleet:
        """Return the fleet with other options, on the same draws; changes: fields of `Options`."""
        options = msgspec.structs.replace(self.options, **changes, **({} if runs is None else {"runs": runs}))
        return fleet(result or self.estimate, self.tokens, options, price=self.price)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document: seconds, bytes, byte/s, shares and plain counts."""
        time, run = self.estimate.timing, self.run
        return {
            "model": {"name": self.estimate.model.name},
            "gpu": self.estimate.gpu,
            "gpus": run.gpus,
            "memory": needs(self.estimate.memory),
            "spare_gpus": run.spares * run.node,
            "tokens": self.tokens,
            "step": time.step,
            "steps": self.tokens / time.tokens,
            "days": dict(zip(("p10", "p50", "p90"), self.days, strict=True)),
            "days_without_failures": run.work / DAY,
            "goodput": dict(zip(("p10", "p50", "p90"), self.goodput, strict=True)),
            "interruptions": dict(zip(("p10", "p50", "p90"), self.interruptions, strict=True)),
            "tokens_per_second": self.tokens_per_second,
            "gpu_hours": self.gpu_hours,
            "cost": None if self.price is None else self.price * self.gpu_hours,
            "energy_kwh": self.kilowatt_hours,
            "shares": self.names,
            "failures": {
                "id": self.failures.id,
                "source": list(self.failures.source),
                "per_gpu_hour": [self.failures.low * HOUR, self.failures.high * HOUR],
            },
            "checkpoint": {
                "way": self.checkpoint.way,
                "every": None if math.isinf(run.every) else run.every,
                "stall": run.stall,
                "lag": run.lag,
                "reload": run.reload,
                "bytes": self.nbytes,
                "storage": self.storage,
            },
            "tiers": [msgspec.structs.asdict(load) for load in self.load],
            "runs": self.options.runs,
            "seed": self.options.seed,
            "events": [event._asdict() for event in self.outcome.events[:2000]],
            "assumed": self.assumed,
            "not_counted": list(NOT_COUNTED),
        }


NOT_COUNTED = (
    "restarts because the loss diverged, and changes of the recipe on the way",
    "failures of spare hosts, and of two parts together except those that a switch takes",
    "other jobs on the same network, but for the `congestion` of a tier",
)


def case(result: Estimate, tokens: str | float, options: Options) -> Case:
    """Return the simulated case of an estimate; raises as `fleet` does."""
    time, cluster = result.time, result.cluster
    if time is None or cluster is None:
        raise NotStated(result.untimed or "a fleet needs a GPU whose step has a time")
    total = parse_count(tokens, "tokens") if isinstance(tokens, str) else tokens
    refuse(total < time.tokens, f"{total:,.0f} are less than the {time.tokens:,.0f} of one step", key="tokens")
    gpus, node = cluster.gpus, cluster.gpus_per_node
    hosts = math.ceil(gpus / node)
    work = total / time.tokens * time.step
    rates, saved = failures(options.failures), checkpoint(options.checkpoint)
    nbytes = state_bytes(result)
    assumed: dict[str, str] = {}
    storage = HOST_STORAGE * hosts
    if options.storage is not None:
        storage = above_zero(options.storage, "storage", "byte/s", "a bandwidth such as 2TB/s")
    elif saved.way != "none":
        assumed["--storage"] = f"{storage / 1e9:,.0f} GB/s (0.65 GB/s a host, as Llama 3's)"
    stall, lag, reload = _saving(result, saved, nbytes, storage)
    every = _interval(saved, stall, lag, rates, gpus, time.step, work)
    if saved.every is None and math.isfinite(every):
        assumed["--checkpoint"] = f"{saved.way}:{every / 60:.3g}min (what loses least, in whole steps)"
    slow, watts = _slow(result, options, hosts)
    if options.machines is None:
        assumed["--machines"] = "0% (all as fast as the measured ones)"
    run = Run(
        work=work,
        gpus=gpus,
        node=node,
        spares=hosts_of(options.spares, gpus, node),
        every=every,
        stall=stall,
        lag=lag,
        reload=reload,
        storage=saved.storage if saved.way == "memory" else 0.0,
        group=replica(result),
        slow=slow,
        failures=rates,
        recovery=_recovery(result, options),
    )
    return Case(
        run=run,
        tokens=total,
        failures=rates,
        checkpoint=saved,
        nbytes=nbytes,
        storage=storage,
        watts=watts,
        assumed=assumed,
    )


def _recovery(result: Estimate, options: Options) -> Recovery:
    """The times of recovery; optical circuit switches put a spare block in the place of a broken one as fast as they turn."""
    recovery, cluster = options.recovery(), result.cluster
    if options.swap is None and cluster is not None and cluster.topology is not None:
        turned = max(tier.reconfigure for tier in cluster.topology.tiers)
        if turned:
            return msgspec.structs.replace(recovery, swap=Span(turned, turned))
    return recovery


USUAL = Options(recover="elastic")
"""The fleet that a plan assumes."""


def steady(result: Estimate, options: Options | None) -> float:
    """Return the tokens of progress a second by the closed form, without simulating: to rank layouts by. None: `USUAL`"""
    long = 1000 * DAY / result.timing.step * result.timing.tokens
    return closed_form(case(result, long, options or USUAL).run) * result.timing.tokens / result.timing.step


def replicas_left(options: Options | None, gpus: int, node: int) -> Callable[[Size], Size]:
    """Return a function from the GPUs of a replica to the mean share of replicas that work; it takes arrays. None: `USUAL`"""
    options = options or USUAL
    run = Run(
        work=1.0,
        gpus=gpus,
        node=node,
        spares=hosts_of(options.spares, gpus, node),
        failures=failures(options.failures),
        recovery=options.recovery(),
    )
    lacking = away(run) if run.failures.parts else 0.0
    return lambda group: capacity(run, lacking, group)


def fleet(result: Estimate, tokens: str | float, options: Options, *, price: float | None = None) -> Fleet:
    """Simulate a run of `tokens` on the fleet of an estimate.

    Raises `ConfigError` for options that cannot be, `NotStated` without a step time.

    >>> import loadgauge
    >>> step = loadgauge.estimate("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=64, tp=2, zero=1, global_batch=256)
    >>> found = fleet(step, "1T", Options(failures="none", checkpoint="none", spares="0", runs=2))
    >>> abs(found.days[1] / (1e12 / step.time.tokens * step.time.step / 86400) - 1) < 1e-12
    True
    """
    simulated = case(result, tokens, options)
    outcome = simulate(simulated.run, options.runs, options.seed)
    return Fleet(**msgspec.structs.asdict(simulated), estimate=result, options=options, outcome=outcome, price=price)


def _saving(result: Estimate, saved: Checkpoint, nbytes: float, storage: float) -> tuple[float, float, float]:
    """For how long all wait for a checkpoint, after how long it can be read, and how long reading it takes [s]."""
    cluster = result.cluster
    assert cluster is not None
    each = nbytes / cluster.gpus
    if saved.way == "none":
        return 0.0, 0.0, 0.0
    if saved.way == "memory":
        # To a peer's host, over the adapter (source: wang2023gemini).
        sent = each / cluster.links[-1].bandwidth
        return each / HOST_COPY, sent, sent
    whole = nbytes / storage
    return (whole, 0.0, whole) if saved.way == "sync" else (each / HOST_COPY, whole, whole)


def _interval(
    saved: Checkpoint, stall: float, lag: float, rates: Failures, gpus: int, step: float, work: float
) -> float:
    """Seconds of work between checkpoints, in whole steps: the next one begins when the last is written."""
    if saved.way == "none" or (saved.every is None and not rates.rate):
        return math.inf
    every = saved.every
    if every is None:
        every = max(checkpoint_interval(stall, 1 / (rates.rate * rates.unplanned() * gpus)), lag)
    whole = max(1, round(every / step)) * step
    if saved.every is None:
        return min(whole, work)
    refuse(
        saved.every > work,
        f"every {saved.every / HOUR:.3g} h is longer than the run of {work / HOUR:.3g} h",
        key="checkpoint",
    )
    return min(whole, work)


def _slow(result: Estimate, options: Options, hosts: int) -> tuple[tuple[float, float], float | None]:
    """By how much machines and a power cap slow a step down, and the watts of a GPU."""
    time = result.timing
    low = high = 0.0
    if options.machines is not None and float(options.machines.rstrip(" %")) != 0:
        low, high = slowest(share(options.machines, "machines"), hosts)
        refuse(
            not math.isfinite(high),
            f"{options.machines} of {hosts:,} hosts leave one that does not move",
            key="machines",
        )
    watts = time.tdp
    if options.power_cap is not None:
        cap = share(options.power_cap, "power_cap")
        # Dynamic power goes with frequency times voltage squared, and voltage with frequency: the cube.
        more = (cap ** (-1 / 3) - 1) * sum(time.parts.get(name, 0.0) for name in COMPUTE) / time.step
        low, high = low + more, high + more
        watts = None if watts is None else watts * cap
    return (low, high), watts
