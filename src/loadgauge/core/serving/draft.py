"""Speculative decoding: a draft proposes tokens, and the model reads all of them in one step and keeps those that it agrees with.

Of n tokens that are each accepted at a rate a, independently, a step makes (1 - a^(n + 1)) / (1 - a) in the mean (source:
leviathan2023, equation 1). A draft is a model of its own; a block beside the served model's embedding and head (its modules of
multi-token prediction, or EAGLE's); or the text's own n-grams, which take nothing.
"""

from typing import Any

import msgspec

from loadgauge.core.base import LayoutError, Size
from loadgauge.core.definitions.hardware.hardware import Cluster
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.serving.inference import Inference
from loadgauge.core.serving.decode import Server, Work
from loadgauge.core.serving.memory import Drafted, kept_and_held
from loadgauge.core.serving.passes import split
from loadgauge.core.serving.time import Clock


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A draft: its name in words; its model, None for n-grams; tokens that it proposes in a step, and the share of them accepted.

    shares: it is one block, and embedding and head are the served model's
    """

    name: str
    model: ModelSpec | None
    tokens: int
    acceptance: float
    shares: bool = False

    @property
    def expected(self) -> float:
        """Tokens that a step makes in the mean.

        >>> round(Draft(name="ngram", model=None, tokens=3, acceptance=0.5).expected, 4)
        1.875
        """
        return sum(self.acceptance**at for at in range(self.tokens + 1))

    def to_dict(self) -> dict[str, Any]:
        """Return the part of a document about it."""
        return {"name": self.name, "tokens": self.tokens, "acceptance": self.acceptance, "tokens_a_step": self.expected}

    def asked(self, asked: Inference) -> Inference:
        """Return the layout of the draft: over the ranks of the served model, where its heads can be shared out among them."""
        assert self.model is not None
        own = msgspec.structs.replace(
            asked, ep=asked.ep if self.model.has_experts else 1, experts_from=0.0, server=None
        )
        try:
            split(self.model, own)
        except LayoutError:
            return msgspec.structs.replace(own, tp=1, ep=1)
        return own

    def held(self, asked: Inference) -> Drafted:
        """Return the bytes of it on a rank, for all sequences of the batch."""
        if self.model is None:
            return Drafted()
        own = self.asked(asked)
        weights, kept = kept_and_held(self.model, own, split(self.model, own)[0], ends=not self.shares)
        return Drafted(weights, kept, len(self.model.pattern))


def block_of(model: ModelSpec) -> ModelSpec:
    """Return the one block, behind the matrix that joins a state and a token, which proposes tokens beside a model."""
    return msgspec.structs.replace(model, pattern=model.pattern[-1:], mtp_layers=1)


class Speculating(Server):
    """A server whose steps propose and verify. Its step is the time of a token: that of all it does over the tokens it makes."""

    def __init__(
        self, model: ModelSpec, asked: Inference, machines: Cluster, engine: str, draft: Draft, **options: Any
    ) -> None:
        super().__init__(model, asked, machines, engine, **options)
        self.draft = draft
        self.drafter = None
        if draft.model is not None:
            self.drafter = Server(draft.model, draft.asked(asked), machines, engine, **options | {"tower": None})

    def work(self, batch: int, context: Size) -> Work:
        """Return the work of a rank to verify: the products of all proposed tokens, and the caches of the sequences once."""
        single, proposed = super().work(batch, context), super().work(batch * (self.draft.tokens + 1), context)
        return msgspec.structs.replace(proposed, cache=single.cache, sequences=single.sequences)

    def lanes(self, batch: int, context: float) -> dict[str, float]:
        """Return the seconds of a token by what takes them, the draft's steps among them."""
        lanes = {name: value / self.draft.expected for name, value in super().lanes(batch, context).items()}
        if self.drafter is not None:
            lanes["draft"] = self.draft.tokens * self.drafter.step(batch, context) / self.draft.expected
        return lanes

    def _read(self, tokens: int, batch: int = 1, cached: int = 0) -> float:
        own = super()._read(tokens, batch, cached)
        return own + (0.0 if self.drafter is None else self.drafter.prompts(tokens, batch, cached))

    def cache(self, context: float) -> float:
        """Return the bytes that a rank of the fullest stage keeps of a sequence of so many tokens, the draft's cache among them."""
        return super().cache(context) + (0.0 if self.drafter is None else self.drafter.cache(context))


def speculated(clock: Clock, draft: Draft, asked: Inference, machines: Cluster, context: float) -> float:
    """Return the seconds of a token by kernels alone: those of the draft's steps and of one that verifies, over the tokens made."""
    rows = msgspec.structs.replace(asked, batch=asked.batch * (draft.tokens + 1))
    verify = Clock(clock.model, rows, clock.stages, machines).token(context)
    took = verify.seconds - verify.lanes["attention"] + clock.token(context).lanes["attention"]
    if draft.model is not None:
        own = draft.asked(asked)
        took += draft.tokens * Clock(draft.model, own, split(draft.model, own), machines).token(context).seconds
    return took / draft.expected
