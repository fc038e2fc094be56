"""Whole runs, from failure to failure, thousands of them at once.

The fleet is a group: what is drawn is when the next of all its GPUs fails (exponentially, with the sum of their rates), not which.
A run is a row of every array; one turn of the loop takes each from one failure to the next. Failures may hit while it recovers.
Every second that passes gets one of `NAMES`, for each GPU of the fleet.

The generator is numpy's PCG64; its exponentials come from integers and tables, so that a seed gives the same runs again.
"""

import math
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base import ConfigError, Size, lists, maximum, refuse
from loadgauge.core.estimate.time.cost import goodput
from loadgauge.fleets.failures import Failures, Recovery

NAMES = (
    "progress", "slow machines", "without a replica", "checkpoints", "work done twice", "noticing", "diagnosing", "swapping hosts",
    "waiting for a host", "restarting", "warming up", "maintenance", "idle spares",
)  # fmt: skip
"""Uses of a GPU-second."""
SUMS = (*NAMES, "seconds", "done", "interruptions")
"""Figures of each run that are added up from failure to failure."""
MOST_FAILURES = 8000
"""Of one run, on average: of a longer one a part is simulated, and the rest goes on as that part did."""
MOST_TURNS = 10 * MOST_FAILURES
LEAST = 0.01
"""Share of progress below which a run is given up: it will not end."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run to simulate.

    work: seconds of steps that it takes without a failure; gpus, node: of the job, and of a host; spares: hosts beside them
    every, stall, lag: seconds of work between checkpoints (infinite: none), for which all wait, and after which one can be read
    reload: seconds to read a checkpoint; storage: seconds between checkpoints that outlive their peers' memory (0: all do)
    group: GPUs of a replica of the model; slow: the share by which the slowest of all machines is slower, in the middle of runs:
    (low, high) of a range of which each run has one
    """

    work: float
    gpus: int
    node: int = 8
    spares: int = 0
    every: float = math.inf
    stall: float = 0.0
    lag: float = 0.0
    reload: float = 0.0
    storage: float = 0.0
    group: int = 1
    slow: tuple[float, float] = (0.0, 0.0)
    failures: Failures
    recovery: Recovery = Recovery()

    def __post_init__(self) -> None:
        refuse(self.spares < 0, "cannot be below 0", key="spares")
        refuse(
            not (self.work > 0 and self.every > 0 and min(self.stall, self.lag, self.reload) >= 0),
            "work and intervals must be positive, times not negative",
            key="run",
        )
        refuse(
            math.isfinite(self.every) and self.every > self.work,
            f"every {self.every / 3600:.3g} h is longer than the run of {self.work / 3600:.3g} h",
            key="checkpoint",
        )


