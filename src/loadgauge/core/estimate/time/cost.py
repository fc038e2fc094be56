"""The cost of a whole training run: days, GPU-hours, money, energy, GPUs for a date, and what failures cost.

Legend: T tokens of the run, D tokens of a step, t seconds of a step, n GPUs, C seconds to write a checkpoint, M seconds
between failures of the whole cluster, R seconds to be running again.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from loadgauge.core.base import ConfigError, Size
from loadgauge.core.definitions.hardware.cluster import GPUS_PER_NODE

DAY = 86_400
HOUR = 3_600


def training_seconds(tokens: Size, step_tokens: Size, step_seconds: Size) -> Size:
    """Return the seconds to train on T tokens: T / D steps of t seconds, with D tokens a step.

    >>> training_seconds(1_000_000, 1000, 2.5)
    2500.0
    """
    return tokens / step_tokens * step_seconds


def gpus_needed(model_flops: Size, seconds: Size, achieved_flops: Size) -> Size:
    """Return the (fractional) number of GPUs that compute `model_flops` [FLOP] in `seconds` at `achieved_flops` [FLOP/s] each.

    >>> round(gpus_needed(1e21, 86_400, 1e14), 4)
    115.7407
    """
    return model_flops / (seconds * achieved_flops)


def checkpoint_interval(checkpoint_seconds: float, mean_time_between_failures: float) -> float:
    """Return the interval between checkpoints [s] that loses least time, to first order: sqrt(2 C M) (source: young1974).

    C: `checkpoint_seconds`; M: `mean_time_between_failures` [s]

    >>> checkpoint_interval(50, 10_000)
    1000.0
    """
    return math.sqrt(2 * checkpoint_seconds * mean_time_between_failures)


def goodput(
    checkpoint_seconds: float, mean_time_between_failures: float, restart_seconds: float, interval: float | None = None
) -> float:
    """Return the share of time that is progress, with exponentially distributed failures (source: daly2006).

    An interval of useful work tau and its checkpoint take M exp(R/M) (exp((tau + C)/M) - 1) seconds on average, with M the
    mean time between failures, R a restart and C a checkpoint [s]; the share is tau over that. Without an `interval` [s],
    tau is `checkpoint_interval`.

    >>> round(goodput(50, 10_000, 0), 4), round(goodput(0, 10_000, 0, 1e-3), 4)
    (0.9033, 1.0)
    """
    if mean_time_between_failures <= 0 or checkpoint_seconds < 0 or restart_seconds < 0:
        raise ConfigError("times between failures must be positive, checkpoint and restart times not negative")
    tau = interval or checkpoint_interval(checkpoint_seconds, mean_time_between_failures)
    if tau <= 0:
        return 1.0
    mean = mean_time_between_failures
    exponent = (tau + checkpoint_seconds) / mean
    if exponent > 700:
        return 0.0
    return tau / (mean * math.exp(min(restart_seconds / mean, 700)) * math.expm1(exponent))


class Failures(msgspec.Struct, frozen=True, kw_only=True):
    """Mean time between failures of one GPU with its share of the node [h], and the time of a checkpoint and a restart [s]."""

    hours_between_failures_per_gpu: float
    checkpoint_seconds: float = 60.0
    restart_seconds: float = 600.0

    def cluster_seconds(self, gpus: float) -> float:
        """Return the mean time between failures of the whole cluster [s]: failure rates of GPUs add."""
        return self.hours_between_failures_per_gpu * HOUR / gpus


def progress(price: float | None, gpus: float, failures: Failures | None = None) -> tuple[float, float | None]:
    """Return the share of time that is progress, and the best interval between checkpoints [s]; 1 and None where nothing fails.

    price: of a GPU-hour, whose instances, nodes of 8 GPUs, may be taken away now and then (`Prices.hours`); rates add

    >>> progress(2.5, 64)
    (1.0, None)
    >>> share, every = progress(None, 64, Failures(hours_between_failures_per_gpu=5e4))
    >>> round(share, 4), round(every)
    (0.9933, 18371)
    """
    hours: float | None = getattr(price, "hours", None)
    if hours is None and failures is None:
        return 1.0, None
    own = failures or Failures(hours_between_failures_per_gpu=math.inf)
    reclaims = 0.0 if hours is None else math.ceil(gpus / GPUS_PER_NODE) / (hours * HOUR)
    between = 1 / (reclaims + 1 / own.cluster_seconds(gpus))
    share = goodput(own.checkpoint_seconds, between, own.restart_seconds)
    if share <= 0:
        raise ConfigError("with these failures no progress is ever made", key="mtbf_hours" if failures else "price")
    return share, checkpoint_interval(own.checkpoint_seconds, between)


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run: `tokens` in `days` on `gpus`, at `price` per GPU-hour in the user's own currency.

    goodput: share of time that is progress, 1 without a failure rate; `days`, GPU-hours, cost and energy include it.
    checkpoint_every: [s]; watts: of one GPU; wanted_days: what `gpus_needed` answers; offers: name, price and days of each
    price that was given, of which `price` is the one that costs least in all
    grid: grams of CO2 equivalents a kWh, and what they are of
    """

    tokens: float
    gpus: int
    steps: float
    days: float
    goodput: float = 1.0
    price: float | None = None
    watts: float | None = None
    checkpoint_every: float | None = None
    wanted_days: float | None = None
    grid: tuple[float, str] | None = None
    offers: tuple[tuple[str, float | None, float], ...] = ()

    @classmethod
    def of(
        cls,
        *,
        tokens: float,
        gpus: int,
        step_tokens: float,
        step_seconds: float,
        price: float | None = None,
        watts: float | None = None,
        failures: Failures | None = None,
        wanted_days: float | None = None,
        grid: tuple[float, str] | None = None,
    ) -> Budget:
        """Compute the budget of a run from one optimizer step.

        step_tokens, step_seconds: of one step over all GPUs; price: of a GPU-hour; watts: of one GPU. Raises `ConfigError`
        where the failures leave no time for progress.

        >>> Budget.of(tokens=1e9, gpus=8, step_tokens=1e6, step_seconds=8.64, price=2.0).days
        0.1
        """
        useful = training_seconds(tokens, step_tokens, step_seconds) / DAY
        offers = [
            (name, each, useful / progress(each, gpus, failures)[0])
            for name, each in getattr(price, "offers", ()) or (("", price),)
        ]
        _, price, days = min(offers, key=lambda offer: (offer[1] or 0.0) * offer[2])
        share, every = progress(price, gpus, failures)
        return cls(
            tokens=tokens,
            gpus=gpus,
            steps=tokens / step_tokens,
            days=days,
            goodput=share,
            price=price,
            watts=watts,
            checkpoint_every=every,
            wanted_days=wanted_days,
            grid=grid,
            offers=tuple(offers),
        )

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the run."""
        return self.days * 24 * self.gpus

    @property
    def cost(self) -> float | None:
        """Cost of the run in the currency of `price`; None without a price."""
        return None if self.price is None else self.gpu_hours * self.price

    @property
    def kilowatt_hours(self) -> float | None:
        """Energy at every GPU's thermal design power: an upper bound without hosts and cooling [kWh]; None without `watts`."""
        return None if self.watts is None else self.gpu_hours * self.watts / 1000

    @property
    def co2(self) -> float | None:
        """CO2 equivalents of that energy, an upper bound as it is [kg]; None where nothing says where it is from."""
        return None if self.grid is None or self.kilowatt_hours is None else self.kilowatt_hours * self.grid[0] / 1000

    @property
    def gpus_needed(self) -> int | None:
        """GPUs to finish in `wanted_days` at today's speed per GPU (communication may cost more); None if not asked."""
        return None if self.wanted_days is None else math.ceil(self.gpus * self.days / self.wanted_days)

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that a budget adds to `time` in `estimate --json`."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
            "energy_kwh": self.kilowatt_hours,
            "co2_kg": self.co2,
            "goodput": self.goodput,
            "checkpoint_every": self.checkpoint_every,
            "gpus_needed": self.gpus_needed,
        }
