"""Workspaces of matrix products: as published runs of tiny models show them, where little else is allocated."""

from __future__ import annotations

import msgspec
import pytest

from loadgauge import Layout, estimate, gpu, model, training
from loadgauge.core.estimate.memory.phases import Moment

MIB = 2**20


@pytest.mark.parametrize(
    ("card", "framework", "name", "expected"),
    [
        ("h100-sxm5-80gb", "megatron", "llama-3.1-8b", 2 * 32 + 32),
        ("h100-sxm5-80gb", "megatron", "mixtral-8x7b", 2 * 32 + 32 + 4 * 32),
        ("h100-sxm5-80gb", "torchtitan", "llama-3.1-8b", 2 * 32),
        ("a100-sxm4-80gb", "megatron", "llama-3.1-8b", 2 * 8.125 + 4),
        ("mi300x", "megatron", "llama-3.1-8b", 0),
    ],
)
def test_workspaces_are_allocated_and_stay(card: str, framework: str, name: str, expected: float):
    found = estimate(model(name), Layout(seq_len=128), training(framework), gpu(card)).memory
    without = estimate(model(name), Layout(seq_len=128), training(framework)).memory
    assert found.workspaces == expected * MIB
    assert found.allocated - without.allocated == pytest.approx(expected * MIB)
    assert sum(found.parts.values()) == pytest.approx(found.total)
    assert without.workspaces == 0


def inside(moment: Moment) -> float:
    """Bytes of a moment's tensors."""
    return moment.total - moment.parts["outside"]


def test_placeholders_of_weights_gradients() -> None:
    """One of each shape of a block's matrices, in 16 bits, and the head's while it runs backward: counted by hand."""
    spec = model("llama-3.1-8b")
    layout = Layout(seq_len=4096, tp=2, sequence_parallel=True, global_batch=4)
    kind = training("megatron")
    bare = msgspec.structs.replace(kind, kernels=msgspec.structs.replace(kind.kernels, gradient_placeholders=False))
    found, without = (estimate(spec, layout, one).memory for one in (kind, bare))
    h, kv, f = 4096, 1024, 14336
    block = 2 * (h * (h + 2 * kv) + h * h + 3 * h * f) // 2
    at = {moment.name: moment for moment in found.moments}
    for moment in without.moments:
        if moment.name.startswith("forward"):
            assert inside(at[moment.name]) - inside(moment) == pytest.approx(block)
    few = msgspec.structs.replace(layout, seq_len=128)
    there, bare_there = (
        next(moment for moment in estimate(spec, few, one).memory.moments if moment.name == "loss").parts["loss"]
        for one in (kind, bare)
    )
    # With few tokens the head's backward needs most for its placeholder, beside the gradients of logits and input.
    assert there == pytest.approx(2 * h * 128256 / 2 + 2 * 128 * 128256 / 2 + 2 * 128 * h, rel=0.01)
    # Without a placeholder the gradient itself is there, in 16 bits, until it is added to its buffer.
    assert bare_there == pytest.approx(there, rel=0.01)


def test_experts_share_a_placeholder() -> None:
    layout = Layout(seq_len=128, dp=8, ep=4, zero=1, global_batch=8)
    kind = training("megatron")
    bare = msgspec.structs.replace(kind, kernels=msgspec.structs.replace(kind.kernels, gradient_placeholders=False))
    found, without = (estimate(model("mixtral-8x7b"), layout, one).memory for one in (kind, bare))
    h, kv, f = 4096, 1024, 14336
    expected = 2 * (h * (h + 2 * kv) + h * h + 3 * h * f)
    layer = next(moment for moment in found.moments if moment.name.startswith("forward of layer"))
    other = next(moment for moment in without.moments if moment.name == layer.name)
    assert inside(layer) - inside(other) == pytest.approx(expected)
