"""A resolved run of a task: which model each role is, how it is laid out, and what sequences a step has."""

from __future__ import annotations

from itertools import accumulate, pairwise

import msgspec

from loadgauge.core.base.errors import ConfigError, LayoutError, refuse
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


ALONE = {"reference": "reference", "critic": "critic", "reward": "reward model", "teacher": "teacher"}
"""Words of roles that may have GPUs of their own."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where trainer and rollout are. rollout: GPUs of their own; 0: they take turns on the trainer's

    apart: roles with GPUs of their own, those that share them together, and how many these are

    >>> Placement.parse("split:16+8", None).rollout, Placement.parse("colocated", 8).trainer
    (8, 8)
    >>> Placement.parse("split:8+8,critic+reward=4", None).side("critic")
    ('critic + reward model', 4)
    """

    trainer: int
    rollout: int = 0
    apart: tuple[tuple[tuple[str, ...], int], ...] = ()

    @property
    def colocated(self) -> bool:
        """Return whether both are on the same GPUs."""
        return not self.rollout

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.trainer + self.rollout + sum(number for _, number in self.apart)

    def side(self, role: str) -> tuple[str, int]:
        """Return the name of a role's GPUs and their number."""
        own = next(((names, number) for names, number in self.apart if role in names), ((), 0))
        return (" + ".join(own[0]), own[1]) if own[0] else ("trainer", self.trainer)

    def nodes(self, each: int) -> list[dict[str, int]]:
        """Return the GPUs of each set on the nodes where one begins, goes on, or ends. each: GPUs of a node

        >>> Placement.parse("split:8+4,critic=6", None).nodes(8)
        [{'trainer': 8}, {'rollout': 4, 'critic': 4}, {'critic': 2}]
        """
        sets = [("trainer", self.trainer), ("rollout", self.rollout)] + [
            (self.side(own[0])[0], n) for own, n in self.apart
        ]
        ends = list(accumulate((size for _, size in sets), initial=0))
        places = {
            at // each
            for start, end in pairwise(ends)
            if start < end
            for at in (start, start + each, end - 1)
            if at < end
        }
        listed = []
        for node in sorted(places):
            shared = (min(end, node * each + each) - max(start, node * each) for start, end in pairwise(ends))
            listed.append({name: size for (name, _), size in zip(sets, shared, strict=True) if size > 0})
        return listed

    @classmethod
    def parse(cls, text: str, gpus: int | None) -> Placement:
        """Read `colocated` or `split:TRAINER+ROLLOUT`, and `,ROLE+ROLE=GPUS` of roles on their own. Raises `ConfigError`.

        gpus: all of them, None: not stated
        """
        text, *others = text.split(",")
        apart = tuple(map(_apart, others))
        beside, words = sum(number for _, number in apart), [name for names, _ in apart for name in names]
        refuse(len(words) > len(set(words)), "a role has GPUs of its own once", key="placement")
        kind, colon, rest = text.partition(":")
        if kind == "colocated" and not colon:
            refuse(
                beside and (gpus or 0) <= beside,
                f"{beside} of --gpus {gpus} leave none to the trainer",
                key="placement",
            )
            return cls(trainer=(gpus or 1) - beside, apart=apart)
        parts = rest.split("+")
        refuse(
            kind != "split"
            or len(parts) != 2
            or not all(number.isascii() and number.isdecimal() and len(number) < 8 for number in parts),
            f"must be colocated or like split:16+16, got {text!r}",
            key="placement",
        )
        trainer, rollout = map(int, parts)
        refuse(not trainer or not rollout, f"both sides need a GPU, got {text!r}", key="placement")
        placed = cls(trainer=trainer, rollout=rollout, apart=apart)
        if gpus is not None and gpus != placed.gpus:
            counts = " + ".join(map(str, (trainer, rollout, *(number for _, number in apart))))
            raise ConfigError(f"{counts} GPUs are not the {gpus} of --gpus", key="placement")
        return placed


def _apart(text: str) -> tuple[tuple[str, ...], int]:
    """Read roles with GPUs of their own, and how many. Raises `ConfigError`."""
    words, _, number = text.partition("=")
    names = tuple(word.strip() for word in words.split("+"))
    refuse(
        not set(names) <= set(ALONE)
        or not (number.isascii() and number.isdecimal() and 0 < len(number) < 8 and int(number)),
        f"of a role on GPUs of its own is like reward=8 ({', '.join(ALONE)}), got {text[:40]!r}",
        key="placement",
    )
    return tuple(ALONE[name] for name in names), int(number)


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
    """Return the number of replicas on the rollout's GPUs; on the trainer's they may be fewer. Raises `LayoutError` where they are
    not whole ones.

    >>> [replicas_of(Engine.parse(text), Placement(trainer=8)) for text in ("vllm:tp=2", "vllm:tp=2,dp=3")]
    [4, 3]
    """
    gpus = placement.rollout or placement.trainer
    refuse(
        gpus % engine.replica,
        f"{gpus} GPUs of the rollout are not whole replicas of {engine.replica} ({engine.text()})",
        LayoutError,
        dimension="gpus",
        size=gpus,
        ranks=engine.replica,
    )
    replicas = gpus // engine.replica
    refuse(
        engine.dp is not None and (engine.dp > replicas or (placement.rollout and engine.dp != replicas)),
        f"dp={engine.dp} replicas of {engine.replica} GPUs are not the {gpus} of the rollout",
        key="rollout",
    )
    return engine.dp or replicas
