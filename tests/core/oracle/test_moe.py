"""Mixtures of experts against transformers' modules: parameters, saved bytes storage by storage, and FLOPs.

There are no differences, but for Llama 4, which has a test of its own, and for one number an expert of the
auxiliary loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE  # noqa: E402
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss  # noqa: E402
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe  # noqa: E402
from transformers.models.mixtral import modeling_mixtral as mixtral  # noqa: E402
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock  # noqa: E402
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe  # noqa: E402

from loadgauge.core.definitions.model.kernels import Dtypes, Kernels  # noqa: E402
from loadgauge.core.definitions.model.lora import Lora  # noqa: E402
from loadgauge.core.definitions.model.model import Attention, Block, Mlp, Moe, Norm  # noqa: E402
from loadgauge.core.definitions.training.frameworks import TRANSFORMERS  # noqa: E402
from loadgauge.core.families.reference import mixtral_block  # noqa: E402
from loadgauge.core.layers import View, block_layer  # noqa: E402
from loadgauge.core.layers.feed_forward.moe import moe  # noqa: E402
from loadgauge.core.layers.operations.builder import Builder  # noqa: E402
from loadgauge.core.layers.operations.operations import Layer  # noqa: E402
from recorded import flops, kept_bytes, stored  # noqa: E402

SEQ, BATCH, HIDDEN = 16, 2, 64
TOKENS = SEQ * BATCH
DTYPES = [torch.bfloat16, torch.float32]


@dataclass(frozen=True)
class Case:
    """A module of transformers, made small, and how the list describes it."""

    module: Callable[[Any], torch.nn.Module]
    config: Any
    spec: Moe

    def build(self, dtype: torch.dtype, *, frozen: bool = False) -> torch.nn.Module:
        return initialised(self.module, self.config, dtype, frozen=frozen)


def initialised(make: Callable[[Any], Any], config: Any, dtype: torch.dtype, *, frozen: bool = False) -> Any:
    config._experts_implementation = "grouped_mm"
    module = make(config).to(dtype).train()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.requires_grad_(not frozen)
    for name, buffer in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()  # as transformers loads it, whatever the dtype
    return module


CASES = {
    "mixtral": Case(
        mixtral.MixtralSparseMoeBlock,
        transformers.MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=96, num_local_experts=8, num_experts_per_tok=2
        ),
        Moe(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96, weights_float32=True),
    ),
    "qwen2_moe": Case(
        Qwen2MoeSparseMoeBlock,
        transformers.Qwen2MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=48, shared_expert_intermediate_size=80, num_experts=6,
            num_experts_per_tok=3, norm_topk_prob=False,
        ),
        Moe(
            num_experts=6, num_experts_per_tok=3, moe_intermediate_size=48, norm_topk_prob=False,
            shared=Mlp(intermediate_size=80), shared_gate=True,
        ),
    ),
    "qwen3_moe": Case(
        qwen3_moe.Qwen3MoeSparseMoeBlock,
        transformers.Qwen3MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=56, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True
        ),
        Moe(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=56),
    ),
    "deepseek_v3": Case(
        DeepseekV3MoE,
        transformers.DeepseekV3Config(
            hidden_size=HIDDEN, moe_intermediate_size=48, n_routed_experts=8, num_experts_per_tok=3, n_group=2,
            topk_group=1, n_shared_experts=2,
        ),
        Moe(
            num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, router_score="sigmoid",
            router_float32=True, weights_float32=True, shared=Mlp(intermediate_size=96),
        ),
    ),
    "gpt_oss": Case(
        gpt_oss.GptOssMLP,
        transformers.GptOssConfig(
            hidden_size=HIDDEN, intermediate_size=96, num_local_experts=8, num_experts_per_tok=2
        ),
        Moe(
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96, activation="clamped_swiglu",
            expert_bias=True, router_bias=True, router_score="softmax_of_chosen", scores_float32=False,
        ),
    ),
}  # fmt: skip


def listed(spec: Moe, kernels: Kernels, *, lora: Lora | None = None) -> Layer:
    build = Builder(View.of(SEQ, BATCH, kernels=kernels, lora=lora))
    moe(build, build.residual("input", HIDDEN), spec, HIDDEN)
    return build.layer("moe")


def modules(dtype: torch.dtype) -> Kernels:
    """Those of a CPU, whose fused attention takes float32 with fewer key heads than heads."""
    return msgspec.structs.replace(TRANSFORMERS, writes_groups=False, dtypes=Dtypes(activation=dtype.itemsize))


def inputs(dtype: torch.dtype) -> torch.Tensor:
    """Not a leaf: autocast would cache its cast, as it does for no activation."""
    return torch.randn(BATCH, SEQ, HIDDEN, dtype=dtype, requires_grad=True).clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kept_bytes(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    module, x = case.build(dtype), inputs(dtype)
    layer = listed(case.spec, modules(dtype))
    assert stored(layer) == kept_bytes(module, lambda: module(x))
    assert layer.params == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", CASES)
def test_kept_bytes_of_frozen_experts(name: str) -> None:
    case = CASES[name]
    module, x = case.build(torch.bfloat16, frozen=True), inputs(torch.bfloat16)
    layer = listed(case.spec, modules(torch.bfloat16), lora=Lora(rank=1, targets=frozenset()))
    assert stored(layer) == kept_bytes(module, lambda: module(x))


@pytest.mark.parametrize("name", CASES)
def test_kept_bytes_under_autocast(name: str) -> None:
    """The experts run in float32: PyTorch's grouped product is not on autocast's list.

    The 16-bit copies of the other matrices, which autocast caches, are counted with the weights.
    """
    case = CASES[name]
    module, x = case.build(torch.float32), inputs(torch.float32)
    kernels = msgspec.structs.replace(TRANSFORMERS, dtypes=Dtypes(activation=2, residual=4))

    def call() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)

    matrices = [one for name, one in module.named_parameters() if one.ndim == 2 and not name.endswith("_bias")]
    copies = [2 * matrix.numel() for matrix in matrices]
    assert sorted([*stored(listed(case.spec, kernels)), *copies]) == kept_bytes(module, call)


@pytest.mark.parametrize("name", CASES)
def test_flops(name: str) -> None:
    case = CASES[name]
    module, x = case.build(torch.bfloat16), inputs(torch.bfloat16)
    layer = listed(case.spec, modules(torch.bfloat16))
    assert flops(lambda: module(x)) == (layer.forward_flops, layer.backward_flops)


# -- whole layers, the auxiliary loss, Llama 4 -------------------------------------------------------------------------

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
LAYERS = {
    "mixtral": (
        mixtral.MixtralDecoderLayer, mixtral.MixtralRotaryEmbedding,
        transformers.MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=96, num_local_experts=8, num_experts_per_tok=2, **HEADS
        ),
        mixtral_block(HIDDEN, 8, 2, 8, 8, 2, 96),
    ),
    "qwen3_moe": (
        qwen3_moe.Qwen3MoeDecoderLayer, qwen3_moe.Qwen3MoeRotaryEmbedding,
        transformers.Qwen3MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=56, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True,
            decoder_sparse_step=1, mlp_only_layers=[], **HEADS,
        ),
        Block(
            attention=Attention(**HEADS, qk_norm=Norm("rmsnorm")), mlp=CASES["qwen3_moe"].spec, norm=Norm("rmsnorm")
        ),
    ),
    "gpt_oss": (
        gpt_oss.GptOssDecoderLayer, gpt_oss.GptOssRotaryEmbedding,
        transformers.GptOssConfig(
            hidden_size=HIDDEN, intermediate_size=96, num_local_experts=8, num_experts_per_tok=2, attention_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **HEADS,
        ),
        Block(
            attention=Attention(**HEADS, qkv_bias=True, output_bias=True, sinks=True, softmax_float32=False),
            mlp=CASES["gpt_oss"].spec, norm=Norm("rmsnorm", gain_float32=True),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_whole_layer(name: str, attention: str, dtype: torch.dtype) -> None:
    """Kept bytes, parameters and FLOPs; the tables of rotary positions belong to another layer."""
    if (name, attention) == ("gpt_oss", "sdpa"):
        pytest.skip("transformers has no scaled_dot_product_attention with sinks")
    make, rotary, config, block = LAYERS[name]
    config._attn_implementation = attention
    module = initialised(lambda one: make(one, 0), config, dtype)
    x = inputs(dtype)
    tables = rotary(config)(x, torch.arange(SEQ)[None])
    kernels = msgspec.structs.replace(modules(dtype), attention="eager" if attention == "eager" else "flash")
    layer = block_layer(block, HIDDEN, View.of(SEQ, BATCH, kernels=kernels))

    def call() -> Any:
        return module(x, attention_mask=None, position_embeddings=tables)

    assert stored(layer) == kept_bytes(module, call, tables)
    assert layer.params == sum(parameter.numel() for parameter in module.parameters())
    backward = layer.backward_flops + sum(operation.rerun_flops for operation in layer)
    assert flops(call) == (layer.forward_flops, backward)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_auxiliary_loss_keeps_the_scores(dtype: torch.dtype) -> None:
    """Of every layer; and, once for the model, 4 bytes an expert, which are not counted."""
    layers, ids = 3, torch.randint(0, 100, (BATCH, SEQ))
    kept = {}
    for wanted in (False, True):
        config = transformers.MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=96, num_local_experts=8, num_experts_per_tok=2, vocab_size=100,
            num_hidden_layers=layers, output_router_logits=wanted, **HEADS,
        )  # fmt: skip
        module = transformers.MixtralForCausalLM(config).to(dtype).train()
        kept[wanted] = sum(kept_bytes(module, lambda module=module: module(input_ids=ids, labels=ids).loss))
    with_loss, without = (
        listed(CASES["mixtral"].spec, msgspec.structs.replace(modules(dtype), router_aux_loss=wanted)).saved()
        for wanted in (True, False)
    )
    assert kept[True] - kept[False] == layers * (with_loss - without) + 4 * 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_llama4_computes_every_expert_for_every_token(dtype: torch.dtype) -> None:
    """transformers' module is the list with K = E: E/K times the work and the rows of a routed one.

    It weighs what goes into the experts, not what comes out, which is as large; and it keeps the order of no rows.
    """
    experts, chosen = 8, 1
    config = transformers.Llama4TextConfig(
        hidden_size=HIDDEN, intermediate_size=96, num_local_experts=experts, num_experts_per_tok=chosen
    )
    module, x = initialised(Llama4TextMoe, config, dtype), inputs(dtype)
    spec = Moe(
        num_experts=experts, num_experts_per_tok=experts, moe_intermediate_size=96, router_score="sigmoid",
        norm_topk_prob=False, shared=Mlp(intermediate_size=96),
    )  # fmt: skip
    layer = listed(spec, modules(dtype))
    order = 8 * TOKENS * (4 * experts - chosen) + 4 * experts
    assert layer.saved() - order == sum(kept_bytes(module, lambda: module(x)))
    assert layer.params == sum(parameter.numel() for parameter in module.parameters())
    assert flops(lambda: module(x)) == (layer.forward_flops, layer.backward_flops)
