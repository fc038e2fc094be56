"""FLOPs of a whole model with adapters against PyTorch's counter over PEFT's modules: the first layer's input has no gradient."""

from __future__ import annotations

from typing import Any

import msgspec
import peft
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from loadgauge.core.definitions.model.lora import ALL_TARGETS, Lora
from loadgauge.core.estimate.time.flops import microbatch_flops
from torch_models import build

S, B, RANK = 24, 2, 4
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CASES: dict[str, tuple[tuple[str, ...], frozenset[str], bool]] = {
    "every linear layer": (LINEARS, ALL_TARGETS, False),
    "query and value": (("q_proj", "v_proj"), frozenset({"query", "value"}), False),
    "every linear layer, input gradients": (LINEARS, ALL_TARGETS, True),
    "the embedding too": ((*LINEARS, "embed_tokens"), ALL_TARGETS | {"embedding"}, False),
}


@pytest.mark.parametrize(("modules", "targets", "inputs"), CASES.values(), ids=CASES.keys())
def test_a_step_with_adapters(modules: tuple[str, ...], targets: frozenset[str], inputs: bool) -> None:
    built = build("llama-gqa", "eager", torch.float32)
    adapted: Any = peft.get_peft_model(built.model, peft.LoraConfig(r=RANK, target_modules=list(modules)))
    if inputs:
        built.model.enable_input_require_grads()
    ids = built.ids(S, B)
    with FlopCounterMode(display=False) as forward:
        loss = adapted(ids, labels=ids).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    view = msgspec.structs.replace(
        built.view(S, B), lora=Lora(rank=RANK, targets=targets, peft=True), input_gradients=inputs
    )
    flops = microbatch_flops(built.spec, view)
    assert (flops.forward, flops.backward) == (forward.get_total_flops(), backward.get_total_flops())