class Event(NamedTuple):
    """A failure of one run: when [s], the cause, work thrown away, and seconds until it runs again."""

    at: float
    cause: str
    redone: float
    down: float


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated runs. seconds: each run's; names: by `NAMES`, each run's seconds times GPUs, over those of the fleet

    interruptions: unplanned ones; work: seconds of steps of each; events: of the first run
    """

    seconds: Any
    names: dict[str, Any]
    interruptions: Any
    work: Any
    events: tuple[Event, ...] = ()

    @property
    def goodput(self) -> Any:
        """Share of the time that is progress, of each run; spares count as part of no run."""
        return self.work / self.seconds

    def quantiles(self, values: Any) -> tuple[float, float, float]:
        """Return what 10, 50 and 90 % of the runs do not exceed."""
        import numpy

        low, middle, high = map(float, numpy.quantile(values, (0.1, 0.5, 0.9)))
        return low, middle, high


class _Classes(NamedTuple):
    """Causes that are treated alike: where each ends on a line from 0 to 1, and what they need."""

    ends: Any
    host: Any
    planned: Any
    wide: Any
    silent: Any
    names: list[list[tuple[str, float]]]


def _classes(numpy: Any, failures: Failures) -> _Classes:
    together = lists(
        ((part.needs, part.wide, part.silent_hours * 3600), (part.name, failures.share(part)))
        for part in failures.parts
    )
    ends = numpy.cumsum([sum(share for _, share in named) for named in together.values()])[:-1]
    keys = list(together)
    return _Classes(
        ends,
        numpy.array([kind[0] == "host" for kind in keys]),
        numpy.array([kind[0] == "maintenance" for kind in keys]),
        numpy.array([kind[1] for kind in keys]),
        numpy.array([kind[2] for kind in keys]),
        list(together.values()),
    )


def broken(run: Run) -> float:
    """Return the mean number of broken hosts, while the job runs: those that break in the time of a repair."""
    return run.gpus * run.failures.rate * run.failures.of_hosts * run.recovery.repair


def away(run: Run) -> float:
    """Return the mean number of hosts that the job lacks where it goes on without them: a Poisson count, less the spares.

    >>> from loadgauge.fleets.failures import failures
    >>> round(away(Run(work=1e6, gpus=16384, spares=12, failures=failures("llama3"))), 3)
    1.313
    """
    mean = broken(run)
    lacking, chance = 0.0, math.exp(-mean) if mean < 700 else 0.0
    if not chance:
        return max(0.0, mean - run.spares)
    for hosts in range(int(mean + 12 * math.sqrt(mean) + 12)):
        lacking += chance * max(0, hosts - run.spares)
        chance *= mean / (hosts + 1)
    return lacking


def without_a_spare(mean: float, spares: int) -> float:
    """Return the share of failures that find no spare where the job then stands still: Erlang's loss formula (source: erlang1917).

    >>> round(without_a_spare(2.0, 1), 4), without_a_spare(2.0, 0)
    (0.6667, 1.0)
    """
    lost = 1.0
    for number in range(1, spares + 1):
        lost = mean * lost / (number + mean * lost)
    return lost


def capacity(run: Run, lacking: float, group: Size) -> Size:
    """Return the share of the replicas that work while so many hosts are lacking. group: GPUs of a replica

    >>> from loadgauge.fleets.failures import NONE
    >>> job = Run(work=1.0, gpus=16384, failures=NONE, recovery=Recovery(way="elastic"))
    >>> capacity(job, 2, 128), capacity(job, 2, 1024)
    (0.984375, 0.875)
    """
    if run.recovery.way == "restart":
        return 1.0
    if run.recovery.way == "reroute":
        fewer = lacking / maximum(1, group / run.node)
    else:
        fewer = lacking * maximum(1, run.node / group)
    return maximum(1 - fewer * group / run.gpus, group / run.gpus)


def closed_form(run: Run) -> float:
    """Return the share of progress by daly2006, with every rate and time in the middle of its range.

    Beside Daly's: the hosts that are away, for which all wait or without which the others go on.
    """
    recovery, whole = run.recovery, run.failures
    slow = 1 / (1 + sum(run.slow) / 2)
    rate = run.gpus * whole.rate * whole.unplanned()
    planned = run.gpus * whole.rate - rate
    kept = slow / (1 + planned * recovery.maintenance.middle)
    if not rate:
        return kept * (run.every / (run.every + run.stall) if math.isfinite(run.every) else 1.0)
    if recovery.way == "restart":
        spans = (recovery.detect, recovery.diagnose, recovery.swap, recovery.restart, recovery.warm)
        down = sum(span.middle for span in spans) + run.reload
        hosts = whole.of_hosts * run.gpus * whole.rate
        if hosts:
            kept /= 1 + hosts * without_a_spare(broken(run), run.spares) * recovery.repair / (run.spares + 1)
    else:
        down = recovery.detect.middle + recovery.regroup.middle + recovery.warm.middle
        kept *= float(capacity(run, away(run), run.group))
    return kept * goodput(run.stall, 1 / rate, down, min(run.every, run.work))


def simulate(run: Run, runs: int = 1000, seed: int = 0, horizon: float | None = None) -> Outcome:
    """Simulate a run so many times, until its work is done or, with a `horizon` [s], until then.

    Raises `ConfigError` where the failures leave no time for progress.

    >>> from loadgauge.fleets.failures import NONE
    >>> simulate(Run(work=1000.0, gpus=8, failures=NONE), 2).seconds.tolist()
    [1000.0, 1000.0]
    """
    refuse(runs < 1, "must be at least 1", key="runs")
    refuse(horizon is None and closed_form(run) < LEAST, "with these failures no progress is ever made", key="failures")
    expected = run.gpus * run.failures.rate * (run.work * 1.5 if horizon is None else horizon)
    part = max(1.0, expected / MOST_FAILURES)
    if part > 1:
        work = max(run.work / part, run.every if math.isfinite(run.every) else 0.0)
        part = run.work / work if horizon is None else part
        run = msgspec.structs.replace(run, work=work)
        horizon = None if horizon is None else horizon / part
    return _Simulation(run, runs, seed, horizon).go(part)


class _Simulation:
    """The arrays of all runs that are not done, and the sums of all."""

    def __init__(self, run: Run, runs: int, seed: int, horizon: float | None) -> None:
        import numpy

        self.np, self.run, self.runs, self.horizon = numpy, run, runs, horizon
        self.rng = numpy.random.Generator(numpy.random.PCG64(seed))
        recovery, drawn = run.recovery, self.rng.random((8, runs))

        def of(span: Any, row: int) -> Any:
            return span.low + (span.high - span.low) * drawn[row]

        self.elastic = recovery.way != "restart"
        self.rate = run.gpus * (run.failures.low + (run.failures.high - run.failures.low) * drawn[0])
        self.detect = of(recovery.detect, 1)
        self.diagnose = numpy.zeros(runs) if self.elastic else of(recovery.diagnose, 2)
        self.swap = numpy.zeros(runs) if self.elastic else of(recovery.swap, 3)
        self.restart = of(recovery.regroup, 4) if self.elastic else of(recovery.restart, 4) + run.reload
        self.warm = of(recovery.warm, 5)
        self.maintenance = of(recovery.maintenance, 6)
        self.slow = 1 / (1 + run.slow[0] + (run.slow[1] - run.slow[0]) * drawn[7])
        self.total = {name: numpy.zeros(runs) for name in SUMS}
        self.events: list[Event] = []
        # Few hosts are ever away at once where failures are rare; then nobody counts them.
        self.classes = _classes(numpy, run.failures) if run.failures.parts else None
        hosts = run.gpus * run.failures.high * run.failures.of_hosts * recovery.repair
        self.counts_hosts = run.spares < hosts + 8 * math.sqrt(hosts) + 8 and hosts > 0

    def go(self, part: float) -> Outcome:
        """Simulate; what comes out is `part` times as long as what is simulated."""
        if self.classes is None:
            self._untroubled()
        else:
            self._loop()
        return self._outcome(part)

    def _untroubled(self) -> None:
        run, np = self.run, self.np
        if self.horizon is None:
            work = np.full(self.runs, run.work)
            wall = work / self.slow
            saved = np.maximum(np.ceil(wall / run.every) - 1, 0) * run.stall
        else:
            cycle = run.every + run.stall
            saved = np.floor(self.horizon / cycle) * run.stall + np.zeros(self.runs)
            wall = self.horizon - saved
            work = wall * self.slow
        self.total |= {"progress": work, "slow machines": wall - work, "checkpoints": saved}
        self.total |= {"done": work, "seconds": wall + saved}

    def _loop(self) -> None:
        run, np, rng, classes = self.run, self.np, self.rng, self.classes
        assert classes is not None
        every, stall, lag = run.every, run.stall, run.lag
        cycle = every + stall
        replicas = max(1, run.gpus // run.group)
        each = max(1, run.node // run.group)
        stages = max(1, run.group // run.node)
        live = np.arange(self.runs)
        fields = ("rate", "detect", "diagnose", "swap", "restart", "warm", "maintenance", "slow")
        mine = {name: getattr(self, name) for name in fields}
        left = np.full(self.runs, run.work if self.horizon is None else np.inf)
        down = np.zeros(self.runs)
        kind = np.zeros(self.runs, dtype=np.intp)
        out = np.zeros(self.runs)
        capacity = np.ones(self.runs)
        sums = {name: np.zeros(self.runs) for name in SUMS}
        for _ in range(MOST_TURNS):
            wait = rng.standard_exponential(len(live)) / mine["rate"]
            ends = None
            if self.horizon is not None:
                ends = wait >= self.horizon - sums["seconds"]
                wait = np.where(ends, self.horizon - sums["seconds"], wait)
            up = wait - down
            cut = np.flatnonzero(up < 0)
            spent = down
            if len(cut):
                spent = np.minimum(down, wait)
                self._shorten(sums, mine, cut, (down - wait)[cut], kind, classes)
                up = np.maximum(up, 0.0)
            speed = mine["slow"] * capacity
            saved = np.floor(up / cycle)
            kept = saved if not lag else np.minimum(np.maximum(np.floor((up - lag) / cycle), 0.0), saved)
            # A planned stop and the end of what is watched save first.
            cause = classes.ends.searchsorted(rng.random(len(live)), side="right")
            calm = classes.planned[cause] if ends is None else classes.planned[cause] | ends
            working = up - saved * stall
            useful = np.where(calm, working, kept * every if math.isfinite(every) else 0.0)
            need = left / speed
            finish = need + np.maximum(np.ceil(need / every) - 1, 0.0) * stall
            over = finish <= up
            useful = np.where(over, need, useful)
            saved = np.where(over, np.maximum(np.ceil(need / every) - 1, 0.0), saved)
            lost = np.where(over, 0.0, working - useful)
            passed = np.where(over, spent + finish, wait)
            gained = useful * speed
            left = left - gained
            sums["progress"] += gained
            sums["slow machines"] += useful * (capacity - speed)
            sums["without a replica"] += useful * (1 - capacity)
            sums["checkpoints"] += saved * stall
            sums["work done twice"] += lost
            sums["seconds"] += passed
            sums["done"] += gained
            stop = over if ends is None else over | ends
            failed = ~stop
            planned = classes.planned[cause] & failed
            unplanned = failed & ~classes.planned[cause]
            sums["interruptions"] += unplanned
            again = self._thrown_away(sums, live, cause, unplanned, classes)
            if again is not None:
                left = left + again
                lost = lost + again
            host = classes.host[cause] & unplanned
            delay = np.zeros(len(live))
            if self.counts_hosts:
                out = out - rng.binomial(out.astype(np.int64), -np.expm1(-wait / run.recovery.repair))
                short = host & (out >= run.spares)
                if self.elastic:
                    out = out + host
                    missing = np.maximum(out - run.spares, 0.0)
                    fewer = np.ceil(missing / stages) if run.recovery.way == "reroute" else missing * each
                    capacity = np.maximum(1 - fewer / replicas, 1 / replicas)
                else:
                    if short.any():
                        delay = np.where(
                            short, rng.standard_exponential(len(live)) * run.recovery.repair / (out + 1), 0.0
                        )
                    out = np.where(short, out, out + host)
            sums["noticing"] += np.where(unplanned, mine["detect"], 0.0)
            sums["diagnosing"] += np.where(unplanned, mine["diagnose"], 0.0)
            sums["swapping hosts"] += np.where(host, mine["swap"], 0.0)
            # Nothing runs meanwhile that could fail and begin it anew.
            if self.horizon is not None:
                delay = np.minimum(delay, np.maximum(self.horizon - sums["seconds"], 0.0))
            sums["waiting for a host"] += delay
            sums["seconds"] += delay
            sums["restarting"] += np.where(unplanned, mine["restart"], 0.0)
            sums["warming up"] += np.where(unplanned, mine["warm"], 0.0)
            sums["maintenance"] += np.where(planned, mine["maintenance"], 0.0)
            down = np.where(
                planned,
                mine["maintenance"],
                mine["detect"] + mine["diagnose"] + np.where(host, mine["swap"], 0.0) + mine["restart"] + mine["warm"],
            )
            kind = cause
            if live[0] == 0 and not stop[0]:
                self._record(sums, cause[0], lost[0], down[0] + delay[0])
            if stop.any():
                gone, stay = np.flatnonzero(stop), np.flatnonzero(failed)
                self._finish(sums, live[gone], gone)
                live, left, down, kind, out, capacity = (
                    array[stay] for array in (live, left, down, kind, out, capacity)
                )
                mine = {name: array[stay] for name, array in mine.items()}
                sums = {name: array[stay] for name, array in sums.items()}
            if not len(live):
                return
        raise ConfigError("with these failures no progress is ever made", key="failures")

    def _shorten(
        self,
        sums: dict[str, Any],
        mine: dict[str, Any],
        cut: Any,
        excess: Any,
        kind: Any,
        classes: _Classes,
    ) -> None:
        """A failure while one recovers: what would still have come of it is taken off again, the last first."""
        np = self.np
        planned, host = classes.planned[kind[cut]], classes.host[kind[cut]]
        for name, most in (
            ("maintenance", np.where(planned, mine["maintenance"][cut], 0.0)),
            ("warming up", np.where(planned, 0.0, mine["warm"][cut])),
            ("restarting", np.where(planned, 0.0, mine["restart"][cut])),
            ("swapping hosts", np.where(host, mine["swap"][cut], 0.0)),
            ("diagnosing", np.where(planned, 0.0, mine["diagnose"][cut])),
            ("noticing", np.where(planned, 0.0, mine["detect"][cut])),
        ):
            off = np.minimum(excess, most)
            sums[name][cut] -= off
            excess = excess - off

    def _thrown_away(self, sums: dict[str, Any], live: Any, cause: Any, unplanned: Any, classes: _Classes) -> Any:
        """Work beyond the last checkpoint that is lost as well: since corruption began, or with the peers' memory; or None."""
        np, again = self.np, None
        if self.run.storage and classes.wide.any():
            gone = unplanned & classes.wide[cause]
            again = np.where(gone, self.rng.random(len(live)) * self.run.storage, 0.0)
        if classes.silent.any():
            hidden = np.where(unplanned, classes.silent[cause], 0.0) * self.rng.standard_exponential(len(live))
            again = hidden if again is None else again + hidden
        if again is None:
            return None
        again = np.minimum(again, sums["progress"])
        sums["progress"] -= again
        sums["done"] -= again
        sums["work done twice"] += again
        return again

    def _record(self, sums: dict[str, Any], cause_index: int, lost: float, down: float) -> None:
        """A failure of the first run, for its timeline: which of the causes of its class takes its turn by their shares."""
        assert self.classes is not None
        named = self.classes.names[int(cause_index)]
        whole = sum(share for _, share in named)
        golden = (len(self.events) * 0.6180339887498949) % 1.0 * whole
        cause = named[-1][0]
        for name, share in named:
            golden -= share
            if golden <= 0:
                cause = name
                break
        self.events.append(Event(float(sums["seconds"][0]), cause, float(lost), float(down)))

    def _finish(self, sums: dict[str, Any], rows: Any, gone: Any) -> None:
        for name in SUMS:
            self.total[name][rows] = sums[name][gone]

    def _outcome(self, part: float) -> Outcome:
        run = self.run
        spare = run.spares * run.node / run.gpus
        whole = 1 + spare
        names = {name: part * self.total[name] / whole for name in NAMES}
        names["idle spares"] = part * self.total["seconds"] * spare / whole
        return Outcome(
            seconds=part * self.total["seconds"],
            names=names,
            interruptions=part * self.total["interruptions"],
            work=part * self.total["done"],
            events=tuple(self.events),
        )
