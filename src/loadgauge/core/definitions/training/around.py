"""Work between training steps: evaluation, generation, saving."""

from typing import Literal

import msgspec

Saved = Literal["", "sharded", "full"]


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """Work between steps that needs memory; none by default.

    eval_batch: sequences of an evaluation batch on one rank; eval_batches: batches whose logits are on the GPU at once
    generate: tokens that an evaluation generates after each sequence
    save: how checkpoints are written: `full` gathers the whole model on the first rank, `sharded` copies its part on each
    load: whether the memory of loading the weights, before the first step, is asked for
    """

    eval_batch: int = 0
    eval_batches: int = 0
    generate: int = 0
    save: Saved = ""
    load: bool = False

    def __bool__(self) -> bool:
        return self != NOTHING


NOTHING = Around()
