"""Budget checks: does a job still fit and stay within a budget, alone or against its state before a change?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from loadgauge.core.base import (
    CANNOT_TELL,
    NO,
    YES,
    ConfigError,
    Error,
    Verdict,
    exit_code as verdict_code,
    gib,
    needs,
    parse,
    seconds,
    suggest,
)
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.job.job_text import positive_number
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import Setup


class Quantity(msgspec.Struct, frozen=True):
    """Quantities that a budget may limit: unit as `units.parse` calls it (empty: a plain number), and what each needs."""

    unit: str
    needs: str
    show: Callable[[float], str]


def _plain(value: float) -> str:
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


QUANTITIES = {
    "memory": Quantity("byte", "", gib),
    "step": Quantity("second", "--gpu", seconds),
    "days": Quantity("", "--gpu and --tokens", _plain),
    "gpu-hours": Quantity("", "--gpu and --tokens", _plain),
    "cost": Quantity("", "--gpu, --tokens and --price", _plain),
}
GROWTH = "growth"
"""The limit on how much any of them may grow over the base, in percent."""


def read_limits(texts: Iterable[str]) -> dict[str, float]:
    """Read a budget: NAME=VALUE, several separated by commas. Returns base units. Raises `ConfigError`.

    >>> read_limits(["memory=22GiB,cost=500", "growth=5%"])
    {'memory': 23622320128.0, 'cost': 500.0, 'growth': 0.05}
    """
    limits = {}
    for text in texts:
        for part in text.split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            try:
                limits[name] = _limit(name, value)
            except ConfigError as error:
                raise ConfigError(f"{part.strip()!r}: {error}", key="budget") from None
    return limits


def _limit(name: str, value: str) -> float:
    if name == GROWTH:
        return positive_number(value.removesuffix("%")) / 100
    if name not in QUANTITIES:
        names = [*QUANTITIES, GROWTH]
        raise ConfigError(f"not NAME=VALUE with a NAME of {', '.join(names)}{suggest(name, names)}")
    unit = QUANTITIES[name].unit
    if not unit:
        return positive_number(value)
    number, kind = parse(value, kind=unit)
    if kind != unit:
        raise ConfigError(f"must be in {unit}s, such as {'22GiB' if unit == 'byte' else '12s'}")
    return number


class Figures(msgspec.Struct, frozen=True):
    """The figures of a job: verdict, [byte] of the GPU, and the quantities of a budget that the job says enough for.

    memory: as every document has it (`verdict.needs`); question: what decides, in words; empty where nothing does
    unread: keys of job files that are not counted, as documents have them
    """

    verdict: Verdict
    capacity: float | None
    values: dict[str, float]
    memory: dict[str, Any] = {}
    question: str = ""
    unread: tuple[dict[str, Any], ...] = ()

    @classmethod
    def of(cls, setup: Setup, result: Estimate) -> Figures:
        """Read them from an estimate."""
        values = {"memory": result.memory.total}
        if result.time is not None:
            values["step"] = result.time.step
        whole = setup.budget(result)
        if whole is not None:
            values |= {"days": whole.days, "gpu-hours": whole.gpu_hours}
            if whole.cost is not None:
                values["cost"] = whole.cost
        memory = result.memory
        asked = "" if memory.question is None else f"; {memory.question.words()}"
        return cls(memory.verdict, memory.capacity, values, needs(memory), asked, tuple(setup.unread(result)))


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A job under a budget. problems: why it fails; error: why nothing can be told."""

    name: str
    now: Figures | None = None
    before: Figures | None = None
    problems: tuple[str, ...] = ()
    error: str = ""

    @property
    def code(self) -> int:
        """The exit code of this job alone."""
        return NO if self.problems else CANNOT_TELL if self.error else YES

    def change(self, name: str) -> float | None:
        """Growth of a quantity over the base, as a share of it; None where one of the two is not known."""
        if self.now is None or self.before is None or not (self.before.values.keys() & self.now.values.keys() & {name}):
            return None
        return self.now.values[name] / self.before.values[name] - 1

    def to_dict(self) -> dict[str, Any]:
        """Return the job's entry in `check --json`: bytes, seconds and plain numbers."""
        return {
            "job": self.name,
            "ok": self.code == YES,
            "memory": None if self.now is None else self.now.memory,
            "now": None if self.now is None else dict(self.now.values),
            "before": None if self.before is None else {"verdict": self.before.verdict, **self.before.values},
            "problems": list(self.problems),
            "unread": [] if self.now is None else list(self.now.unread),
            "error": self.error,
        }


def figures(job: Job) -> Figures:
    """Estimate a job. Raises `Error`.

    >>> figures(Job(model="gpt2", gpu="rtx4090")).verdict
    'fits'
    """
    setup = resolve_job(job)
    return Figures.of(setup, setup.estimate())


def check(
    name: str,
    job: Job,
    limits: Mapping[str, float],
    before: Figures | None = None,
    *,
    allow_tight: bool = False,
) -> Checked:
    """Check a job against its GPU and a budget.

    limits: what `read_limits` gives; before: the figures of the base, where there is one; allow_tight: `tight` is no problem

    >>> limits = read_limits(["memory=1GiB"])
    >>> check("mine", Job(model="gpt2", gpu="rtx4090"), limits).problems[0].partition(" is over ")[2]
    'the budget of 1.00 GiB'
    """
    try:
        now = figures(job)
        missing = [quantity for quantity in limits if quantity != GROWTH and quantity not in now.values]
        error = "; ".join(f"{quantity}: a budget of it needs {QUANTITIES[quantity].needs}" for quantity in missing)
    except Error as caught:
        return Checked(name=name, before=before, error=str(caught))
    problems = [*_fit(now, before, allow_tight=allow_tight)]
    for quantity, most in limits.items():
        if quantity in now.values and now.values[quantity] > most:
            show = QUANTITIES[quantity].show
            problems.append(f"{quantity} {show(now.values[quantity])} is over the budget of {show(most)}")
    checked = Checked(name=name, now=now, before=before, error=error)
    if GROWTH in limits:
        for quantity in now.values:
            more = checked.change(quantity)
            if more is not None and more > limits[GROWTH] and before is not None:
                show = QUANTITIES[quantity].show
                problems.append(
                    f"{quantity} grew by {more:.1%}, from {show(before.values[quantity])} to {show(now.values[quantity])};"
                    f" the budget is {limits[GROWTH] * 100:.4g} %"
                )
    return msgspec.structs.replace(checked, problems=tuple(problems))


def _fit(now: Figures, before: Figures | None, *, allow_tight: bool) -> Iterable[str]:
    """The problem with the verdict, if there is one."""
    if now.capacity is not None and verdict_code(now.verdict, allow_tight=allow_tight) != YES:
        was = ""
        if before is not None:
            was = f" (before: {before.verdict}, {gib(before.values['memory'], 1)})"
        yield f"{now.verdict}: {gib(now.values['memory'], 1)} of {gib(now.capacity, 1)}{was}{now.question}"


def exit_code(checks: Iterable[Checked]) -> int:
    """The exit code of several jobs: 1 where one fails, else 2 where one cannot be told, else 0."""
    codes = {checked.code for checked in checks}
    return NO if NO in codes else CANNOT_TELL if CANNOT_TELL in codes else YES
