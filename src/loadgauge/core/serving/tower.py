"""The towers of pictures, videos and sounds that a server runs before it reads a prompt."""

from __future__ import annotations

import msgspec

from loadgauge.core.base.algebra import maximum
from loadgauge.core.definitions.hardware.hardware import Cluster
from loadgauge.core.definitions.layout.layout import RecomputePolicy
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.serving.inference import Inference
from loadgauge.core.estimate.memory.liveness import forward_peak
from loadgauge.core.estimate.memory.recompute import applied
from loadgauge.core.estimate.schedule.stages import Stage
from loadgauge.core.families.encoders import pictures
from loadgauge.core.serving.memory import UNAIDED, Drafted, stored
from loadgauge.core.serving.passes import of_prompts, parts
from loadgauge.core.serving.time import Clock, Pass

WIDE = ("fp16", "fp32")
"""Formats of weights that a tower is stored in too; beside others it stays in 16 bits, as published copies have it."""


class Tower(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of towers, as a model of their own; tokens: of each prompt that they make"""

    model: ModelSpec
    tokens: int

    @classmethod
    def of(cls, seen: pictures.Seen) -> Tower:
        """Return the towers of a model that has them before its own layers."""
        own = tuple(kind for kind in seen.model.pattern if seen.model.blocks[kind].tower is not None)
        return cls(model=msgspec.structs.replace(seen.model, pattern=own), tokens=seen.tokens)

    @classmethod
    def parted(cls, model: ModelSpec, tokens: int) -> tuple[ModelSpec, Tower | None]:
        """Return the language model of one that sees, and its towers, None without any. tokens: of a prompt at most"""
        own = pictures.without_pictures(model)
        return own, cls.of(pictures.Seen(model, tokens, "")) if model.tower_layers else None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All its layers, on the ranks of a model's first stage."""
        layers = len(self.model.pattern)
        return (Stage(0, 0, layers, False, False, self.model.pattern, ()),)

    def asked(self, asked: Inference) -> Inference:
        """Return its own layout: over the ranks of tp, in 16 bits."""
        kind = asked.weight_format if asked.weight_format in WIDE else "bf16"
        return msgspec.structs.replace(asked, ep=1, pp=1, experts_from=0.0, server=None, weight_format=kind)

    def passed(self, asked: Inference, machines: Cluster) -> Pass:
        """Return the pass of the pictures of all prompts of the batch."""
        return Clock(self.model, self.asked(asked), self.stages, machines).prompts()

    def held(self, asked: Inference, beside: Drafted = UNAIDED) -> Drafted:
        """Return what lies beside the model on a rank, with the tower's bytes: its weights, what is alive while the pictures of the
        prompts that run at once are seen, and their vectors until they are read."""
        prompts = max(1, min(asked.batch, -(-asked.at_once // asked.prompt)))
        own = msgspec.structs.replace(self.asked(asked), batch=prompts)
        weights = alive = 0.0
        for part in parts(self.model, self.stages[0], of_prompts(self.model, own), 0):
            weights += part.times * sum(each.numel * stored(each, own.weight_format) for each in part.layer.weights)
            again = applied(RecomputePolicy(mode="full"), part.layer, part.layer.names)
            alive = maximum(alive, forward_peak(part.layer, again, ("input",)))
        kept = 2 * prompts * self.tokens * self.model.hidden_size
        return beside._replace(tower=weights, seeing=alive, seen=kept)
