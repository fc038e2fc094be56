"""What an estimate says. Frozen, in bytes, FLOPs and plain counts; `estimate --json` prints these fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from loadgauge.errors import ConfigError
from loadgauge.estimate.flops import Flops
from loadgauge.estimate.memory.phases import Moment, Phase
from loadgauge.estimate.time.traffic import Traffic
from loadgauge.spec.axes import RANK_AXES
from loadgauge.spec.hardware import Cluster
from loadgauge.spec.layout import Layout
from loadgauge.spec.model import ModelSpec
from loadgauge.spec.training import Training

When = Literal["peak", "largest", "forward", "loss", "backward", "step"]
"""A moment of the step: of the rank's peak, at which a part is largest, or at which it is largest in a phase."""
STRETCHES: dict[Phase, When] = {Phase.FORWARD: "forward", Phase.LOSS: "loss", Phase.STEP: "step"}
"""What a phase counts as in `When`; all others are part of the backward."""
Basis = Literal["derived", "datasheet", "reported", "measured", "assumed"]


class Rank(msgspec.Struct, frozen=True):
    """The rank that needs the most: any rank of this pipeline stage."""

    stage: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the worst rank at its peak moment. `total` is the sum of `parts`; `low` and `high` bound it."""

    total: float
    low: float
    high: float
    capacity: float | None
    fits: bool | None
    rank: Rank
    moment: str
    parts: dict[str, float]
    moments: tuple[Moment, ...]
    """Every moment of the worst rank, in order."""
    stages: tuple[float, ...]
    """The peak of each pipeline stage."""
    host: float
    """Bytes offloaded to the host, for this rank."""
    workspaces: float = 0.0
    """Of the part outside: what the allocator hands out to the libraries of matrix products."""

    @property
    def peak(self) -> int:
        """The index of the moment at which the rank holds the most."""
        return max(range(len(self.moments)), key=lambda index: self.moments[index].total)

    def index(self, part: str, when: When) -> int:
        """The index of the moment that is meant. Raises `ConfigError` where the worst rank has none in that phase.

        Of several moments at which a part is equally large, the one at which the rank holds the most.
        """
        if when == "peak":
            return self.peak
        meant: Sequence[int] = range(len(self.moments))
        if when != "largest":
            meant = [index for index in meant if STRETCHES.get(self.moments[index].phase, "backward") == when]
        if not meant:
            names = ", ".join(moment.name for moment in self.moments)
            where = f"the worst rank, of stage {self.rank.stage},"
            raise ConfigError(f"{where} has no moment in the phase {when!r} (its moments: {names})", key="at")
        return max(meant, key=lambda index: (self.moments[index].parts[part], self.moments[index].total))

    def largest(self, part: str) -> Moment:
        """The moment at which a part is largest."""
        return self.moments[self.index(part, "largest")]

    @property
    def allocated(self) -> float:
        """Bytes PyTorch's allocator hands out at the peak, workspaces included."""
        return self.total - self.parts["outside"] + self.workspaces

    @property
    def verdict(self) -> Literal["fits", "tight", "does not fit", "unknown"]:
        """`tight`: it fits, but the upper end of the range does not."""
        if self.capacity is None:
            return "unknown"
        if self.total > self.capacity:
            return "does not fit"
        return "tight" if self.high > self.capacity else "fits"


