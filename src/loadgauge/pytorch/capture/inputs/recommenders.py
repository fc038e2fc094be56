"""Recommenders by name: DLRM and HSTU in plain PyTorch, with embedding tables as torchrec trains them.

Tables are one matrix of all rows, whose optimizer runs in backward (torchrec's fused tables): no gradient of theirs is ever
whole. Over ranks, each holds its share of the rows, and ids and what is made of them are exchanged (table- and row-wise
sharding, balanced as torchrec's planner does). Sources: meta-pytorch/torchrec, `models/dlrm.py`, `distributed/embeddingbag.py`;
meta-recsys/generative-recommenders, `modules/stu.py`, `ops/pytorch/pt_hstu_attention.py` (arXiv 2402.17152).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from loadgauge.pytorch.capture.lists.exchanges import exchange


class Lookup(torch.autograd.Function):
    """Rows of a table for ids, or their sums by bag; back, the ids are sorted and the rows updated where they lie."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, bags: Any) -> Any:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        if bags is None:
            return functional.embedding(ids, weight)
        return torch.ops.aten._embedding_bag_forward_only(weight, ids, bags)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (ids,) = ctx.saved_tensors
        rows, _ = ids.reshape(-1).sort()
        weight = ctx.weight.detach()
        weight.index_add_(0, rows, grads[0].reshape(-1, grads[0].shape[-1])[:1].expand(len(rows), -1))
        return None, None, None, None


class Tables(nn.Module):
    """All tables of a model as one matrix. rows: of all; width: of a row; ranks: that hold them together"""

    by_rows, ranks = True, 1

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.empty(rows, width))
        self.anchor = nn.Parameter(torch.empty(1))

    def forward(self, ids: torch.Tensor, bags: Any = None) -> Any:
        """Return the rows of ids, or their sums in so many bags, which have as many ids each."""
        if self.ranks > 1:
            ids = exchange(ids, self.ranks)
        rows = Lookup.apply(self.anchor, self.weight, ids, None if bags is None else ids.new_zeros(bags))
        return exchange(rows, self.ranks) if self.ranks > 1 else rows


def stack(first: int, widths: Sequence[int], *, last: bool = True) -> nn.Sequential:
    """Linear layers with ReLU behind each. last: behind the last one too

    >>> len(stack(13, (512, 256, 128))), len(stack(128, (64, 1), last=False))
    (6, 3)
    """
    pairs = zip((first, *widths), widths, strict=False)
    layers = [layer for inner, outer in pairs for layer in (nn.Linear(inner, outer), nn.ReLU())]
    return nn.Sequential(*layers[: None if last else -1])


class Cross(nn.Module):
    """A layer of a low-rank cross network: the inputs times a product of what comes in, added to it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)

    def forward(self, first: torch.Tensor, x: torch.Tensor) -> Any:
        """Return the next layer's input."""
        return first * self.up(self.down(x)) + x


class DLRM(nn.Module):
    """Dense features and sums of rows, multiplied pairwise or by a cross network, under a tower (arXiv 1906.00091, 2008.13535).

    rows: of all tables; ids: of all of them for a sample; cross, rank: layers of the cross network, 0 for products
    """

    def __init__(
        self,
        rows: int,
        tables: int,
        dim: int,
        dense: int,
        bottom: Sequence[int],
        top: Sequence[int],
        cross: int,
        rank: int,
        **_: Any,
    ) -> None:
        super().__init__()
        self.tables, self.bottom = Tables(rows, dim), stack(dense, (*bottom[:-1], dim))
        width = (tables + 1) * dim
        self.cross = nn.ModuleList(Cross(width, rank) for _ in range(cross))
        self.count = tables
        self.top = stack(width if cross else dim + (tables + 1) * tables // 2, top, last=False)
        self.pairs: Any
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, 1), persistent=False)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        low = self.bottom(dense)
        sums = self.tables(ids, len(dense) * self.count).view(len(dense), self.count, -1)
        both = torch.cat((low.unsqueeze(1), sums), dim=1)
        if len(self.cross):
            x = first = both.flatten(1)
            for layer in self.cross:
                x = layer(first, x)
        else:
            products = torch.bmm(both, both.transpose(1, 2))
            x = torch.cat((low, products[:, self.pairs[0], self.pairs[1]]), dim=1)
        return functional.binary_cross_entropy_with_logits(self.top(x).squeeze(-1), labels)


class Transducer(nn.Module):
    """A layer of HSTU: one product for gates, values, queries and keys, attention by SiLU in one kernel, and a gated product."""

    def __init__(self, dim: int, heads: int, qk: int, linear: int) -> None:
        super().__init__()
        self.heads, self.sizes = heads, (heads * linear, heads * linear, heads * qk, heads * qk)
        self.before, self.after = nn.LayerNorm(dim), nn.LayerNorm(heads * linear)
        self.uvqk, self.out = nn.Linear(dim, sum(self.sizes)), nn.Linear(heads * linear, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next layer's input."""
        gates, *rest = functional.silu(self.uvqk(self.before(x))).split(self.sizes, dim=-1)
        value, query, key = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in rest)
        # SiLU takes the place of the softmax in a kernel that holds no scores, as this one holds none.
        read = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: torch.Tensor = x + self.out(gates * self.after(read.transpose(1, 2).flatten(2)))
        return result


class HSTU(nn.Module):
    """Sequences of items through `layers` of HSTU, scored against sampled items (arXiv 2402.17152). negatives: for each position"""

    def __init__(
        self, rows: int, dim: int, layers: int, heads: int, qk: int, linear: int, negatives: int, **_: Any
    ) -> None:
        super().__init__()
        self.tables, self.negatives = Tables(rows, dim), negatives
        self.layers = nn.ModuleList(Transducer(dim, heads, qk, linear) for _ in range(layers))

    def forward(self, ids: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch. ids, sampled: items of each position, and those it is scored against"""
        x = rows = self.tables(ids)
        for layer in self.layers:
            x = layer(x)
        x = functional.normalize(x, dim=-1).unsqueeze(-1)
        items = torch.cat((rows.unsqueeze(2), self.tables(sampled)), dim=2)
        scores = (functional.normalize(items, dim=-1) @ x).squeeze(-1).flatten(0, 1)
        return functional.cross_entropy(scores / 0.05, torch.zeros_like(ids).flatten())
