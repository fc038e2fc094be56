"""The peak of the layers' forward alone, measured on a CPU, against the moment "forward of layer N".

The moment counts what is alive between operations, what callers hold included. What a module makes inside of one
(GPT-2's activation, a checkpointed layer's norms) is more, and is where another moment is the peak (test_peak).
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers
from test_moe_peak import CASES, SIZES
from torch.profiler import ProfilerActivity, profile

from loadgauge import Layout
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.phases import moments
from loadgauge.core.estimate.memory.rank_memory import MemoryModel, stages
from loadgauge.core.families import from_dict
from torch_models import Built, build
from torch_peak import highest

TOLERANCE = 1e-3
OF_EXPERTS = {"mixtral": 3e-3, "qwen3_moe": 3e-3, "deepseek_v3": 4e-3, "qwen2_moe": 3e-2}
"""Indices and offsets that live for a while; of Qwen2-MoE, up to 2.5 % that are not accounted for."""
SEQ, BATCH = 256, 2
WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "vocab_size": 64}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
attentions = pytest.mark.parametrize("attention", ["eager", "sdpa"])


def measured(built: Built) -> int:
    """Largest number of bytes allocated while the embedding and the layers run forward."""
    ids = built.ids(SEQ, BATCH)
    body = getattr(built.model.base_model, "decoder", built.model.base_model)
    for name in ("norm", "ln_f", "final_layer_norm"):
        if hasattr(body, name):
            norm = getattr(body, name)
            setattr(body, name, torch.nn.Identity())
    parameters = {parameter.data_ptr(): parameter.nbytes for parameter in built.model.parameters()}
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        found = built.model.base_model(ids)
        del found
    parameters.update((parameter.data_ptr(), parameter.nbytes) for parameter in norm.parameters())
    return sum(parameters.values()) + ids.nbytes + highest(profiler)


def check(built: Built, tolerance: float) -> None:
    layout = Layout(micro_batch=BATCH, global_batch=BATCH, seq_len=SEQ)
    how = built.training(optimizer="sgd")
    facts = MemoryModel(built.spec, layout, how, view_of(layout, how))
    (stage,) = stages(built.spec, layout)
    want = max(moment.total for moment in moments(facts, stage) if moment.name.startswith("forward"))
    assert measured(built) == pytest.approx(want, rel=tolerance)


@dtypes
@attentions
@pytest.mark.parametrize("name", ["llama-gqa", "llama-mqa", "qwen3", "phi3"])
def test_dense(name: str, attention: str, dtype: torch.dtype) -> None:
    keys: dict[str, Any] = {"head_dim": 32} if name == "qwen3" else {}
    check(build(name, attention, dtype, **{**WIDE, **keys}), TOLERANCE)


@dtypes
@attentions
@pytest.mark.parametrize("model_type", OF_EXPERTS)
def test_experts(model_type: str, attention: str, dtype: torch.dtype) -> None:
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **CASES[model_type]})
    config._attn_implementation, config._experts_implementation = attention, "grouped_mm"
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()
    check(Built(model, config, from_dict(config.to_dict()), attention, dtype), OF_EXPERTS[model_type])
