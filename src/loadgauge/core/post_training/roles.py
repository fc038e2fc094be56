"""A resolved run of a task: which model each role is, how it is laid out, and what sequences a step has."""

from __future__ import annotations

import msgspec

from loadgauge.core.base.errors import ConfigError, LayoutError
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.hardware.hardware import Cluster, Gpu
from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.core.definitions.training.tasks import Reference, Role, Task
from loadgauge.core.definitions.training.training import Training

Offload = str
"""Tensors that a trainer moves to host memory while answers are generated: none, weights, optimizer or all."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A role with its model, its layout over the trainer's GPUs, and how it trains (or, where frozen, would).

    offloaded: in host memory between its passes; params: elements of its weights
    shares: it is the trained model, or that without its adapters, and has no weights of its own
    second: it has a second set of adapters; loaded: the dtype of a frozen model, None: as the trained one is loaded
    """

    role: Role
    model: ModelSpec
    layout: Layout
    training: Training
    params: int
    cluster: Cluster | None = None
    offloaded: bool = False
    shares: bool = False
    second: bool = False
    loaded: str | None = None


class Sequences(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences of a step. prompt: tokens of a prompt; answers: a distribution of tokens; epochs: times each is trained on

    >>> Sequences(prompts=64, samples=16, prompt=1024, answers=Lengths.of([2048])).number
    1024
    """

    prompts: int
    samples: int
    prompt: int
    answers: Lengths
    epochs: int = 1

    @property
    def number(self) -> int:
        """Sequences of a step."""
        return self.prompts * self.samples

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt + self.answers.longest

    @property
    def mean(self) -> float:
        """Tokens of a sequence in the mean."""
        return self.prompt + self.answers.mean


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where trainer and rollout are. rollout: GPUs of their own; 0: they take turns on the trainer's

    >>> Placement.parse("split:16+8", None).rollout, Placement.parse("colocated", 8).trainer
    (8, 8)
    """

    trainer: int
    rollout: int = 0

    @property
    def colocated(self) -> bool:
        """Return whether both are on the same GPUs."""
        return not self.rollout

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.trainer + self.rollout

    @classmethod
    def parse(cls, text: str, gpus: int | None) -> Placement:
        """Read `colocated` or `split:TRAINER+ROLLOUT`. gpus: all of them, None: not stated. Raises `ConfigError`."""
        kind, colon, rest = text.partition(":")
        if kind == "colocated" and not colon:
            return cls(trainer=gpus or 1)
        parts = rest.split("+")
        if (
            kind != "split"
            or len(parts) != 2
            or not all(number.isascii() and number.isdecimal() and len(number) < 8 for number in parts)
        ):
            raise ConfigError(f"must be colocated or like split:16+16, got {text!r}", key="placement")
        trainer, rollout = map(int, parts)
        if not trainer or not rollout:
            raise ConfigError(f"both sides need a GPU, got {text!r}", key="placement")
        if gpus is not None and gpus != trainer + rollout:
            raise ConfigError(f"{trainer} + {rollout} GPUs are not the {gpus} of --gpus", key="placement")
        return cls(trainer=trainer, rollout=rollout)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a task. members: by the name of their role, the trained one first; engine: what generates, if anything

    rollout_cluster: the GPUs of the rollout; joined: those of both sides; apart: why one of them is not known
    replicas: of the engine; on_policy: share of the steps that generate
    logprob_rows, logprob_tokens: sequences of a forward pass, or the tokens it holds at most
    padding: how answers of different lengths come together, where that is said
    assumed: the values of flags that were not given, with the reason
    uncounted: settings of job files that are not counted
    """

    task: Task
    members: dict[str, Member]
    sequences: Sequences
    placement: Placement
    gpu: Gpu | None = None
    rollout_cluster: Cluster | None = None
    joined: Cluster | None = None
    apart: str = ""
    engine: Engine | None = None
    replicas: int = 1
    on_policy: float = 1.0
    staleness: int = 0
    reference: Reference | None = None
    rollout_offload: Offload = "none"
    logprob_rows: int = 1
    logprob_tokens: int | None = None
    padding: str | None = None
    assumed: dict[str, str] = {}
    uncounted: tuple[Uncounted, ...] = ()

    @property
    def between(self) -> Offload:
        """The states that a role has moved away while another has its turn, as in `rollout_offload`."""
        return {"idle": "idle", "states": "optimizer"}.get(self.rollout_offload, "none")

    @property
    def trained(self) -> Member:
        """The member that the task is about: policy or actor."""
        return next(iter(self.members.values()))

    def pads(self, member: Member) -> bool:
        """Return whether a member pads micro-batches to their longest sequence, as transformers' trainers do by default."""
        if self.padding is not None:
            return self.padding != "free"
        return member.training.framework.peft or member.training.kernels.attention != "flash"


def replicas_of(engine: Engine, placement: Placement) -> int:
    """Return the number of replicas on the rollout's GPUs. Raises `LayoutError` where they are not whole ones.

    >>> replicas_of(Engine.parse("vllm:tp=2"), Placement(trainer=8))
    4
    """
    gpus = placement.rollout or placement.trainer
    if gpus % engine.replica:
        raise LayoutError(
            f"{gpus} GPUs of the rollout are not whole replicas of {engine.replica} ({engine.text()})",
            dimension="gpus",
            size=gpus,
            ranks=engine.replica,
        )
    replicas = gpus // engine.replica
    if engine.dp is not None and engine.dp != replicas:
        raise ConfigError(
            f"dp={engine.dp} replicas of {engine.replica} GPUs are not the {gpus} of the rollout", key="rollout"
        )
    return replicas
