"""The result of an estimate. Frozen, in bytes, FLOPs and plain counts; `estimate --json` prints these fields."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import Any, Literal

import msgspec

from loadgauge.core.base import ConfigError, NotStated, load, needs
from loadgauge.core.definitions.hardware.hardware import Cluster, gpu as find_gpu
from loadgauge.core.definitions.layout.axes import RANK_AXES
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.memory_range import COUNTERS
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.explain import Explanation, explain
from loadgauge.core.estimate.memory.ledger import Entry
from loadgauge.core.estimate.memory.peak import STRETCHES, Memory, Rank, When
from loadgauge.core.estimate.time.flops import Flops
from loadgauge.core.estimate.time.step import Time
from loadgauge.core.estimate.time.traffic import Traffic
from loadgauge.core.estimate.workings import Workings

__all__ = ["STRETCHES", "Basis", "Estimate", "Memory", "Rank", "Time", "When"]

Basis = Literal["derived", "datasheet", "reported", "measured", "assumed"]


class Estimate(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The estimate of one model under one layout: memory, FLOPs, time, network, and what was assumed.

    Equality, copies, pickles and JSON are of the results alone; `workings` holds what they were computed from.
    """

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
    """Assumed values by flag, and the sizes that the config did not state."""
    left_out: tuple[str, ...] = ()
    """Costs that the numbers leave out, in words."""
    untimed: str = ""
    """Why there is no time, where there is none."""
    unmodelled: tuple[str, ...] = ()
    """Requests of a job file that the numbers leave out, in words."""

    @cached_property
    def workings(self) -> Workings:
        """The models of memory and time behind the numbers; rebuilt where the estimate was copied or unpickled."""
        card = None if self.cluster is None else self.cluster.gpu
        if card is None and self.gpu is not None:
            with suppress(ConfigError):
                card = find_gpu(self.gpu)
        return Workings(self.model, self.layout, self.training, card, self.cluster)

    @property
    def timing(self) -> Time:
        """The time of a step. Raises `NotStated` where there is none.

        >>> from loadgauge import Layout, estimate
        >>> result = estimate("gpt2", Layout(seq_len=1024), gpu="a100-sxm4-80gb")
        >>> result.timing is result.time
        True
        """
        if self.time is None:
            raise NotStated(self.untimed)
        return self.time

    def replace(self, **changes: Any) -> Estimate:
        """Return the estimate with some fields changed, such as notes or the range, and with its workings."""
        return msgspec.structs.replace(self, **changes).keep(self.workings)

    @property
    def setup(self) -> Any:
        """The `Setup` this was estimated from; None where it was made from specifications, or was copied."""
        return self.__dict__.get("setup")

    def keep(self, workings: Workings) -> Estimate:
        """Attach the workings it was computed from, and return the estimate itself."""
        self.__dict__["workings"] = workings
        return self

    @property
    def ledger(self) -> tuple[Entry, ...]:
        """Every entry of the worst rank at its peak; their bytes add up to `memory.total`.

        >>> from loadgauge import Layout, estimate
        >>> result = estimate("gpt2", Layout(seq_len=1024))
        >>> round(sum(entry.nbytes for entry in result.ledger) / result.memory.total, 9)
        1.0
        """
        return self.workings.ledger(self.memory.peak).all()

    def explain(self, part: str, at: When = "peak") -> Explanation:
        """Explain how one part of the memory adds up (see `loadgauge.core.estimate.explain.explain`).

        >>> from loadgauge import Layout, estimate
        >>> result = estimate("gpt2", Layout(seq_len=1024))
        >>> sum(step.nbytes for step in result.explain("weights").steps) == result.memory.parts["weights"]
        True
        """
        return explain(self.workings, self.memory, self.basis, part, at)

    # How an estimate is shown is looked up when it is shown: `core/estimate/` does not import `core/text/` (decision 0010).

    def __str__(self) -> str:
        return load("loadgauge.sheets.text.notebook:text")(self)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return load("loadgauge.sheets.text.notebook:line")(self)  # type: ignore[no-any-return]

    def _repr_html_(self) -> str:
        return load("loadgauge.sheets.text.notebook:html")(self)  # type: ignore[no-any-return]

    @property
    def not_counted(self) -> tuple[str, ...]:
        """Return the costs that are not counted, a sentence each: requests that are not modelled, then why there is no time."""
        untimed = (f"time and network: {self.untimed}",) if self.untimed else ()
        return (*self.unmodelled, *untimed, *self.left_out)

    @property
    def towers_left_out(self) -> tuple[tuple[str, int | None, int | None], ...]:
        """The towers of images or sounds that the numbers leave out: (key of the config, parameters, bytes of their weights).

        The bytes are those of a whole copy in the dtype of the weights; None where the parameters are not known.

        >>> from loadgauge import Layout, estimate
        >>> estimate("qwen3-vl-8b", Layout(seq_len=1024)).towers_left_out
        (('vision_config', 576388336, 1152776672),)
        """
        each = self.training.precision.weight
        return tuple(
            (tower.name, tower.parameters, None if tower.parameters is None else each * tower.parameters)
            for tower in self.model.left_out
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of `estimate --json`, in bytes, FLOPs, seconds and plain counts."""
        layout, memory, training = self.layout, self.memory, self.training
        widest = memory.widest
        return {
            "task": "train",
            "model": {
                "name": self.model.name,
                "model_type": self.model.model_type,
                "params": self.params,
                "active_params": self.active_params,
                "unused_keys": list(self.model.unused_keys),
                "defaults": dict(self.model.defaults),
                "towers_left_out": [
                    {"name": name, "params": count, "bytes": nbytes} for name, count, nbytes in self.towers_left_out
                ],
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
                **needs(memory),
                "widest": {"low": widest.low, "high": widest.high},
                "question": msgspec.to_builtins(memory.question),
                "counters": {
                    name: {"low": shown.low, "value": shown.value, "high": shown.high}
                    for name in COUNTERS
                    for shown in [memory.reading(name)]
                },
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
                "pinned": memory.pinned,
                "nvme": memory.nvme,
                "saving": memory.saving,
            },
            "flops": {
                "model_per_step": self.flops.model,
                "hardware_per_step": self.flops.hardware,
                "forward_per_step": self.flops.forward,
            },
            "network": [row.to_dict() for row in self.network],
            **({"time": None, "untimed": self.untimed} if self.time is None else {"time": self.time.to_dict()}),
            "basis": dict(self.basis),
            "not_counted": list(self.not_counted),
            "assumed": dict(self.assumed),
        }
