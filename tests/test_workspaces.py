"""Workspaces of matrix products: as published runs of tiny models show them, where little else is allocated."""

from __future__ import annotations

import pytest

from loadgauge import Layout, estimate, gpu, model, training

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
    assert found.total - without.total == pytest.approx(expected * MIB)
    assert sum(found.parts.values()) == pytest.approx(found.total)
    assert without.workspaces == 0
