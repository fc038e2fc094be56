"""LoRA on a frozen block of transformers, as PEFT does it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor, nn

from loadgauge.core.definitions.model.lora import Lora
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.operations.operations import Layer
from torch_models import build

PROJECTIONS = {
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
S, B, RANK = 24, 2, 8


class Adapted(nn.Module):
    """A frozen linear layer and its two low-rank matrices."""

    def __init__(self, base: nn.Linear, dropout: float) -> None:
        super().__init__()
        self.base = base
        self.dropout = dropout
        self.low = nn.Linear(base.in_features, RANK, bias=False, dtype=base.weight.dtype)
        self.high = nn.Linear(RANK, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        dropped = nn.functional.dropout(x, self.dropout, True) if self.dropout else x
        return self.base(x) + self.high(self.low(dropped)) * 2.0


class Frozen(msgspec.Struct):
    """A frozen block with adapters: how to run it, what is not an activation, and the list of its operations."""

    run: Callable[[Tensor], Tensor]
    own: list[Tensor]
    layer: Layer


def frozen(name: str, attention: str, dtype: torch.dtype, targets: frozenset[str], dropout: float) -> Frozen:
    """The second block of a small model, its matrices frozen and those in `targets` adapted."""
    built = build(name, attention, dtype)
    block = built.layers[1].requires_grad_(False)
    for path, module in list(block.named_modules()):
        parent, _, last = path.rpartition(".")
        if PROJECTIONS.get(last) in targets:
            setattr(block.get_submodule(parent), last, Adapted(module, dropout))
    tables = built.model.model.rotary_emb(torch.empty(0, dtype=dtype), torch.arange(S)[None])
    mask = torch.zeros(B, 1, S, S, dtype=dtype) if attention == "eager" else None

    def run(x: Tensor) -> Tensor:
        return block(x, attention_mask=mask, position_embeddings=tables)

    lora = Lora(rank=RANK, targets=targets, dropout=dropout)
    view = View.of(S, B, kernels=built.view(S, B).kernels, lora=lora)
    layer = block_layer(built.spec.blocks[0], built.spec.hidden_size, view)
    return Frozen(run, [*block.parameters(), *tables], layer)
