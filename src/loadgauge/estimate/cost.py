"""What a whole training run takes: days, GPU-hours, money, energy, GPUs for a date, and what failures cost.

Legend: T tokens of the run, D tokens of a step, t seconds of a step, n GPUs, C seconds to write a checkpoint, M seconds
between failures of the whole cluster, R seconds to be running again.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from loadgauge.algebra import Size
from loadgauge.errors import ConfigError

DAY = 86_400
HOUR = 3_600


def training_seconds(tokens: Size, step_tokens: Size, step_seconds: Size) -> Size:
    """Seconds for T tokens: T / D steps of t seconds.

    >>> training_seconds(1_000_000, 1000, 2.5)
    2500.0
    """
    return tokens / step_tokens * step_seconds


def gpus_needed(model_flops: Size, seconds: Size, achieved_flops: Size) -> Size:
    """GPUs that finish so many FLOPs in that time at so many FLOP/s each; a share of a GPU is not rounded.

    >>> round(gpus_needed(1e21, 86_400, 1e14), 4)
    115.7407
    """
    return model_flops / (seconds * achieved_flops)


def checkpoint_interval(checkpoint_seconds: float, mean_time_between_failures: float) -> float:
    """The interval between checkpoints that loses least, first order: sqrt(2 C M) (source: young1974).

    >>> checkpoint_interval(50, 10_000)
    1000.0
    """
    return math.sqrt(2 * checkpoint_seconds * mean_time_between_failures)


def goodput(
    checkpoint_seconds: float, mean_time_between_failures: float, restart_seconds: float, interval: float | None = None
) -> float:
    """The share of time that is progress, with exponential failures (source: daly2006).

    An interval of useful work tau and its checkpoint take M exp(R/M) (exp((tau + C)/M) - 1) seconds on average, so the
    share is tau over that. Without an `interval`, Young's.

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
    """How often one GPU (with its share of the node) fails, and what a checkpoint and a restart take [s]."""

    hours_between_failures_per_gpu: float
    checkpoint_seconds: float = 60.0
    restart_seconds: float = 600.0

    def cluster_seconds(self, gpus: int) -> float:
        """Seconds between failures of the whole cluster: each GPU fails alone, so rates add."""
        return self.hours_between_failures_per_gpu * HOUR / gpus


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run: `tokens` in `days` on `gpus`, at `price` per GPU-hour in the user's own currency.

    `goodput` is 1 where no failure rate is given; `days`, GPU-hours, cost and energy contain it.
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
    ) -> Budget:
        """From the time of a step. `watts`: of one GPU.

        >>> Budget.of(tokens=1e9, gpus=8, step_tokens=1e6, step_seconds=8.64, price=2.0).days
        0.1
        """
        share, every = 1.0, None
        if failures is not None:
            between = failures.cluster_seconds(gpus)
            share = goodput(failures.checkpoint_seconds, between, failures.restart_seconds)
            every = checkpoint_interval(failures.checkpoint_seconds, between)
            if share <= 0:
                raise ConfigError("with these failures no progress is ever made", key="mtbf_hours")
        seconds = training_seconds(tokens, step_tokens, step_seconds) / share
        return cls(
            tokens=tokens, gpus=gpus, steps=tokens / step_tokens, days=seconds / DAY, goodput=share, price=price,
            watts=watts, checkpoint_every=every, wanted_days=wanted_days,
        )  # fmt: skip

    @property
    def gpu_hours(self) -> float:
        """GPU-hours."""
        return self.days * 24 * self.gpus

    @property
    def cost(self) -> float | None:
        """Money, in the currency of `price`; None without one."""
        return None if self.price is None else self.gpu_hours * self.price

    @property
    def kilowatt_hours(self) -> float | None:
        """Energy with every GPU at its thermal design power: an upper bound without hosts and cooling [kWh]."""
        return None if self.watts is None else self.gpu_hours * self.watts / 1000

    @property
    def gpus_needed(self) -> int | None:
        """GPUs for `wanted_days`, if each stays as fast as now (more of them lose some to communication)."""
        return None if self.wanted_days is None else math.ceil(self.gpus * self.days / self.wanted_days)

    def to_dict(self) -> dict[str, Any]:
        """The keys it adds to `time` in `estimate --json`."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
            "energy_kwh": self.kilowatt_hours,
            "goodput": self.goodput,
            "checkpoint_every": self.checkpoint_every,
            "gpus_needed": self.gpus_needed,
        }
