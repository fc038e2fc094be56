"""What an estimate assumes where a flag is not given, and what the alternative would change."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from loadgauge.advise.try_ import try_change
from loadgauge.estimate.result import Estimate
from loadgauge.resolve.setup import Setup
from loadgauge.units import GIB

WORTH_A_LINE = 0.02
"""Least change of the memory or of the step time that is reported, as a share."""


class Assumption(msgspec.Struct, frozen=True):
    """An assumption, its alternative, and what that adds to the worst rank's memory [bytes] and the step [s]."""

    name: str
    value: str
    alternative: str
    memory: float
    step: float | None

    def text(self, result: Estimate) -> str:
        """Return one line: the alternative, and its differences to `result` where they are worth reporting.

        >>> from loadgauge import Layout, estimate, model
        >>> eager = Assumption("--attention", "flash", "--attention eager", 2**33, None)
        >>> eager.text(estimate(model("gpt2"), Layout(seq_len=1024)))
        '--attention flash is assumed; --attention eager: +8.0 GiB'
        """
        words = []
        if abs(self.memory) > WORTH_A_LINE * result.memory.total:
            words.append(f"{self.memory / GIB:+,.1f} GiB")
        if self.step is not None and result.time is not None and abs(self.step) > WORTH_A_LINE * result.time.step:
            words.append(f"{self.step / result.time.step:+.0%} step time")
        return f"{self.name} {self.value} is assumed; {self.alternative}: {', '.join(words)}"


def assumptions(setup: Setup, result: Estimate) -> list[Assumption]:
    """Return the assumptions of a job whose alternative changes memory or step time by more than 2 %.

    result: the estimate of the job itself; each alternative costs one more estimate.
    """
    return [
        Assumption(name, value, alternative, memory, step)
        for name, value, alternative, other in _alternatives(setup)
        for memory, step in (_difference(result, other),)
        if abs(memory) > WORTH_A_LINE * result.memory.total
        or (step is not None and result.time is not None and abs(step) > WORTH_A_LINE * result.time.step)
    ]


def _alternatives(setup: Setup) -> Iterator[tuple[str, str, str, Estimate]]:
    """What was assumed, its value, the alternative, and the estimate with that."""
    kernels, kind = setup.training.kernels, setup.training
    loss = "float32" if kernels.loss in ("fused", "compiled", "chunked") else "fused"
    for flag, value, other in (("--attention", kernels.attention, "eager"), ("--loss", kernels.loss, loss)):
        if flag in setup.assumed and value != other:
            trial = try_change(setup, {flag.strip("-"): other})
            if trial is not None:
                yield flag, value, f"{flag} {other}", trial.result
    if kind.framework.torch_optimizer and kind.optimizer.variants and kind.offload == "none":
        framework = msgspec.structs.replace(kind.framework, foreach_step=True)
        training = msgspec.structs.replace(kind, framework=framework)
        changed = msgspec.structs.replace(setup, training=training, cluster=None)  # its time is the same
        yield "optimizer step", "fused", "a foreach step", changed.estimate()


def _difference(result: Estimate, other: Estimate) -> tuple[float, float | None]:
    """Bytes and seconds that another estimate has more."""
    step = None if result.time is None or other.time is None else other.time.step - result.time.step
    return other.memory.total - result.memory.total, step
