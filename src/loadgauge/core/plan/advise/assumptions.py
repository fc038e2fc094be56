"""Assumed values of flags that are not given, and what the alternatives would change."""

from collections.abc import Iterator

import msgspec

from loadgauge.core.base.units import GIB
from loadgauge.core.definitions.model.attention_kernels import runs_on
from loadgauge.core.definitions.training.optimizers import parse
from loadgauge.core.definitions.training.stacks import BEFORE_ONE_TENSOR, EXPERTS_QUANTISED, Stack
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.plan.advise.try_ import try_change
from loadgauge.core.resolve.setup import Setup

WORTH_A_LINE = 0.02
"""Least change of the memory or of the step time that is reported, as a share."""
BOTH_OUTCOMES = 0.05
"""Least change of the memory from which both outcomes are shown in full, as a share."""
FASTER = ("cudnn", "fa2")
"""Kernels of attention, one of which is tried in place of the other."""
STEPS = ("fused", "foreach")
"""The ways to run AdamW that releases of transformers differ in."""
WITH_EXPERTS = "all,experts.gate_up_proj,experts.down_proj"
"""PEFT 0.21 turns the names that experts had before transformers 5 into these (`utils/transformers_weight_conversion.py`)."""


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
        >>> eager.text(estimate(model("gpt2"), Layout(seq_len=1024))).partition(":")[0]
        '--attention flash is assumed; --attention eager'
        """
        words, total = [], result.memory.total
        if abs(self.memory) > BOTH_OUTCOMES * total:
            words.append(f"{(total + self.memory) / GIB:,.1f} GiB instead of {total / GIB:,.1f} GiB")
        elif abs(self.memory) > WORTH_A_LINE * total:
            words.append(f"{self.memory / GIB:+,.1f} GiB")
        if self.step is not None and result.time is not None and abs(self.step) > WORTH_A_LINE * result.time.step:
            words.append(f"{self.step / result.time.step:+.0%} step time")
        return f"{self.name} {self.value} is assumed; {self.alternative}: {', '.join(words)}"


def assumptions(setup: Setup, result: Estimate) -> list[Assumption]:
    """Return the assumptions of a job whose alternative changes memory or step time by more than 2 %.

    result: the estimate of the job itself; each alternative costs one more estimate. Of a captured model those count whose layers
    are known: a capture for each would take longer than the answer itself.
    """
    own = setup.model.listed
    if own is not None and own.most:
        most, own.most = own.most, 0
        try:
            return assumptions(setup, result)
        finally:
            own.most = most
    return [
        Assumption(name, value, alternative, memory, step)
        for name, value, alternative, other in _alternatives(setup)
        for memory, step in (_difference(result, other),)
        if abs(memory) > WORTH_A_LINE * result.memory.total
        or (step is not None and result.time is not None and abs(step) > WORTH_A_LINE * result.time.step)
    ]


def _alternatives(setup: Setup) -> Iterator[tuple[str, str, str, Estimate]]:
    """Yield what was assumed, its value, the alternative, and the estimate with that."""
    kernels, kind = setup.training.kernels, setup.training
    loss = "float32" if kernels.loss in ("fused", "compiled", "chunked") else "fused"
    for flag, value, other in (("--attention", kernels.attention, "eager"), ("--loss", kernels.loss, loss)):
        if flag in setup.assumed and value != other:
            trial = try_change(setup, {flag.strip("-"): other})
            if trial is not None:
                yield flag, value, f"{flag} {other}", trial.result
    if "--attention" in setup.assumed and kernels.flash and setup.gpu is not None:
        other = next((name for name in FASTER if name != kernels.flash and runs_on(name, setup.gpu)), "")
        trial = try_change(setup, {"attention": other}) if other else None
        if trial is not None:
            yield "--attention", kernels.flash, f"--attention {other}", trial.result
    if kind.weights and setup.job.weights is None and setup.job.precision != "fp16":
        other = "bfloat16" if kind.weights == "float32" else "float32"
        trial = try_change(setup, {"weights": other})
        if trial is not None:
            yield "--weights", kind.weights, f"--weights {other}", trial.result
    if "--kbit-upcast" in setup.assumed and kind.lora is not None:
        other = "none" if kind.lora.upcast == "all" else "all"
        trial = try_change(setup, {"kbit_upcast": other})
        if trial is not None:
            yield "--kbit-upcast", kind.lora.upcast, f"--kbit-upcast {other}", trial.result
    stack = Stack.parse(setup.job.version)
    if "--lora-targets" in setup.assumed and kind.framework.peft and setup.model.has_experts:
        trial = try_change(setup, {"lora_targets": WITH_EXPERTS})
        if trial is not None and "no" in EXPERTS_QUANTISED.possible(stack):  # experts in one tensor
            named = f"--lora-targets {WITH_EXPERTS}, as PEFT's all-linear is with transformers 5 for most mixtures"
            yield "--lora-targets", "all", named, trial.result
    if (
        kind.lora is not None
        and kind.lora.experts_stay
        and setup.model.has_experts
        and len(EXPERTS_QUANTISED.possible(stack)) > 1
    ):
        older = ",".join(filter(None, (setup.job.version, BEFORE_ONE_TENSOR)))
        trial = try_change(setup, {"version": older})
        if trial is not None:
            released = f"{stack.text('transformers')}, which leaves experts in 16 bits,"
            yield "--version", released, f"--version {BEFORE_ONE_TENSOR}, which quantises them", trial.result
    chosen = parse(kind.optimizer.name)
    if chosen.variants and kind.framework.optimizer_step.libraries and kind.offload == "none":
        for variant in chosen.variants:
            if variant.suffix in STEPS and variant.step != kind.optimizer.step:
                trial = try_change(setup, {"optimizer": f"{chosen.name}-{variant.suffix}"})
                if trial is not None:
                    own = next((v.suffix for v in chosen.variants if v.step == kind.optimizer.step), chosen.name)
                    yield "optimizer step", own, f"--optimizer {chosen.name}-{variant.suffix}", trial.result


def _difference(result: Estimate, other: Estimate) -> tuple[float, float | None]:
    """Bytes and seconds that another estimate has more."""
    step = None if result.time is None or other.time is None else other.time.step - result.time.step
    return other.memory.total - result.memory.total, step
