"""Context parallelism: how the ranks that share a sequence exchange keys and values for attention.

Legend: c context-parallel ranks, T tokens on one of them, K bytes of its own keys and values.

ring: keys and values travel once around in forward, and once more in backward with their gradients beside them.
all_gather: every rank gathers all keys and values, again in backward, and scatters their gradients.
all_to_all (Ulysses): heads are exchanged for tokens before attention and back after it.
The balanced ring gives each rank a piece from both ends of the sequence, so causal work is equal on all ranks.
(Sources: liu2023ring; jacobs2023; megatron-lm, `--cp-comm-type`.)
"""

from __future__ import annotations

import msgspec

from loadgauge.core.base.algebra import Size, several
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Collective, Tensor


class Exchange(msgspec.Struct, frozen=True):
    """The traffic of one attention, and the bytes it needs only while it runs."""

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    workspace: Size = 0


def exchange(build: Builder, query: Tensor, key: Tensor, value: Tensor, context: Tensor) -> Exchange:
    """Return the traffic of attention over the cp ranks; nothing where there is one rank and nothing to say."""
    view = build.view
    ranks = view.cp
    if isinstance(ranks, int) and ranks == 1:
        return Exchange()
    own = key.nbytes + value.nbytes
    if view.cp_comm == "all_to_all":
        there = tuple(Collective("all_to_all", "cp", tensor.nbytes, ranks) for tensor in (query, key, value))
        back = (Collective("all_to_all", "cp", context.nbytes, ranks),)
        return Exchange((*there, *back), (*back, *there), several(ranks) * (query.nbytes + own))
    sent = own * ranks * view.exchanged
    gather, scatter = (Collective(kind, "cp", sent, ranks) for kind in ("all_gather", "reduce_scatter"))
    # A ring holds the piece in use and the one that arrives; gathering holds all of them.
    held = 2 * own if view.cp_comm == "ring" else own * ranks
    return Exchange((gather,), (gather, scatter), several(ranks) * held)
