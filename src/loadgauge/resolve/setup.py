"""`Setup`: a resolved job: the model, the layout, how it is trained and on which GPUs."""

from __future__ import annotations

import msgspec

from loadgauge.estimate.cost import Budget, Failures
from loadgauge.estimate.estimate import estimate
from loadgauge.estimate.padding import Forecast, forecast
from loadgauge.estimate.result import Estimate
from loadgauge.formats.uncounted import Uncounted
from loadgauge.lengths import Lengths
from loadgauge.spec.hardware import Cluster, Gpu
from loadgauge.spec.job import Job
from loadgauge.spec.layout import Layout
from loadgauge.spec.model import ModelSpec
from loadgauge.spec.training import Training
from loadgauge.units import GIB, parse_count


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """A run that can be estimated. `assumed`: the values of flags that were not given, with the reason."""

    job: Job
    model: ModelSpec
    layout: Layout
    training: Training
    gpu: Gpu | None
    lengths: Lengths | None
    assumed: dict[str, str]
    cluster: Cluster | None = None
    untimed: str = ""
    """Why there is no cluster, where a GPU is given."""
    scale: float = 1.0
    """Measured over predicted step time of the user's measured run."""
    file: str = ""
    """Where the model is another tool's job file: whose, and how its keys were read."""
    uncounted: tuple[Uncounted, ...] = ()
    """Settings of a job file that are not counted."""
    dropout: float = 0.0
    """Of the input of a job file's adapters."""

    def estimate(self) -> Estimate:
        """Return the estimate; its range is widened by settings of a job file that are not counted."""
        result = estimate(self.model, self.layout, self.training, self.gpu, self.cluster, scale=self.scale)
        result = result.replace(assumed=self.assumed)
        if self.untimed:
            result = result.replace(untimed=self.untimed)
        if self.uncounted or (self.dropout and self.training.lora is not None):
            result = widened(self, result)
        result.__dict__["setup"] = self
        return result

    def budget(self, result: Estimate) -> Budget | None:
        """Return the time, energy and price of the whole run; None without its number of tokens, or without a step time."""
        job = self.job
        if job.tokens is None or result.time is None:
            return None
        failures = None
        if job.mtbf_hours is not None:
            seconds = {"checkpoint_seconds": job.checkpoint_seconds, "restart_seconds": job.restart_seconds}
            failures = Failures(
                hours_between_failures_per_gpu=job.mtbf_hours,
                **{name: value for name, value in seconds.items() if value is not None},
            )
        return Budget.of(
            tokens=parse_count(job.tokens, "tokens"),
            gpus=self.layout.gpus,
            step_tokens=result.time.tokens,
            step_seconds=result.time.step,
            price=job.price,
            watts=result.time.tdp,
            failures=failures,
            wanted_days=job.days,
        )

    def worst_case(self) -> Estimate | None:
        """Return the estimate with every sequence of the micro-batch as long as the longest; None without lengths."""
        if self.lengths is None:
            return None
        layout = msgspec.structs.replace(self.layout, tokens=None, pairs=None)
        return estimate(self.model, layout, self.training, self.gpu)

    def forecast(self, result: Estimate | None = None) -> Forecast | None:
        """Return memory and time of the lengths padded and padding-free; None without lengths. result: the own estimate."""
        if self.lengths is None:
            return None
        return forecast(
            self.model, self.lengths, self.layout, self.training, self.gpu, self.cluster, scale=self.scale, same=result
        )


def worst_routing(given: Setup) -> Estimate | None:
    """Return the estimate with the worst possible imbalance of experts; None where that changes nothing."""
    worst = given.layout.worst_imbalance(given.model)
    if worst <= given.layout.expert_imbalance:
        return None
    layout = msgspec.structs.replace(given.layout, expert_imbalance=worst)
    return msgspec.structs.replace(given, layout=layout).estimate()


def widened(given: Setup, result: Estimate) -> Estimate:
    """Return an estimate whose range and notes include the settings of a job file that are not counted."""
    memory, items = result.memory, list(given.uncounted)
    if given.dropout and given.training.lora is not None:
        lora = msgspec.structs.replace(given.training.lora, dropout=given.dropout)
        kind = msgspec.structs.replace(given.training, lora=lora)
        more = max(0.0, estimate(given.model, given.layout, kind, given.gpu).memory.total - memory.total)
        text = f"lora_dropout = {given.dropout:g}: a dropped copy and a mask of each adapter's input"
        items.append(Uncounted(f"{text}, up to {more / GIB:.2f} GiB", "lora_dropout", high=more))
    kernels = {name: word for item in items for name, word in item.kernels.items()}
    if kernels:
        kind = msgspec.structs.replace(
            given.training, kernels=msgspec.structs.replace(given.training.kernels, **kernels)
        )
        change = estimate(given.model, given.layout, kind, given.gpu).memory.total - memory.total
        items.append(Uncounted("", "", low=max(0.0, -change), high=max(0.0, change)))
    extra = sum(item.parameter for item in items) * result.params / result.layout.gpus
    low, high = sum(item.low for item in items), sum(item.high for item in items) + extra
    memory = msgspec.structs.replace(memory, low=max(0.0, memory.low - low), high=memory.high + high)
    notes = tuple(item.note for item in items if item.note)
    return result.replace(memory=memory, unmodelled=notes)
