"""The CPU operator against SDPA with a dense mask, in float64; masks read off functions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn.functional import scaled_dot_product_attention, softmax
from transformers import masking_utils as hf_masks

from loadgauge.train.layers import boundaries
from loadgauge.train.layers.cpu_varlen import LONGEST_BLOCK, blocks, varlen_attention
from loadgauge.train.layers.masks import Reach, reach_of


def dense(lengths: list[int], reach: Reach) -> torch.Tensor:
    index = torch.cat([torch.arange(length) for length in lengths])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    same = sequence[:, None] == sequence[None]
    return same & reach.sees(index[:, None], index[None])


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    if sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3).transpose(1, 2)
    scores = (q @ k.mT * 0.3).masked_fill(~mask, -torch.inf)
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)], -1)
    return (softmax(scores, -1)[..., :-1] @ v).transpose(1, 2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    groups=st.sampled_from([(4, 4), (4, 2), (4, 1), (6, 2)]),
    widths=st.sampled_from([(8, 8), (12, 6), (6, 12)]),
    reach=st.sampled_from(
        [
            Reach(),
            Reach(right=-1),
            Reach(left=0),
            Reach(left=5),
            Reach(5, 3),
            Reach(0, 7),
            Reach(left=40),
            Reach(chunk=7),
        ]
    ),
    sink=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_dense_attention(
    lengths: list[int], groups: tuple[int, int], widths: tuple[int, int], reach: Reach, sink: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = random(1, total, groups[0], widths[0]).transpose(1, 2).requires_grad_()
    k = random(1, total, groups[1], widths[0]).transpose(1, 2).requires_grad_()
    v = random(1, total, groups[1], widths[1]).transpose(1, 2).requires_grad_()
    sinks = random(groups[0]).requires_grad_() if sink else None
    marks = boundaries.from_lengths(lengths).marks(q.device)
    output, _ = varlen_attention(q, k, v, marks, sinks, reach.left, reach.right, reach.chunk, 0.3)
    expected = reference(q, k, v, dense(lengths, reach), sinks)
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
    weights = random(*output.shape)
    for found, wanted in zip(
        torch.autograd.grad(output, inputs, weights), torch.autograd.grad(expected, inputs, weights), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11)


def test_a_window_longer_than_a_block() -> None:
    lengths, reach = [LONGEST_BLOCK * 2 + 77, 3], Reach(left=LONGEST_BLOCK + 9)
    q, k, v = (torch.randn(1, 1, sum(lengths), 4, dtype=torch.float64) for _ in range(3))
    marks = boundaries.from_lengths(lengths).marks(q.device)
    output, _ = varlen_attention(q, k, v, marks, None, reach.left, reach.right, 0, 0.3)
    torch.testing.assert_close(output, reference(q, k, v, dense(lengths, reach), None), rtol=0, atol=1e-12)


def test_windows_cost_no_square() -> None:
    """Pairs visited under a window grow with the length, not with its square."""

    def visited(length: int) -> int:
        return sum((b.q1 - b.q0) * (b.k1 - b.k0) for b in blocks([length], 63, 0, 0))

    assert visited(64_000) / visited(32_000) == pytest.approx(2, rel=0.01)


def test_the_operator_is_registered_right() -> None:
    """Schema, fake tensors and autograd, by PyTorch's own check."""
    q = torch.randn(1, 5, 4, 8).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(1, 5, 2, 8).transpose(1, 2).requires_grad_() for _ in range(2))
    marks = boundaries.from_lengths([2, 3]).marks(q.device)
    torch.library.opcheck(varlen_attention, (q, k, v, marks, None, -1, 0, 0, 0.3))
    torch.library.opcheck(varlen_attention, (q, k, v, marks, torch.randn(4, requires_grad=True), 2, 0, 0, 0.3))


def test_keys_and_values_are_not_expanded() -> None:
    """What is kept for backward: query, key, value, output, and one number a head and token."""
    tokens, heads, groups, width = 50, 8, 2, 16
    q = torch.randn(1, heads, tokens, width, requires_grad=True)
    k, v = (torch.randn(1, groups, tokens, width, requires_grad=True) for _ in range(2))
    marks = boundaries.from_lengths([20, 30]).marks(q.device)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        varlen_attention(q, k, v, marks, None, -1, 0, 0, 0.3)
    assert sum(kept.values()) == 4 * tokens * (2 * heads * width + 2 * groups * width + heads) + tokens


@pytest.mark.parametrize(
    ("function", "reach"),
    [
        (hf_masks.causal_mask_function, Reach()),
        (hf_masks.bidirectional_mask_function, Reach(right=-1)),
        (hf_masks.sliding_window_causal_mask_function(4096), Reach(left=4095)),
        (hf_masks.sliding_window_causal_mask_function(1), Reach(left=0)),
        (hf_masks.chunked_causal_mask_function(8192, torch.zeros(1, dtype=int)), Reach(chunk=8192)),
        (hf_masks.chunked_causal_mask_function(3, torch.zeros(1, dtype=int)), Reach(chunk=3)),
        *(
            (hf_masks.sliding_window_bidirectional_mask_function(16), Reach(16, 16))
            for name in ("sliding_window_bidirectional_mask_function",)
            if hasattr(hf_masks, name)  # not in the oldest versions
        ),
    ],
)
def test_reach_is_read_off_the_functions_of_transformers(function: object, reach: Reach) -> None:
    assert reach_of(function) == reach  # type: ignore[arg-type]


def test_any_other_mask_is_kept_as_a_function() -> None:
    def strided(batch: object, head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & ((query - key) % 3 == 0)

    reach = reach_of(strided)  # type: ignore[arg-type]
    assert reach.function is strided
    assert reach.dense(4, torch.device("cpu")).int().tolist() == [
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 0, 1, 0],
        [1, 0, 0, 1],
    ]  # type: ignore[union-attr]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_boundaries_survive_every_form(lengths: list[int]) -> None:
    where = boundaries.from_lengths(lengths)
    device = torch.device("cpu")
    marks = where.marks(device)
    assert boundaries.is_marks(marks, sum(lengths))
    assert boundaries.read(marks.clone()) == where
    assert boundaries.from_positions(where.positions(device)) == where
    assert boundaries.from_positions(where.positions(device) + 2) == where
    assert boundaries.from_cumulative(where.cumulative(device), sum(lengths)) == where
    assert torch.equal(boundaries.marks_from_cumulative(where.cumulative(device), sum(lengths)), marks)
