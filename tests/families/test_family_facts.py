"""What each published model is made of: which layers have experts, windows or rotation, where its norms are."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest

from loadgauge.errors import ConfigError, NotModelled
from loadgauge.families import from_dict, model
from loadgauge.spec.model import LatentAttention, ModelSpec, Moe

SCOUT = {"hidden_size": 5120, "num_hidden_layers": 48}


def shipped(name: str) -> dict[str, Any]:
    """A config of the catalogue, as it is in the file."""
    text = resources.files("loadgauge").joinpath(f"data/models/{name}.json").read_text(encoding="utf-8")
    return json.loads(text)


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


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "num_experts_per_tok: 9 of 8 experts cannot be chosen"),
        ("mixtral-8x7b", {"num_experts": 16}, "num_local_experts: is 8 but num_experts, another name of it, is 16"),
        ("qwen3-30b-a3b", {"mlp_only_layers": "none"}, "mlp_only_layers: must be a list of whole numbers"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [0.5]}, "mlp_only_layers: must be a whole number, got 0.5"),
        ("hunyuan-a13b", {"moe_topk": [8] * 3}, "moe_topk: has 3 entries for 32 layers"),
        ("glm-4.7-flash", {"mlp_layer_types": ["dense"]}, "mlp_layer_types: must be dense or sparse for each of 47"),
        ("deepseek-v3", {"num_key_value_heads": 8}, "num_key_value_heads: must be num_attention_heads"),
        ("smollm3-3b", {"no_rope_layers": [1, 0]}, "no_rope_layers: has 2 entries for 36 layers"),
        (
            "llama-4-scout",
            {"text_config": {**SCOUT, "attention_chunk_size": None}},
            "text_config.attention_chunk_size: is null",
        ),
        ("gpt-neo-1.3b", {"attention_types": [[["global"], 3]]}, "attention_types: must be global or local for each"),
        ("gpt-neo-1.3b", {"attention_types": [[["far"], 24]]}, "attention_types: must be global or local for each"),
        ("gpt-neo-1.3b", {"attention_types": 3}, "attention_types: must be pairs"),
        ("gpt-j-6b", {"rotary_dim": 512}, "rotary_dim: 512 is more than the 256 channels of a head"),
        ("phi-2", {"partial_rotary_factor": 2}, "partial_rotary_factor: must be at most 1, got 2"),
        ("exaone-4.0-32b", {"layer_types": None, "sliding_window_pattern": "XY"}, "sliding_window_pattern: must be L"),
        ("falcon-40b", {"num_kv_heads": 7}, "num_kv_heads: 7 does not divide num_attention_heads 128"),
        ("albert-base-v2", {"num_hidden_groups": 13}, "num_hidden_groups: 13 groups of 12 layers"),
        ("dbrx", {"tie_word_embeddings": True}, "tie_word_embeddings: transformers' class of DBRX cannot tie them"),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": 3}}}, "ffn_config.ffn_act_fn: must be an object with a name"),
    ],
)
def test_wrong_values(base: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^somewhere/config.json: {message}") as caught:
        from_dict({**shipped(base), **change}, "somewhere/config.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        ("deepseek-v2", {"moe_layer_freq": 2}, "moe_layer_freq: experts in some layers only"),
        ("mpt-7b", {"expansion_ratio": 3}, "expansion_ratio"),
        ("mpt-7b", {"attn_config": {"alibi": False}}, "attn_config.alibi"),
        ("mpt-7b", {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_config.attn_type"),
        ("bloom-560m", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post"),
        ("falcon-40b", {"parallel_attn": False}, "new_decoder_architecture"),
        ("starcoder-15b", {"add_cross_attention": True}, "add_cross_attention"),
        ("albert-base-v2", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("electra-small", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt-oss-20b", {"layer_types": ["linear_attention"] * 24}, "layer_types: 'linear_attention'"),
    ],
)
def test_valid_but_not_modelled(base: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(NotModelled, match=message):
        from_dict({**shipped(base), **change}, "config.json")


def test_a_family_that_is_not_modelled_names_its_neighbours() -> None:
    with pytest.raises(NotModelled, match=r"'qwen3_mo' is not modelled; add it in .*close to it: qwen3_moe"):
        from_dict({"model_type": "qwen3_mo"})
