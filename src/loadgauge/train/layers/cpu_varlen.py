"""Attention over sequences of unequal length, on PyTorch's flash kernel for CPU, as one operator.

One output buffer for the whole row; keys and values are never expanded to the number of query heads; the boundaries are
read inside the operator, so a compiled model is one graph for any lengths. Windows are attended block by block, chunks
are sequences of their own, and an attention sink (a score without a value) enters through the log-sum-exp:

    softmax over (scores, sink) = softmax over scores * exp(lse - lse'), lse' = log(exp(lse) + exp(sink)),

and the kernel's own backward is then right when it is given lse' and the scaled output.

Legend: H query heads, G key-value heads, R = H / G, T tokens of the row, D head width of queries and keys, E of values.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

LONGEST_BLOCK = 512
"""Query rows of one block under a window: bounds the mask, (rows) x (rows + window)."""


class Block(NamedTuple):
    """Query rows [q0, q1) attend to keys [k0, k1): all of them, causally, or as far as a window reaches."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    window: tuple[int, int] | None


def blocks(ends: list[int], left: int, right: int, chunk: int) -> Iterator[Block]:
    """Split sequences into kernel calls. `left`, `right`: how far a query sees (-1: without limit); `chunk`: 0 or width.

    >>> [tuple(block) for block in blocks([2, 5], -1, 0, 0)]
    [(0, 2, 0, 2, True, None), (2, 5, 2, 5, True, None)]
    >>> [tuple(block)[:4] for block in blocks([5], -1, 0, 3)]
    [(0, 3, 0, 3), (3, 5, 3, 5)]
    """
    for start, end in zip([0, *ends], ends, strict=False):
        step = chunk or end - start
        for first in range(start, end, step):
            yield from _within(first, min(first + step, end), left, right)


def _within(start: int, end: int, left: int, right: int) -> Iterator[Block]:
    last = end - start - 1
    before, after = last if left < 0 else min(left, last), last if right < 0 else min(right, last)
    if before == last and after in (0, last):
        yield Block(start, end, start, end, after < last, None)
        return
    rows = min(LONGEST_BLOCK, max(64, before + after))
    for q0 in range(start, end, rows):
        q1 = min(q0 + rows, end)
        yield Block(q0, q1, max(start, q0 - before), min(end, q1 + after), False, (before, after))


class _Windows:
    """Additive masks of windows: one template per width, cut to each block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.templates: dict[tuple[int, int], Tensor] = {}

    def mask(self, block: Block) -> Tensor | None:
        if block.window is None:
            return None
        before, after = block.window
        if block.window not in self.templates:
            rows = min(LONGEST_BLOCK, max(64, before + after))
            offset = torch.arange(rows + before + after)[None] - torch.arange(rows)[:, None] - before
            seen = (offset >= -before) & (offset <= after)
            self.templates[block.window] = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, -torch.inf)
        first = block.k0 - (block.q0 - before)
        return self.templates[block.window][: block.q1 - block.q0, first : first + block.k1 - block.k0]


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(1, H, T, D) to views (G, R, T, D); keys and values are shared by the R heads of a group, not copied."""
    groups = key.shape[1]
    repeat = query.shape[1] // groups
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    grouped_query = query[0].unflatten(0, (groups, repeat))
    return grouped_query, *(t[0][:, None].expand(groups, repeat, *t.shape[2:]) for t in (key, value))


def _widen(tensor: Tensor, width: int) -> Tensor:
    """Zeros beyond the head width change neither scores nor outputs; the kernel wants one width for all three."""
    return tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1]))


def _ends(marks: Tensor) -> list[int]:
    ends: list[int] = (marks.reshape(-1).nonzero().flatten() + 1).tolist()
    if not ends or ends[-1] != marks.shape[-1]:
        raise ValueError("the last token of the row must end a sequence")
    return ends


