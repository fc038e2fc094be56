"""Multi-head latent attention against transformers' DeepSeek-V3: parameters, saved bytes by storage, and FLOPs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek  # noqa: E402

from loadgauge.core.definitions.model.kernels import Dtypes, Kernels  # noqa: E402
from loadgauge.core.definitions.model.model import LatentAttention  # noqa: E402
from loadgauge.core.definitions.training.frameworks import TRANSFORMERS  # noqa: E402
from loadgauge.core.families import from_dict  # noqa: E402
from loadgauge.core.families.reference import deepseek_block  # noqa: E402
from loadgauge.core.layers import View, block_layer  # noqa: E402
from loadgauge.core.layers.attention.mla import latent_attention  # noqa: E402
from loadgauge.core.layers.operations.builder import Builder  # noqa: E402
from loadgauge.core.layers.operations.operations import Layer  # noqa: E402
from meta_models import usual_class  # noqa: E402
from recorded import flops, kept_bytes, stored  # noqa: E402

SEQ, BATCH, HIDDEN, HEADS, LATENT, NOPE, ROPE = 16, 2, 64, 4, 20, 12, 4
DTYPES = [torch.bfloat16, torch.float32]
# Without FlashAttention values may have a width of their own. PyTorch's flash kernel for CPUs wants that of the keys.
FORMS = [("eager", 10), ("eager", 16), ("sdpa", 16)]


def config(attention: str, query_rank: int | None, value_width: int, *, bias: bool = False) -> Any:
    made = transformers.DeepseekV3Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=query_rank,
        kv_lora_rank=LATENT, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=value_width,
        moe_intermediate_size=48, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        n_shared_experts=2, first_k_dense_replace=0, max_position_embeddings=64, attention_bias=bias,
    )  # fmt: skip
    made._attn_implementation, made._experts_implementation = attention, "grouped_mm"
    return made


def kernels(attention: str, dtype: torch.dtype) -> Kernels:
    return msgspec.structs.replace(
        TRANSFORMERS, attention="eager" if attention == "eager" else "flash", dtypes=Dtypes(activation=dtype.itemsize)
    )


def listed(spec: LatentAttention, how: Kernels) -> Layer:
    build = Builder(View.of(SEQ, BATCH, kernels=how))
    latent_attention(build, build.residual("input", HIDDEN), spec, HIDDEN)
    return build.layer("attention")


def agree(layer: Layer, module: torch.nn.Module, x: torch.Tensor, tables: Any, **more: Any) -> None:
    def call() -> Any:
        return module(x, attention_mask=None, position_embeddings=tables, **more)

    kept = kept_bytes(module, call, tables if isinstance(tables, tuple) else (tables,))
    assert stored(layer) == kept
    assert layer.saved() == sum(kept)
    assert layer.params == sum(parameter.numel() for parameter in module.parameters())
    backward = layer.backward_flops + sum(operation.rerun_flops for operation in layer)
    assert flops(call) == (layer.forward_flops, backward)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("query_rank", [24, None])
@pytest.mark.parametrize(("attention", "value_width"), FORMS)
def test_attention(attention: str, value_width: int, query_rank: int | None, bias: bool, dtype: torch.dtype) -> None:
    one = config(attention, query_rank, value_width, bias=bias)
    module = deepseek.DeepseekV3Attention(one, 0).to(dtype).train()
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=dtype, requires_grad=True)
    tables = deepseek.DeepseekV3RotaryEmbedding(one)(x, torch.arange(SEQ)[None])
    spec = LatentAttention(
        num_attention_heads=HEADS, q_lora_rank=query_rank, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE, v_head_dim=value_width, bias=bias,
    )  # fmt: skip
    agree(listed(spec, kernels(attention, dtype)), module, x, tables)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_rank", [24, None])
@pytest.mark.parametrize(("attention", "value_width"), FORMS)
def test_a_whole_layer(attention: str, value_width: int, query_rank: int | None, dtype: torch.dtype) -> None:
    one = config(attention, query_rank, value_width)
    module = deepseek.DeepseekV3DecoderLayer(one, 0).to(dtype).train()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    gate = module.mlp.gate
    gate.e_score_correction_bias.data = gate.e_score_correction_bias.data.float()  # as transformers loads it
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=dtype, requires_grad=True)
    tables = deepseek.DeepseekV3RotaryEmbedding(one)(x, torch.arange(SEQ)[None])
    block = deepseek_block(HIDDEN, HEADS, query_rank, LATENT, NOPE, ROPE, value_width, 8, 2, 48, 96)
    layer = block_layer(block, HIDDEN, View.of(SEQ, BATCH, kernels=kernels(attention, dtype)))
    agree(layer, module, x, tables)


KIN = {
    "deepseek_v2": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "glm4_moe_lite": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "mistral4": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    "youtu": {"head_dim": ROPE},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("model_type", KIN)
def test_kin(model_type: str, dtype: torch.dtype) -> None:
    """Other families of the kind, as their configs are read; written out, where none needs a kernel."""
    one = transformers.AutoConfig.for_model(
        model_type, vocab_size=96, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, q_lora_rank=24, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
        v_head_dim=10, pad_token_id=0, **KIN[model_type],
    )  # fmt: skip
    one._attn_implementation = "eager"
    model = getattr(transformers, usual_class(model_type))._from_config(one)
    module = model.model.layers[0].self_attn.to(dtype).train()
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=dtype, requires_grad=True)
    tables = model.model.rotary_emb(x, torch.arange(SEQ)[None])
    spec = from_dict(one.to_dict()).blocks[0].attention
    assert isinstance(spec, LatentAttention)
    more = {"position_ids": torch.arange(SEQ)[None]} if spec.query_scale else {}
    agree(listed(spec, kernels("eager", dtype)), module, x, tables, **more)


def masked(model_type: str, attention: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A layer of a family whose queries look at tokens that an indexer chose, and how its config is read."""
    one = transformers.AutoConfig.for_model(
        model_type, vocab_size=96, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=24, kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=16, index_topk=8, index_n_heads=2, index_head_dim=8,
        first_k_dense_replace=2, pad_token_id=0,
    )  # fmt: skip
    one._attn_implementation, one.use_cache = attention, False
    return getattr(transformers, usual_class(model_type))._from_config(one).to(dtype).train(), from_dict(one.to_dict())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_chosen_tokens(model_type: str, attention: str, dtype: torch.dtype) -> None:
    """The indexer's products are counted, forward only; nothing of it is kept but the mask of its choice."""
    model, spec = masked(model_type, attention, dtype)
    module, mixer = model.model.layers[0].self_attn, spec.blocks[0].attention
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=dtype, requires_grad=True)
    tables = model.model.rotary_emb(x, torch.arange(SEQ)[None])
    causal = torch.full((SEQ, SEQ), torch.finfo(dtype).min, dtype=dtype).triu(1).expand(BATCH, 1, SEQ, SEQ)
    layer = listed(mixer, kernels(attention, dtype))

    def call() -> Any:
        return module(x, attention_mask=causal, position_embeddings=tables)

    kept = kept_bytes(module, call, (*tables, causal))
    assert stored(layer) == kept
    assert layer.params == sum(parameter.numel() for parameter in module.parameters())
    if attention == "eager":
        backward = layer.backward_flops + sum(operation.rerun_flops for operation in layer)
        assert flops(call) == (layer.forward_flops, backward)


def test_the_indexer_has_no_gradients() -> None:
    model, spec = masked("deepseek_v32", "eager", torch.float32)
    ids = torch.randint(0, 96, (BATCH, SEQ))
    model(input_ids=ids, labels=ids).loss.backward()
    without = sum(one.numel() for one in model.model.layers[0].parameters() if one.grad is None)
    layer = block_layer(spec.blocks[0], HIDDEN, View.of(SEQ, BATCH))
    assert without == sum(weight.numel for weight in layer.weights if not weight.trainable) > 0
