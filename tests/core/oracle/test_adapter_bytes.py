"""Bytes that PEFT's adapters move beside the matrix products, against the kernels of its own modules.

Adapters on every linear layer less adapters on two of them: what both have (norms, rotations, sums) is no part of it.
"""

from __future__ import annotations

from typing import Any

import pytest
from test_peft import USUAL, model_of

from kernel_bytes import kernel_bytes
from loadgauge.core.layers.block import block_layer
from loadgauge.core.layers.operations.operations import Operation
from torch_peft import BATCH, LINEARS, SIZES, prepared

S = 64
FEW = ("q_proj", "v_proj")
CASES = {
    "lora": {},
    "lora, 16-bit adapters": {"adapters": "bfloat16"},
    "qlora": {"quantised": "nf4"},
    "qlora, as peft": {"quantised": "nf4", "upcast": "all"},
}  # fmt: skip
SMALLEST = BATCH * S * SIZES["num_key_value_heads"] * SIZES["head_dim"]


def moved(operation: Operation) -> tuple[int, int]:
    if operation.gemms or operation.kind in ("view", "attention"):
        return 0, 0
    if operation.moves is not None:
        return operation.moves
    forward = operation.hbm_bytes()
    return forward, forward + (0 if operation.shares_gradient else sum(kept.nbytes for kept in operation.keeps))


def listed(how: dict[str, Any]) -> tuple[int, int]:
    model = model_of(how, S)
    layer = block_layer(model.model.blocks[0], model.model.hidden_size, model.view)
    forward, backward = zip(*map(moved, layer), strict=True)
    return sum(forward), sum(backward)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_adapters_move_what_pefts_kernels_move(case: dict[str, Any]) -> None:
    if case.get("quantised"):
        pytest.importorskip("bitsandbytes")
    ways = [USUAL | case | {"targets": targets} for targets in (LINEARS, FEW)]
    many, few = (kernel_bytes(prepared(S, **how), SMALLEST) for how in ways)
    of_many, of_few = map(listed, ways)
    for index, phase in enumerate(("forward", "backward")):
        seen = (many[phase] - few[phase]) / SIZES["num_hidden_layers"]
        assert of_many[index] - of_few[index] == pytest.approx(seen, rel=2e-3), phase
