"""The experts of every family, as its config is read, against transformers' module: kept bytes storage by storage."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import nn  # noqa: E402

from loadgauge.core.base.errors import ConfigError  # noqa: E402
from loadgauge.core.definitions.model.kernels import Dtypes  # noqa: E402
from loadgauge.core.definitions.model.model import Moe  # noqa: E402
from loadgauge.core.definitions.training.frameworks import TRANSFORMERS  # noqa: E402
from loadgauge.core.families import from_dict  # noqa: E402
from loadgauge.core.layers import View  # noqa: E402
from loadgauge.core.layers.feed_forward.moe import moe  # noqa: E402
from loadgauge.core.layers.operations.builder import Builder  # noqa: E402
from meta_models import classed, usual_class  # noqa: E402
from recorded import kept_bytes, stored  # noqa: E402

SEQ, BATCH, HIDDEN, EXPERTS, CHOSEN = 16, 2, 64, 8, 2
TOKENS = SEQ * BATCH
SMALL = {
    "vocab_size": 96, "hidden_size": HIDDEN, "intermediate_size": 112, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 128,
    "moe_intermediate_size": 48, "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_k": CHOSEN, "moe_topk": CHOSEN, "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1, "n_shared_experts": 2, "shared_expert_intermediate_size": 80, "shared_intermediate_size": 80,
    "first_k_dense_replace": 0, "decoder_sparse_step": 1, "mlp_only_layers": [], "q_lora_rank": 24,
    "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ELSEWHERE = {
    "deepseek_v4": "its blocks are compared whole, in test_streams.py",
    "dbrx": "its experts are run one after the other",
    "llama4_text": "has a test of its own",
    "longcat_flash": "its experts are run one after the other",
    "kimi_k2": "is DeepSeek-V3's module",
    "phimoe": "its router is sampled (SparseMixer), and keeps more of the scores",
}
OWN = {"mimo_v2_flash": {"num_key_value_heads": 2}}
"""Layers with a window have twice the key-value heads."""
NEEDY = {"deepseek_v2", "dots1"}
"""Their configs must say how many experts there are."""
BESIDE = {"granitemoeshared", "granitemoehybrid"}
"""The shared experts are a module beside the routed ones."""
MORE = {"ernie4_5_moe": [4 * TOKENS]}
"""What PyTorch keeps beyond the list: the sum of the chosen scores a second time, to be clamped from below."""
FEWER = {("hunyuan_v1_moe", torch.bfloat16): [4 * EXPERTS * HIDDEN]}
"""What the list keeps beyond PyTorch: a float32 copy of the router's matrix, which is in float32 itself here."""


def families() -> list[str]:
    """Families that have experts. Where a text model is a part, it is of another family."""
    found = []
    for model_type in classed():
        try:
            spec = from_dict({"model_type": model_type}, class_defaults=True)
        except ConfigError:
            found += [model_type] if model_type in NEEDY else []
            continue
        found += [model_type] if any(isinstance(block.mlp, Moe) for block in spec.blocks) else []
    return [
        one for one in found if one == "kimi_k2" or not hasattr(transformers.AutoConfig.for_model(one), "text_config")
    ]


def small(model_type: str) -> Any:
    known = transformers.AutoConfig.for_model(model_type).to_dict()
    keys = {key: value for key, value in SMALL.items() if key in known or key == "n_routed_experts"}
    return transformers.AutoConfig.for_model(model_type, **{**keys, **OWN.get(model_type, {})})


@functools.cache
def experts_of(model_type: str) -> tuple[nn.Module, Moe]:
    """The module that has the experts, and how the list describes it."""
    config = small(model_type)
    spec = next(block.mlp for block in from_dict(config.to_dict()).blocks if isinstance(block.mlp, Moe))
    if model_type in BESIDE:
        spec = msgspec.structs.replace(spec, shared=None)
    config._experts_implementation = "grouped_mm"
    model = getattr(transformers, usual_class(model_type))._from_config(config)
    module = next(one for one in model.modules() if "experts" in dict(one.named_children()))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return module, spec


def in_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """As transformers loads it: the correction of the choice stays in float32, and Hunyuan's router."""
    module = module.to(dtype).train()
    for name, part in module.named_modules():
        if name == "gate.wg":
            part.float()
    for name, buffer in module.named_buffers():
        if "correction" in name:
            buffer.data = buffer.data.float()
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("model_type", families())
def test_kept_bytes(model_type: str, dtype: torch.dtype) -> None:
    if model_type in ELSEWHERE:
        pytest.skip(ELSEWHERE[model_type])
    module, spec = experts_of(model_type)
    module = in_dtype(module, dtype)
    build = Builder(View.of(SEQ, BATCH, kernels=msgspec.structs.replace(TRANSFORMERS, dtypes=Dtypes(dtype.itemsize))))
    moe(build, build.residual("input", HIDDEN), spec, HIDDEN)
    layer = build.layer("moe")
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=dtype, requires_grad=True)
    kept = Counter(kept_bytes(module, lambda: module(x)))
    kept.update(FEWER.get((model_type, dtype), []))
    assert Counter([*stored(layer), *MORE.get(model_type, [])]) == kept
    assert layer.params == sum(parameter.numel() for parameter in module.parameters())


def test_the_families_are_many() -> None:
    assert len(set(families()) - set(ELSEWHERE)) >= 20
