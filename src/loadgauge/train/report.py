"""The cost of padding in a batch, and what a model saves without it.

>>> print(report([3, 8, 5]))
3 sequences: 16 tokens, 24 with padding to 8 (33 % padding); attention sees 98 pairs instead of 192
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from loadgauge.core.base.errors import refuse
from loadgauge.train import inspect_model as anatomy
from loadgauge.train.collator import Collator
from loadgauge.train.enable import enabled
from loadgauge.train.saved import saved_bytes

GIB = 2**30


@dataclass(frozen=True)
class Report:
    """`tokens` of the sequences and `padded_tokens` of the same batch padded to its longest; query-key `pairs` likewise.

    `bytes_per_token`: activations that this model keeps for backward, for one more token [bytes]; `saved` and
    `padded_saved` follow from it [bytes]. Padding keeps at least that much: its mask and masked attention come on top.
    """

    sequences: int
    longest: int
    tokens: int
    padded_tokens: int
    pairs: int
    padded_pairs: int
    bytes_per_token: float | None = None
    saved: float | None = None
    padded_saved: float | None = None

    @property
    def ratio(self) -> float:
        """Tokens over padded tokens (0 to 1): the share of memory, and of work outside attention, that is left."""
        return self.tokens / self.padded_tokens

    def __str__(self) -> str:
        text = (
            f"{self.sequences} sequences: {self.tokens} tokens, {self.padded_tokens} with padding to {self.longest} "
            f"({1 - self.ratio:.0%} padding); attention sees {self.pairs} pairs instead of {self.padded_pairs}"
        ).replace("%", " %")
        if self.saved is not None and self.padded_saved is not None and self.bytes_per_token is not None:
            text += (
                f"\nkept for backward: {self.saved / GIB:.3f} GiB instead of at least {self.padded_saved / GIB:.3f} GiB "
                f"({self.bytes_per_token:.0f} bytes a token, measured on this model)"
            )
        return text


def report(lengths: Sequence[int], model: nn.Module | None = None) -> Report:
    """Return the cost of a batch of sequences of these `lengths`, padded and padding-free.

    With an enabled `model`, the bytes it keeps for backward are measured on two small batches of different size; between
    them they grow by exactly so many bytes a token, whatever the batch, and that is what the forecast uses.
    """
    refuse(not lengths or min(lengths) < 1, "must be at least 1, and at least one of them", key="lengths")
    tokens, longest = sum(lengths), max(lengths)
    padded_tokens = len(lengths) * longest
    pairs, padded_pairs = sum(length * length for length in lengths), len(lengths) * longest * longest
    counts = (len(lengths), longest, tokens, padded_tokens, pairs, padded_pairs)
    if model is None:
        return Report(*counts)
    each, fixed = _per_token(model)
    return Report(*counts, each, fixed + each * tokens, fixed + each * padded_tokens)


def _per_token(model: nn.Module) -> tuple[float, float]:
    """Bytes kept for each token and for any batch, from two small batches."""
    refuse(not enabled(model), "is not padding-free: call enable first", key="model")
    top = anatomy.whole(model)
    device = anatomy.embedding(top).device
    measured = []
    for counts in ((16, 8), (32, 24)):
        rows = [anatomy.sample(top, count, 1)[0].tolist() for count in counts]
        batch = Collator("token")([{"input_ids": row, "labels": row} for row in rows])
        if "SequenceClassification" in type(top).__name__:
            batch["labels"] = torch.zeros(len(counts), dtype=torch.long)
        elif "CausalLM" not in type(top).__name__ and "LMHead" not in type(top).__name__:
            batch.pop("labels")
        batch = {key: v.to(device) if isinstance(v, torch.Tensor) else v for key, v in batch.items()}
        with torch.random.fork_rng(enabled=True):
            measured.append((sum(counts), saved_bytes(functools.partial(model, **batch), model.parameters())))
    (few, less), (many, more) = measured
    each = (more - less) / (many - few)
    return each, less - each * few