def _statistics(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@torch.library.custom_op("loadgauge::varlen_attention", mutates_args=(), device_types="cpu")
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    marks: Tensor,
    sinks: Tensor | None,
    left: int,
    right: int,
    chunk: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention within each sequence of a flat row.

    query (1, H, T, D), key (1, G, T, D), value (1, G, T, E); `marks` true at last tokens; `sinks` (H) or None; `left` and
    `right` [tokens] how far a query sees, -1 without limit; `chunk` [tokens] or 0. Returns the output (1, T, H, E) and the
    log-sum-exp (H, T), both contiguous.
    """
    heads, tokens, width = query.shape[1:]
    grouped_query, grouped_key, grouped_value = _grouped(query, key, value)
    groups, repeat = grouped_query.shape[:2]
    wide = max(width, value.shape[-1])
    output = value.new_empty(tokens, groups, repeat, value.shape[-1])
    lse = query.new_empty(groups, repeat, tokens, dtype=_statistics(query))
    windows = _Windows(query.dtype)
    for block in blocks(_ends(marks), left, right, chunk):
        rows, columns = slice(block.q0, block.q1), slice(block.k0, block.k1)
        part, statistics = _forward(
            _widen(grouped_query[:, :, rows], wide),
            _widen(grouped_key[:, :, columns], wide),
            _widen(grouped_value[:, :, columns], wide),
            0.0,
            block.causal,
            attn_mask=windows.mask(block),
            scale=scale,
        )
        if sinks is not None:
            with_sink = torch.logaddexp(statistics, sinks.to(statistics.dtype).view(groups, repeat, 1))
            part = part * torch.exp(statistics - with_sink)[..., None].to(part.dtype)
            statistics = with_sink
        output[rows] = part[..., : value.shape[-1]].permute(2, 0, 1, 3)
        lse[:, :, rows] = statistics
    return output.view(1, tokens, heads, -1), lse.view(heads, tokens)


@varlen_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    heads, tokens = query.shape[1:3]
    return value.new_empty(1, tokens, heads, value.shape[-1]), query.new_empty(heads, tokens, dtype=_statistics(query))


@torch.library.custom_op("loadgauge::varlen_attention_backward", mutates_args=(), device_types="cpu")
def varlen_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    marks: Tensor,
    sinks: Tensor | None,
    left: int,
    right: int,
    chunk: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and sinks (empty without sinks), shaped like them.

    gradient: of the output, (1, T, H, E); output, lse: what `varlen_attention` returned; the others as it takes them
    """
    tokens, width = query.shape[2:]
    grouped_query, grouped_key, grouped_value = _grouped(query, key, value)
    groups, repeat = grouped_query.shape[:2]
    wide = max(width, value.shape[-1])
    whole_output = output[0].unflatten(1, (groups, repeat)).permute(1, 2, 0, 3)
    whole_gradient = gradient[0].unflatten(1, (groups, repeat)).permute(1, 2, 0, 3)
    whole_lse = lse.view(groups, repeat, tokens)
    # Laid out as the projections before attention give them, (tokens, heads, width), so that no later step copies.
    query_gradient = query.new_empty(tokens, groups, repeat, width)
    key_gradient = key.new_zeros(tokens, groups, width)
    value_gradient = value.new_zeros(tokens, groups, value.shape[-1])
    windows = _Windows(query.dtype)
    for block in blocks(_ends(marks), left, right, chunk):
        rows, columns = slice(block.q0, block.q1), slice(block.k0, block.k1)
        of_query, of_key, of_value = _backward(
            _widen(whole_gradient[:, :, rows], wide),
            _widen(grouped_query[:, :, rows], wide),
            _widen(grouped_key[:, :, columns], wide),
            _widen(grouped_value[:, :, columns], wide),
            _widen(whole_output[:, :, rows], wide),
            whole_lse[:, :, rows].contiguous(),
            0.0,
            block.causal,
            attn_mask=windows.mask(block),
            scale=scale,
        )
        query_gradient[rows] = of_query[..., :width].permute(2, 0, 1, 3)
        key_gradient[columns] += of_key[..., :width].sum(1).transpose(0, 1)
        value_gradient[columns] += of_value[..., : value.shape[-1]].sum(1).transpose(0, 1)
    of_sinks = query.new_empty(0)
    if sinks is not None:
        share = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
        inner = (gradient[0].to(lse.dtype) * output[0].to(lse.dtype)).sum(-1)
        of_sinks = -(share * inner.T).sum(1).to(sinks.dtype)
    return (
        query_gradient.flatten(1, 2).transpose(0, 1)[None],
        key_gradient.transpose(0, 1)[None],
        value_gradient.transpose(0, 1)[None],
        of_sinks,
    )


@varlen_attention_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    marks: Tensor,
    sinks: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def like(tensor: Tensor) -> Tensor:
        heads, tokens, width = tensor.shape[1:]
        return tensor.new_empty(tokens, heads, width).transpose(0, 1)[None]

    of_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return like(query), like(key), like(value), of_sinks


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, marks, sinks, *ctx.reach = inputs  # type: ignore[attr-defined]
    ctx.save_for_backward(query, key, value, *output, marks, sinks)  # type: ignore[arg-type]


def _gradients(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, output, lse, marks, sinks = ctx.saved_tensors  # type: ignore[attr-defined]
    left, right, chunk, scale = ctx.reach  # type: ignore[attr-defined]
    of_query, of_key, of_value, of_sinks = varlen_attention_backward(
        gradient, query, key, value, output, lse, marks, sinks, left, right, chunk, scale
    )
    return of_query, of_key, of_value, None, None if sinks is None else of_sinks, None, None, None, None


varlen_attention.register_autograd(_gradients, setup_context=_keep)
