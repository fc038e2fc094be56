"""`View`: one rank's share of a micro-batch, and the kernels that compute it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loadgauge.core.base.algebra import Size
from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.definitions.model.lora import Lora


class Cached(msgspec.Struct, frozen=True):
    """Keys and values of tokens before, which generation reads: `tokens` of each sequence, its newest included, of `itemsize`
    bytes an element."""

    tokens: Size
    itemsize: Size = 2


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One micro-batch on one rank.

    tokens: tokens computed on this rank, padding included where there is padding; already divided by cp [tokens]
    pairs: query-key pairs, the sum of squared lengths (s*s*b for equal lengths s); already divided by cp [pairs]
    kernel_tokens: the tokens without padding, where the flash kernel alone runs without it (its inputs are copied for
        it, its output is padded again, and pairs are those it computes); None: it sees them as they are
    sequences: sequences in the micro-batch
    positions: the longest sequence, the rows of a position table in use
    tp: tensor-parallel ranks; sequence_parallel shards the norms and dropouts between them too
    cp: context-parallel ranks, which share the sequence; cp_comm: how they exchange keys and values; exchanged: of these, what
        travels where short sequences are shared over fewer ranks
    ep, etp: expert-parallel ranks, and tensor-parallel ranks of one expert
    imbalance: rows the busiest expert rank computes, over the mean (1: balanced)
    cached: what attention reads of tokens before, where a sequence has one new token (generation); None: it has them all
    input_gradients: the embedding's output gets a gradient though nothing below is trained, as libraries make it for
        layers that run again in backward
    """

    tokens: Size
    pairs: Size
    kernel_tokens: Size | None = None
    sequences: Size = 1
    positions: Size = 1
    tp: Size = 1
    sequence_parallel: bool = False
    cp: Size = 1
    cp_comm: Literal["ring", "all_gather", "all_to_all"] = "ring"
    exchanged: Size = 1
    ep: Size = 1
    etp: Size = 1
    imbalance: Size = 1
    kernels: Kernels = Kernels()
    lora: Lora | None = None
    input_gradients: bool = False
    cached: Cached | None = None

    @property
    def token_shards(self) -> Size:
        """Ranks that share the tokens between the matrix products: tp with sequence parallelism, else 1."""
        return self.tp if self.sequence_parallel else 1

    @classmethod
    def of(cls, seq_len: Size, micro_batch: Size, **rest: object) -> View:
        """`micro_batch` sequences of `seq_len` tokens each.

        >>> View.of(2048, 4).tokens, View.of(2048, 4).pairs
        (8192, 16777216)
        """
        return cls(
            tokens=seq_len * micro_batch,
            pairs=seq_len * seq_len * micro_batch,
            sequences=micro_batch,
            positions=seq_len,
            **rest,  # type: ignore[arg-type]
        )

    @classmethod
    def of_token(cls, sequences: Size, context: Size, itemsize: Size = 2, **rest: object) -> View:
        """One new token of each of `sequences` sequences, whose `context` tokens are in a cache, the new one included.

        >>> View.of_token(16, 4096).tokens, View.of_token(16, 4096).pairs
        (16, 65536)
        """
        return cls(
            tokens=sequences,
            pairs=sequences * context,
            sequences=sequences,
            positions=1,
            cached=Cached(context, itemsize),
            **rest,  # type: ignore[arg-type]
        )


def from_code(of: Any, part: str, view: View) -> Any:
    """Return the captured writer of a block or a model (`layer`; `embedding`, `head`, `held`); None where a family writes it.

    of: `Block` or `ModelSpec`
    """
    return None if of.listed is None else getattr(of.listed, part)(view)
