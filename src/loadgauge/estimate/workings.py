"""An estimate taken apart again: the facts it was made of, at one moment on its worst rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from loadgauge.algebra import Size
from loadgauge.estimate.equation.symbols import kinds
from loadgauge.estimate.estimate import view_of
from loadgauge.estimate.memory.phases import Moment, Phase, moments
from loadgauge.estimate.memory.rank_memory import MemoryModel, Stage, stages
from loadgauge.estimate.memory.states import States, WeightCount, model_states
from loadgauge.estimate.result import Estimate, When
from loadgauge.sources import cite


class Formula(msgspec.Struct, frozen=True, kw_only=True):
    """A closed form with letters, with the user's numbers in their place, and its value [bytes].

    `letters` is empty where sizes do not divide evenly and only the whole numbers hold.
    """

    what: str
    letters: str
    numbers: str
    nbytes: Size
    legend: dict[str, tuple[str, Size]]


class Step(msgspec.Struct, frozen=True):
    """One summand [bytes]."""

    what: str
    nbytes: Size


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor held from forward to backward, and the operations that keep it."""

    layer: str
    name: str
    numel: Size
    nbytes: Size
    by: tuple[str, ...]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What one part is made of, on the worst rank at one moment. `steps` add up to `total` [bytes].

    peak, largest: the moment of the rank's peak and the one at which this part is largest; at_peak, at_largest: bytes
    of the part then
    """

    part: str
    total: Size
    moment: str
    phase: Phase
    peak: str
    at_peak: Size
    largest: str
    at_largest: Size
    stage: int
    rule: str
    basis: str
    steps: tuple[Step, ...]
    formulas: tuple[Formula, ...] = ()
    tensors: tuple[Kept, ...] = ()
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


NOT_ITEMISED = "further bytes, not itemised"
"""The step that stands for whatever the others do not account for."""

Key = tuple[int, bool]
"""A kind of layer, and whether it runs again in backward."""


class Apart:
    """The facts behind one estimate, and what one part of it was made of at one moment."""

    def __init__(self, result: Estimate, part: str, when: When = "peak") -> None:
        self.result, self.part = result, part
        self.model, self.layout, self.training = result.model, result.layout, result.training
        self.view = view_of(self.layout, self.training)
        self.facts = MemoryModel(self.model, self.layout, self.training, self.view)
        self.stage: Stage = list(stages(self.model, self.layout))[result.memory.rank.stage]
        index = result.memory.index(part, when)
        self.moment: Moment = result.memory.moments[index]
        self.at_work: Moment = list(moments(self.facts, self.stage))[index]
        """The same moment with what the stage does at it."""
        self.counts = self.facts.counts(self.stage, self.stage.start, self.stage.stop)
        """Layers of the stage, by kind."""
        self.done = self._done()
        """Layers whose backward is over at this moment."""
        self.ends = self.facts.units(self.stage)
        self.weights = self.facts.weights(self.counts) + self.facts.ends(self.stage)
        self.names = kinds(self.model)

    def _done(self) -> dict[Key, int]:
        forward = self.at_work.work is not None and self.at_work.work.forward
        return {} if forward else self.at_work.gone

    @property
    def at_step(self) -> bool:
        """Whether the moment is the optimizer step."""
        return self.moment.phase is Phase.STEP

    @property
    def at_embedding(self) -> bool:
        """Whether the moment is the backward of the embedding."""
        return self.moment.phase is Phase.EMBEDDING

    @property
    def at_reduction(self) -> bool:
        """Whether the peak is where the last whole gradients are reduced."""
        return self.moment.phase is Phase.REDUCTION

    @property
    def key(self) -> Key | None:
        """The kind of the layer in backward, where the moment is one."""
        forward = self.at_work.work is not None and self.at_work.work.forward
        return None if forward else self.at_work.key

    def kind(self, key: Key) -> str:
        """What to call layers of that kind."""
        return self.names[key[0]] + (" run again in backward" if key[1] else "")

    def groups(self) -> Iterator[tuple[str, WeightCount, Size]]:
        """Weights by the group of ranks that ZeRO shards them over."""
        if not self.facts.has_experts:
            yield "", self.weights.dense, self.layout.zero_ranks
            return
        yield " outside the experts", self.weights.dense, self.layout.zero_ranks
        yield " of the experts", self.weights.expert, self.layout.expert_zero_ranks

    def states(self, count: WeightCount, ranks: Size, **changes: Any) -> States:
        """Model states of some weights, with another precision or optimizer where `changes` says so."""
        return model_states(
            count,
            changes.get("precision", self.training.precision),
            changes.get("optimizer", self.training.optimizer),
            zero=self.layout.zero,
            dp=ranks,
            quantised=self.quantised,
            weights_stage=self.training.framework.weights_stage,
        )

    @property
    def quantised(self) -> bool | str:
        """The format of the base weights, as `Lora.quantised` says it."""
        return self.training.lora is not None and self.training.lora.quantised

    def over(self, ranks: Size, stage: int) -> str:
        """How a ZeRO stage divides something, in words."""
        return f" / {ranks} ranks" if self.layout.zero >= stage and ranks > 1 else ""

    def explanation(self, rule: str, steps: tuple[Step, ...], **rest: Any) -> Explanation:
        """The explanation of the part, with what is the same for all parts filled in; nothing is left out."""
        memory, total = self.result.memory, self.moment.parts[self.part]
        peak, largest = memory.moments[memory.peak], memory.largest(self.part)
        rest_of_it = total - sum(step.nbytes for step in steps)
        if abs(rest_of_it) > 1e-9 * memory.total:
            steps = (*steps, Step(NOT_ITEMISED, rest_of_it))
        return Explanation(
            part=self.part,
            total=total,
            moment=self.moment.name,
            phase=self.moment.phase,
            peak=peak.name,
            at_peak=peak.parts[self.part],
            largest=largest.name,
            at_largest=largest.parts[self.part],
            stage=self.stage.index,
            rule=rule,
            basis=self.result.basis[self.part],
            steps=tuple(step for step in steps if step.nbytes),
            **rest,
        )


def cited(*keys: str) -> tuple[str, ...]:
    """The works behind citation keys, each once."""
    return tuple(str(cite(key)) for key in dict.fromkeys(keys))
