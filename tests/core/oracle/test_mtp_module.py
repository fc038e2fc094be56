"""A multi-token prediction module put together from transformers' own parts: parameters, storages kept, FLOPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)

from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families import from_dict
from loadgauge.core.layers import block_layer, head_layer
from loadgauge.core.layers.embedding_head import prediction_layer
from recorded import flops, kept_bytes, stored
from torch_models import Built

SEQ, BATCH = 24, 2
CONFIG: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "moe_intermediate_size": 32, "intermediate_size": 112, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "pad_token_id": 0,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Prediction(nn.Module):
    """deepseek2024v3, section 2.2, with the names of the published weights; embedding and head are the model's."""

    def __init__(self, config: Any, embedding: nn.Embedding, head: nn.Linear) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (DeepseekV3RMSNorm(hidden, eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.embedding, self.head = embedding, head

    def forward(self, state: torch.Tensor, following: torch.Tensor, labels: torch.Tensor, angles: Any) -> torch.Tensor:
        joined = torch.cat([self.enorm(self.embedding(following)), self.hnorm(state)], dim=-1)
        found = self.layer(self.eh_proj(joined), position_embeddings=angles)
        logits = self.head(self.norm(found)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_module_of_transformers_parts(attention: str, dtype: torch.dtype) -> None:
    config = transformers.AutoConfig.for_model("deepseek_v3", **CONFIG)
    config._attn_implementation, config._experts_implementation = attention, "grouped_mm"
    embedding = nn.Embedding(config.vocab_size, config.hidden_size)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    module = Prediction(config, embedding, head).to(dtype).train()
    bias = module.layer.mlp.gate.e_score_correction_bias
    bias.data = bias.data.float()  # as transformers loads it
    spec = from_dict({**config.to_dict(), **CONFIG}).with_mtp()
    view = Built(module, config, spec, attention, dtype).view(SEQ, BATCH)
    layers = (
        prediction_layer(spec, view),
        block_layer(spec.blocks[spec.pattern[-1]], spec.hidden_size, view),
        head_layer(spec, view, shared=True),
    )

    own = [parameter for name, parameter in module.named_parameters() if not name.startswith(("embedding", "head"))]
    assert parameters(spec).mtp == sum(parameter.numel() for parameter in own)

    state = torch.randn(BATCH, SEQ, config.hidden_size, dtype=dtype, requires_grad=True)
    ids = torch.randint(0, config.vocab_size, (BATCH, SEQ))
    angles = DeepseekV3RotaryEmbedding(config)(state, torch.arange(SEQ)[None])

    def call() -> torch.Tensor:
        found: torch.Tensor = module(state, ids, ids.clone(), angles)
        return found

    # The loss keeps one number more, the sum of the classes' weights.
    assert kept_bytes(module, call, angles) == sorted([size for layer in layers for size in stored(layer)] + [4])
    once, back = flops(call)
    assert once == sum(layer.forward_flops for layer in layers)
    assert back == sum(layer.backward_flops + layer.recompute_flops() for layer in layers)
