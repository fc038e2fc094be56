"""The pipeline stages of a layout: which layers of the model one rank holds, chunk by chunk."""

from typing import TypeAlias

import msgspec

from loadgauge.core.base.algebra import remembered
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.definitions.model.model import ModelSpec

Key: TypeAlias = tuple[int, bool]
"""A kind of layer, and whether it runs again in backward."""


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive layers `start:stop` of a stage. `first`, `last`: next to the embedding, to the head."""

    start: int
    stop: int
    first: bool
    last: bool


class Stage(msgspec.Struct, frozen=True):
    """One pipeline stage: its layers `start:stop`, chunk after chunk, and the kind of each.

    Layers are numbered through all stages; where a stage has one chunk, the number is the layer's place in the model.
    first, last: whether the stage holds the embedding, and the head
    """

    index: int
    start: int
    stop: int
    first: bool
    last: bool
    pattern: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def kind(self, position: int) -> int:
        """Return the index of the layer at `position` among the model's distinct blocks."""
        return self.pattern[position - self.start]

    def repeated(self, policy: RecomputePolicy, position: int) -> bool:
        """Return whether the policy recomputes the layer at `position` in backward."""
        offset = position - self.start
        if policy.mode == "none":
            return False
        if policy.layers is not None:
            return offset < policy.layers
        return offset % policy.every == policy.every - 1

    def counts(self, policy: RecomputePolicy, start: int, stop: int) -> dict[Key, int]:
        """Return the number of layers of each kind, recomputed or not, in `start:stop`."""
        start, stop = start - self.start, stop - self.start
        if policy.mode == "none":
            again: tuple[int, ...] = ()
        elif policy.layers is not None:
            again = self.pattern[start : max(start, min(stop, policy.layers))]
        else:
            again = self.pattern[start + (policy.every - 1 - start) % policy.every : stop : policy.every]
        counts: dict[Key, int] = {}
        part = self.pattern[start:stop]
        for kind in sorted(set(part)):
            repeated = again.count(kind)
            once = part.count(kind) - repeated
            counts.update({(kind, flag): count for flag, count in ((False, once), (True, repeated)) if count})
        return counts


@remembered(64)
def stages(model: ModelSpec, layout: Layout) -> tuple[Stage, ...]:
    """Return the pipeline stages in order.

    >>> from loadgauge.core.families.reference import llama_model
    >>> model = llama_model(8, 512, 8, 1000)
    >>> [(stage.first, stage.last) for stage in stages(model, Layout(pp=2, schedule="dualpipev", seq_len=1))]
    [(True, True), (False, False)]
    """
    begins, finishes = ({route[hop] for route in layout.routes} for hop in (0, -1))
    every: list[Stage] = []
    start = 0
    for index, slices in enumerate(layout.chunks_of(model)):
        chunks: list[Chunk] = []
        pattern: tuple[int, ...] = ()
        stop = start
        for number, (begin, end) in enumerate(slices):
            position = index, number
            chunks.append(Chunk(stop, stop + end - begin, position in begins, position in finishes))
            pattern += model.pattern[begin:end]
            stop += end - begin
        first, last = any(chunk.first for chunk in chunks), any(chunk.last for chunk in chunks)
        every.append(Stage(index, start, stop, first, last, pattern, tuple(chunks)))
        start = stop
    return tuple(every)
