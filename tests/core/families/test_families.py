"""Reading configs: what each family and each published model is made of, and keys that are not read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.model.model import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    Mlp,
    ModelSpec,
    Moe,
    ShortConvolution,
)
from loadgauge.core.families import from_dict, from_hf, model, models
from loadgauge.core.families.catalogue import config as shipped


def layer_windows(spec: ModelSpec) -> list[int | None]:
    """The window of each layer."""
    return [spec.blocks[index].attention.sliding_window for index in spec.pattern]


# What is read


def test_gpt2_has_learned_positions_one_fused_matrix_and_dropout() -> None:
    spec = model("gpt2-xl")
    (block,) = spec.blocks
    assert (spec.hidden_size, spec.num_hidden_layers, spec.learned_positions) == (1600, 48, 1024)
    assert (block.attention.num_attention_heads, block.attention.head_dim) == (25, 64)
    assert block.attention.fused_qkv
    assert not block.attention.rotary
    assert block.mlp.intermediate_size == 6400
    assert (block.dropout, block.attention.dropout, spec.embedding_dropout) == (0.1, 0.1, 0.1)
    assert spec.tie_word_embeddings


def test_opt_350m_has_narrow_embeddings_and_norms_after_the_sums() -> None:
    spec = model("opt-350m")
    assert (spec.embedding_size, spec.hidden_size, spec.learned_positions) == (512, 1024, 2050)
    assert spec.blocks[0].placement == "post"
    assert spec.final_norm is None
    other = model("opt-125m")
    assert (other.embedding_size, other.blocks[0].placement) == (None, "pre")
    assert other.final_norm is not None


def test_neox_is_parallel_unless_its_config_says_otherwise() -> None:
    assert model("pythia-1b").blocks[0].placement == "parallel"
    assert from_dict({**shipped("pythia-1b"), "use_parallel_residual": False}).blocks[0].placement == "pre"


def test_llama_grouped_heads_and_biases() -> None:
    attention = model("llama-3.1-70b").blocks[0].attention
    assert (attention.num_attention_heads, attention.num_key_value_heads, attention.head_dim) == (64, 8, 128)
    biased = from_dict({**shipped("llama-3.1-70b"), "attention_bias": True, "mlp_bias": True}).blocks[0]
    assert (biased.attention.qkv_bias, biased.attention.output_bias, biased.mlp.bias) == (True, True, True)
    qwen = model("qwen2-7b").blocks[0].attention
    assert (qwen.qkv_bias, qwen.output_bias) == (True, False)
    assert model("qwen3-8b").blocks[0].attention.qk_norm is not None
    phi = model("phi-3-mini").blocks[0]
    assert phi.attention.fused_qkv
    assert phi.mlp.fused_gate_up


def test_windows_by_layer() -> None:
    assert layer_windows(model("mistral-7b-v0.1")) == [4096] * 32
    assert layer_windows(model("mistral-7b-v0.3")) == [None] * 32
    assert layer_windows(model("gemma-2-2b")) == [4096, None] * 13
    assert layer_windows(model("gemma-3-1b")) == ([512] * 5 + [None]) * 4 + [512] * 2
    assert layer_windows(model("gemma-3-27b")).count(None) == 10
    assert layer_windows(model("qwen2-7b")) == [None] * 28
    switched_on = {**shipped("qwen2-7b"), "use_sliding_window": True, "max_window_layers": 20}
    assert layer_windows(from_dict(switched_on)) == [None] * 20 + [131072] * 8
    # A window of 128 is the token itself, 64 before it and 64 after it, as transformers' mask has it.
    assert layer_windows(model("modernbert-base"))[:4] == [None, 129, 129, None]


def test_modernbert_leaves_out_the_first_norm_only() -> None:
    spec = model("modernbert-base")
    assert [spec.blocks[index].first_norm for index in spec.pattern] == [False] + [True] * 21
    assert len(spec.blocks) == 3
    assert not spec.blocks[0].dropout_after_mlp


def test_gemma_soft_caps_and_norms() -> None:
    second, third = model("gemma-2-9b"), model("gemma-3-1b")
    assert second.blocks[0].attention.softcap
    assert second.head.softcap
    assert not third.blocks[0].attention.softcap
    assert not third.head.softcap
    assert {second.blocks[0].placement, third.blocks[0].placement} == {"sandwich"}
    assert third.blocks[0].attention.qk_norm == third.final_norm
    assert model("gemma-2b").blocks[0].mlp.activation == "gelu_pytorch_tanh"  # its file says gelu


def test_gemma_without_a_causal_mask_sees_both_ways() -> None:
    spec = from_dict({**shipped("gemma-3-1b"), "use_bidirectional_attention": True})
    assert not spec.blocks[0].attention.causal
    assert layer_windows(spec)[0] == 513  # 256 to each side, and the token itself


def test_encoders() -> None:
    bert, roberta, largest = model("bert-base"), model("roberta-large"), model("xlm-roberta-xxl")
    assert (bert.blocks[0].placement, bert.token_types, bert.max_position_embeddings) == ("post", 2, 512)
    assert bert.embedding_norm is not None
    assert bert.final_norm is None
    assert not bert.blocks[0].attention.causal
    assert (roberta.learned_positions, roberta.max_position_embeddings, roberta.token_types) == (514, 512, 1)
    assert largest.blocks[0].placement == "pre"
    assert largest.embedding_norm is None
    assert largest.final_norm is not None
    assert bert.head.transform
    assert bert.head.bias


def test_text_tower_of_a_multimodal_model() -> None:
    spec = model("gemma-3-4b")
    assert (spec.model_type, spec.hidden_size, spec.num_hidden_layers, spec.vocab_size) == ("gemma3", 2560, 34, 262208)
    assert "vision_config (not counted)" in spec.unused_keys
    inner = {**shipped("gemma-3-4b")["text_config"], "special": 1}
    assert "text_config.special" in from_dict({**shipped("gemma-3-4b"), "text_config": inner}).unused_keys


@pytest.mark.parametrize(
    ("model_type", "architecture", "kind"),
    [
        ("llama", "LlamaForCausalLM", "lm"),
        ("llama", "LLaMAForCausalLM", "lm"),
        ("llama", "LlamaModel", "none"),
        ("llama", "LlamaForSequenceClassification", "classifier"),
        ("bert", "BertModel", "pooler"),
        ("bert", "BertForMaskedLM", "lm"),
        ("modernbert", "ModernBertModel", "none"),
        ("roberta", "RobertaForSequenceClassification", "classifier"),
    ],
)
def test_heads(model_type: str, architecture: str, kind: str) -> None:
    assert from_dict({"model_type": model_type, "architectures": [architecture]}, class_defaults=True).head.kind == kind


@pytest.mark.parametrize(
    ("extra", "labels"), [({}, 2), ({"num_labels": 7}, 7), ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3)]
)
def test_labels(extra: dict[str, Any], labels: int) -> None:
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **extra}
    assert from_dict(config, class_defaults=True).head.num_labels == labels


def test_both_names_of_a_key() -> None:
    assert from_dict({"model_type": "gpt2", "hidden_size": 1536}, class_defaults=True).hidden_size == 1536
    assert (
        from_dict({"model_type": "gpt2", "hidden_size": 1536, "n_embd": 1536}, class_defaults=True).hidden_size == 1536
    )
    with pytest.raises(ConfigError, match="n_embd: is 1024 but hidden_size, another name of it, is 1536"):
        from_dict({"model_type": "gpt2", "hidden_size": 1536, "n_embd": 1024}, class_defaults=True)


# What is not read


def test_unread_keys_are_named_unless_they_cannot_matter() -> None:
    config = {
        **shipped("llama-3.1-8b"),
        "rope_scaling": {"factor": 8.0},
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0",
        "eos_token_id": [1, 2],
        "pretraining_tp": 1,
        "initializer_range": 0.02,
        "num_nextn_predict_layers": 1,
        "num_experts": 0,
        "some_list": [],
        "quantization_config": {"bits": 4},
        "auto_map": {"AutoModel": "modeling_evil.Evil"},
    }
    assert from_dict(config).unused_keys == (
        "num_nextn_predict_layers",
        "quantization_config (not counted)",
        "auto_map (code of its own, not run)",
    )


def test_shipped_configs_are_read_whole() -> None:
    unused = {(name, key) for name in models() for key in model(name).unused_keys if "not counted" not in key}
    assert not unused


def test_published_forms_with_all_their_keys_leave_nothing_unread() -> None:
    gpt2 = {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    }  # fmt: skip
    bert = {
        "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
        "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute",
        "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
    }  # fmt: skip
    opt = {
        "_name_or_path": "opt", "_remove_final_layer_norm": False, "activation_dropout": 0.0,
        "activation_function": "relu",
        "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": True,
        "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 20480, "hidden_size": 5120, "init_std": 0.02, "layerdrop": 0.0,
        "max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 40, "num_hidden_layers": 40,
        "output_projection": True, "pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16", "use_cache": True,
        "vocab_size": 50272, "word_embed_proj_dim": 5120,
    }  # fmt: skip
    assert [from_dict(config).unused_keys for config in (gpt2, bert, opt)] == [(), (), ()]


def test_no_code_of_a_config_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('ran')")
    evil = {**shipped("llama-7b"), "auto_map": {"AutoConfig": "modeling_evil.Config"}, "_name_or_path": str(tmp_path)}
    (tmp_path / "config.json").write_text(json.dumps(evil))
    monkeypatch.syspath_prepend(tmp_path)
    from_hf(tmp_path)
    assert "modeling_evil" not in sys.modules


# Experts, attention and norms, layer by layer


def moes(spec: ModelSpec) -> list[int]:
    """The layers that have experts."""
    return [i for i, index in enumerate(spec.pattern) if isinstance(spec.blocks[index].mlp, Moe)]


def layers(spec: ModelSpec, what: str) -> list[Any]:
    """One fact of the attention of each layer."""
    return [getattr(spec.blocks[index].attention, what) for index in spec.pattern]


# Experts


def test_which_layers_have_experts() -> None:
    assert moes(model("mixtral-8x7b")) == list(range(32))
    assert moes(model("deepseek-v3")) == list(range(3, 61))
    assert moes(model("kimi-k2")) == list(range(1, 61))
    assert moes(model("llama-4-scout")) == list(range(48))
    assert moes(model("llama-4-maverick")) == list(range(1, 48, 2))
    assert moes(model("ernie-4.5-300b-a47b")) == list(range(3, 54))
    stepped = {**shipped("qwen3-30b-a3b"), "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert moes(from_dict(stepped)) == [1, *range(5, 48, 2)]


def test_experts_as_published() -> None:
    def of(name: str) -> Moe:
        moe = model(name).blocks[-1].mlp
        assert isinstance(moe, Moe)
        return moe

    deepseek, qwen, oss, llama4 = (
        of(name) for name in ("deepseek-v3", "qwen2-57b-a14b", "gpt-oss-120b", "llama-4-scout")
    )
    assert (deepseek.num_experts, deepseek.num_experts_per_tok, deepseek.moe_intermediate_size) == (256, 8, 2048)
    assert deepseek.shared is not None
    assert deepseek.shared.intermediate_size == 2048
    assert (deepseek.router_score, deepseek.router_float32, deepseek.norm_topk_prob) == ("sigmoid", True, True)
    assert qwen.shared is not None
    assert (qwen.shared.intermediate_size, qwen.shared_gate) == (20480, True)
    assert (oss.router_bias, oss.expert_bias, oss.router_score) == (True, True, "softmax_of_chosen")
    assert llama4.shared is not None
    assert (llama4.num_experts_per_tok, llama4.shared.intermediate_size) == (1, 8192)
    assert of("ernie-4.5-21b-a3b").correction_bias
    assert of("hunyuan-a13b").num_experts_per_tok == 8


def test_experts_layer_by_layer() -> None:
    listed = {**shipped("hunyuan-a13b"), "moe_topk": [1, 2] * 16}
    spec = from_dict(listed)
    assert [getattr(spec.blocks[index].mlp, "num_experts_per_tok", 0) for index in spec.pattern] == [1, 2] * 16


def test_layers_that_predict_more_tokens_are_named_and_not_counted() -> None:
    remark = "num_nextn_predict_layers (not counted unless asked)"
    for name, count in (("deepseek-v3", 1), ("glm-4.5", 1), ("kimi-k2", 0), ("llama-7b", 0)):
        spec = model(name)
        assert spec.num_nextn_predict_layers == count
        assert (remark in spec.unused_keys) == bool(count)


# Attention


def test_latent_attention() -> None:
    spec, lite = model("deepseek-v3").blocks[0].attention, model("deepseek-v2-lite").blocks[0].attention
    assert isinstance(spec, LatentAttention)
    assert isinstance(lite, LatentAttention)
    assert (spec.q_lora_rank, spec.kv_lora_rank, spec.v_head_dim) == (1536, 512, 128)
    assert (spec.qk_nope_head_dim, spec.qk_rope_head_dim) == (128, 64)
    assert lite.q_lora_rank is None


def test_windows_and_chunks() -> None:
    assert layers(model("gpt-oss-20b"), "sliding_window") == [128, None] * 12
    assert layers(model("olmo-3-7b"), "sliding_window") == [4096, 4096, 4096, None] * 8
    assert layers(model("command-r7b"), "sliding_window") == [4096, 4096, 4096, None] * 8
    assert layers(model("llama-4-scout"), "sliding_window") == [8192, 8192, 8192, None] * 12
    assert layers(model("gpt-neo-1.3b"), "sliding_window") == [None, 256] * 12
    assert set(layers(model("qwen3-235b-a22b"), "sliding_window")) == {None}
    letters = {**shipped("exaone-4.0-32b"), "sliding_window_pattern": "LG"}
    del letters["layer_types"]
    assert layers(from_dict(letters), "sliding_window") == [4096, None] * 32


def test_layers_that_do_not_rotate() -> None:
    for name in ("smollm3-3b", "llama-4-maverick", "command-r7b", "exaone-4.0-32b"):
        rotary = layers(model(name), "rotary")
        assert rotary == [True, True, True, False] * (len(rotary) // 4)
    assert set(layers(model("exaone-4.0-1.2b"), "rotary")) == {True}
    scout, maverick = model("llama-4-scout"), model("llama-4-maverick")
    assert [norm is not None for norm in layers(scout, "qk_norm")] == layers(scout, "rotary")
    assert set(layers(maverick, "qk_norm")) == {None}
    assert set(layers(model("bloom-7b1"), "alibi")) == {True}


def test_partial_rotation() -> None:
    found = {
        name: model(name).blocks[0].attention for name in ("phi-2", "pythia-70m", "gpt-j-6b", "minimax-m2", "phi-4")
    }
    assert {name: getattr(attention, "rotary_dim", 0) for name, attention in found.items()} == {
        "phi-2": 32,
        "pythia-70m": 16,
        "gpt-j-6b": 64,
        "minimax-m2": 64,
        "phi-4": None,
    }


# Norms


def test_where_the_norms_are() -> None:
    found = {
        name: (block.placement, block.shared_norm)
        for name in ("olmo-2-7b", "exaone-4.0-32b", "command-r", "gpt-j-6b", "phi-2", "falcon-7b", "falcon-40b")
        for block in model(name).blocks[:1]
    }
    assert found == {
        "olmo-2-7b": ("after", False),
        "exaone-4.0-32b": ("after", False),
        "command-r": ("parallel", True),
        "gpt-j-6b": ("parallel", True),
        "phi-2": ("parallel", True),
        "falcon-7b": ("parallel", True),
        "falcon-40b": ("parallel", False),
    }
    assert model("stablelm-2-12b").blocks[0].shared_norm
    assert model("stablelm-2-1.6b").blocks[0].placement == "pre"
    assert model("glm-4-9b-0414").blocks[0].placement == "sandwich"


def test_norms_of_queries_and_keys() -> None:
    over = {name: model(name).blocks[0].attention for name in ("olmo-2-7b", "command-r-plus", "qwen3-8b", "minimax-m2")}
    assert [getattr(attention, "qk_norm_over", "") for attention in over.values()] == ["all", "own", "head", "all"]


def test_albert_has_the_weights_of_one_layer() -> None:
    spec = model("albert-base-v2")
    assert [spec.blocks[index].shares_weights for index in spec.pattern] == [False] + [True] * 11
    assert (spec.embedding_size, spec.factorised_embedding) == (128, True)
    groups = from_dict({**shipped("albert-base-v2"), "num_hidden_groups": 3})
    assert [groups.blocks[index].shares_weights for index in groups.pattern] == [False, True, True, True] * 3


def test_flat_configs_of_models_that_see() -> None:
    flat = {**shipped("qwen2.5-vl-3b"), "vision_config": {"depth": 32}, "special": 1}
    spec = from_dict(flat)
    assert (spec.model_type, spec.hidden_size, spec.tie_word_embeddings) == ("qwen2_5_vl", 2048, True)
    assert spec.unused_keys == ("vision_config (not counted)", "special")


# What is refused


# Hybrids


def places(name: str, kind: type) -> list[int]:
    spec = model(name)
    return [i for i, block in enumerate(spec.pattern) if isinstance(spec.blocks[block].attention, kind)]


def test_layers_are_in_place() -> None:
    assert places("bamba-9b", Attention) == [9, 18, 27]
    assert places("granite-4.0-h-small", Attention) == [5, 15, 25, 35]
    assert places("jamba-1.5-mini", Attention) == [4, 12, 20, 28]
    assert places("qwen3-next-80b-a3b", Attention) == list(range(3, 48, 4))
    assert places("minimax-text-01", Attention) == list(range(7, 80, 8))
    assert places("lfm2-1.2b", Attention) == [2, 5, 8, 10, 12, 14]
    assert places("nemotron-h-8b", Attention) == [7, 18, 29, 40]
    assert len(places("nemotron-3-nano-30b-a3b", Mamba2)) == 23
    assert places("falcon-h1-7b", Attention) == list(range(44))
    assert all(block.beside is not None for block in model("falcon-h1-7b").blocks)
    for name, kind in (
        ("granite-4.0-h-small", Mamba2),
        ("jamba-1.5-mini", Mamba1),
        ("qwen3-next-80b-a3b", GatedDeltaNet),
        ("lfm2-1.2b", ShortConvolution),
        ("minimax-text-01", LightningAttention),
    ):
        others = set(range(model(name).num_hidden_layers)) - set(places(name, Attention))
        assert set(places(name, kind)) == others


def test_experts_are_in_place() -> None:
    spec = model("jamba-1.5-large")
    sparse = [isinstance(spec.blocks[kind].mlp, Moe) for kind in spec.pattern]
    assert sparse == [bool(i % 2) for i in range(72)]
    spec = model("lfm2-8b-a1b")
    assert [isinstance(spec.blocks[kind].mlp, Mlp) for kind in spec.pattern] == [i < 2 for i in range(24)]
    spec = model("nemotron-3-nano-30b-a3b")
    letters = {Mamba2: "M", Attention: "*", type(None): "E"}
    assert (
        "".join(letters[type(spec.blocks[kind].attention)] for kind in spec.pattern)
        == "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    )


def test_widths_that_follow_from_others() -> None:
    assert model("lfm2-1.2b").blocks[0].mlp.intermediate_size == 8192
    jamba = from_dict({"model_type": "jamba"}, class_defaults=True).blocks[0].attention
    assert (jamba.intermediate_size, jamba.time_step_rank) == (8192, 256)
    attention = model("qwen3-next-80b-a3b").blocks[1].attention
    assert attention.output_gate
    assert attention.rotary_dim == 64
    assert not model("jamba-1.5-mini").blocks[-1].attention.rotary
    assert not model("granite-4.0-h-tiny").blocks[1].attention.rotary


def test_the_text_tower_of_a_hybrid() -> None:
    """What looks at images is not counted."""
    for model_type in ("qwen3_5", "qwen3_5_moe"):
        spec = from_dict({"model_type": model_type, "text_config": {"num_hidden_layers": 4}}, class_defaults=True)
        assert spec.unused_keys[0] == "vision_config (not counted)"
        assert sum(isinstance(spec.blocks[kind].attention, GatedDeltaNet) for kind in spec.pattern) == 3
