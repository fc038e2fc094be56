"""Formulas of equal lengths read for unequal ones: by tokens, by query-key pairs, by sequences, or by the longest of them."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from loadgauge.core.base.errors import NotModelled

BATCH, LENGTH = "b", "s"


@functools.cache
def degrees(product: str) -> tuple[int, int] | None:
    """How often the batch and the length are factors of a term; None where it has another factor, such as a rounded quotient.

    >>> degrees("b*s*s"), degrees("1"), degrees("b*((s)//(2))")
    ((1, 2), (0, 0), None)
    """
    factors = [] if product == "1" else product.split("*")
    if any(one not in (BATCH, LENGTH) for one in factors):
        return None
    return factors.count(BATCH), factors.count(LENGTH)


class Ragged(msgspec.Struct, frozen=True):
    """A micro-batch of unequal lengths: its tokens, query-key pairs and sequences, and the longest of them (source: padfree2024).

    single: whether the formulas are those of one sequence, in which the batch is no letter
    """

    tokens: Any
    pairs: Any
    sequences: Any
    longest: Any
    single: bool = False

    def of(self, product: str) -> Any:
        """The value of a term. Raises NotModelled for one that is linear in none of these.

        >>> Ragged(30, 500, 2, 20).of("b*s"), Ragged(30, 500, 2, 20).of("b*s*s"), Ragged(30, 500, 2, 20).of("s")
        (30, 500, 20)
        """
        found = degrees(product)
        if found is not None and self.single:
            found = (1, found[1]) if found[1] else found
        if found == (0, 0):
            return 1
        if found == (1, 0):
            return self.sequences
        if found == (1, 1):
            return self.tokens
        if found == (1, 2):
            return self.pairs
        if found is not None and not found[0] and found[1] <= 2:
            return self.longest ** found[1]
        raise NotModelled(
            f"sequences of unequal lengths where a size is {product}: it is linear neither in tokens nor in query-key pairs"
        )