class Time(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one optimizer step: `step` is the sum of `parts`, `low` and `high` bound it.

    tokens: of one step, over all GPUs; peak_flops: the dense 16-bit peak of one GPU, which MFU and HFU are shares of
    hidden: seconds of communication that run beside compute, by axis; stage: the slowest pipeline stage
    scale: by what a measured run of the user's corrected the prediction
    """

    step: float
    low: float
    high: float
    parts: dict[str, float]
    stage: int
    tokens: float
    gpus: int
    peak_flops: float
    model_flops: float
    hardware_flops: float
    tdp: float | None = None
    scale: float = 1.0

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens a second on each GPU."""
        return self.tokens / self.step / self.gpus

    @property
    def model_flops_per_gpu(self) -> float:
        """Model FLOP/s on each GPU: what the model needs, whatever is computed again."""
        return self.model_flops / self.step / self.gpus

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (source: chowdhery2022)."""
        return self.model_flops_per_gpu / self.peak_flops

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation, recomputation included (source: korthikanti2022)."""
        return self.mfu * self.hardware_flops / self.model_flops

    @property
    def joules(self) -> float | None:
        """Energy of a step with every GPU at its thermal design power: an upper bound, without hosts and cooling."""
        return None if self.tdp is None else self.tdp * self.gpus * self.step

    def to_dict(self) -> dict[str, Any]:
        """The `time` of `estimate --json`: seconds and plain numbers."""
        return {
            "step": self.step,
            "low": self.low,
            "high": self.high,
            "parts": self.parts,
            "stage": self.stage,
            "tokens_per_step": self.tokens,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "model_tflops_per_gpu": self.model_flops_per_gpu / 1e12,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "scale": self.scale,
        }


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Everything said about one model under one layout."""

    model: ModelSpec
    params: int
    active_params: int
    layout: Layout
    training: Training
    gpu: str | None
    memory: Memory
    flops: Flops
    """Of one optimizer step, over all GPUs."""
    time: Time | None = None
    """None without a cluster to run on, or where its links are not known."""
    network: tuple[Traffic, ...] = ()
    """Every collective of a step on the most loaded stage."""
    cluster: Cluster | None = None
    basis: dict[str, Basis]
    assumed: dict[str, str] = {}
    """What the job did not say, by flag, and the sizes that its config did not state."""
    left_out: tuple[str, ...] = ()
    """What the numbers do not count, in words."""
    untimed: str = ""
    """Why there is no time, where there is none."""
    unmodelled: tuple[str, ...] = ()
    """What a job file asks for that the numbers do not count, in words."""

    @property
    def not_counted(self) -> tuple[str, ...]:
        """All that is not counted, in words; first what was asked for, then why there is no time."""
        untimed = (f"time and network: {self.untimed}",) if self.untimed else ()
        return (*self.unmodelled, *untimed, *self.left_out)

    def to_dict(self) -> dict[str, Any]:
        """The JSON document of `estimate --json`, in bytes, FLOPs and plain counts."""
        layout, memory, training = self.layout, self.memory, self.training
        return {
            "model": {
                "name": self.model.name,
                "model_type": self.model.model_type,
                "params": self.params,
                "active_params": self.active_params,
                "unused_keys": list(self.model.unused_keys),
                "defaults": dict(self.model.defaults),
            },
            "layout": {
                **{name: getattr(layout, name) for name in (*RANK_AXES, "vpp", "zero")},
                "sequence_parallel": layout.sequence_parallel,
                "recompute": str(layout.recompute),
                "micro_batch": layout.micro_batch,
                "global_batch": layout.global_batch,
                "num_microbatches": layout.num_microbatches,
                "seq_len": layout.seq_len,
                "schedule": layout.schedule,
                "gpus": layout.gpus,
                "stage_layers": list(layout.layers_of(self.model)),
            },
            "training": {
                "framework": training.framework.name,
                "precision": training.precision.name,
                "optimizer": training.optimizer.name,
                "attention": training.kernels.attention,
                "loss": training.kernels.loss,
                "lora_rank": None if training.lora is None else training.lora.rank,
                "offload": training.offload,
            },
            "gpu": self.gpu,
            "memory": {
                "total": memory.total,
                "low": memory.low,
                "high": memory.high,
                "capacity": memory.capacity,
                "fits": memory.fits,
                "rank": {"stage": memory.rank.stage},
                "moment": memory.moment,
                "parts": memory.parts,
                "largest": {
                    part: {"bytes": moment.parts[part], "moment": moment.name, "phase": moment.phase}
                    for part in memory.parts
                    for moment in [memory.largest(part)]
                },
                "moments": [
                    {"name": moment.name, "phase": moment.phase, "parts": moment.parts} for moment in memory.moments
                ],
                "stages": list(memory.stages),
                "host": memory.host,
            },
            "flops": {
                "model_per_step": self.flops.model,
                "hardware_per_step": self.flops.hardware,
                "forward_per_step": self.flops.forward,
            },
            "network": [row.to_dict() for row in self.network],
            **({} if self.time is None else {"time": self.time.to_dict()}),
            "basis": dict(self.basis),
            "not_counted": list(self.not_counted),
            "assumed": dict(self.assumed),
        }
