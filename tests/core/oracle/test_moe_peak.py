"""The peak of a real training step of models with experts and latent attention against `estimate`: within 0.1 %."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from loadgauge import Layout, estimate
from loadgauge.core.families import from_dict
from torch_models import Built
from torch_peak import measured_peak

SEQ, BATCH, TOLERANCE = 256, 2, 1e-3
SIZES = {
    "vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "num_experts_per_tok": 2, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 192, "num_local_experts": 4},
    "qwen2_moe": {
        "moe_intermediate_size": 96, "shared_expert_intermediate_size": 160, "num_experts": 4,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {"head_dim": 32, "moe_intermediate_size": 96, "num_experts": 4, "norm_topk_prob": True},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 256,
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    },
    "gpt_oss": {"head_dim": 32, "intermediate_size": 96, "num_local_experts": 4, "sliding_window": 64},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("model_type", "attention"),
    # The attention sinks of GPT-OSS have no other way than eager on a CPU.
    [(name, how) for name in CASES for how in ("eager", "sdpa") if (name, how) != ("gpt_oss", "sdpa")],
)
def test_peak(model_type: str, attention: str, dtype: torch.dtype) -> None:
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **CASES[model_type]})
    config._attn_implementation, config._experts_implementation = attention, "grouped_mm"
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()
    built = Built(model, config, from_dict(config.to_dict()), attention, dtype)
    layout = Layout(micro_batch=BATCH, global_batch=BATCH, seq_len=SEQ)
    memory = estimate(built.spec, layout, built.training(optimizer="sgd")).memory
    assert measured_peak(built, SEQ, BATCH, "sgd") == pytest.approx(memory.allocated, rel=TOLERANCE)
