"""What is refused: wrong values, contradictions, and what is valid but not modelled."""

from __future__ import annotations

import math
from typing import Any

import pytest

from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.families import from_dict
from loadgauge.core.families.catalogue import config as shipped
from loadgauge.core.families.reader import Reader

SCOUT = {"hidden_size": 5120, "num_hidden_layers": 48}


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        ("llama-7b", {"hidden_size": "7B"}, "hidden_size: must be a whole number, got '7B'"),
        ("llama-7b", {"hidden_size": 4096.0}, "hidden_size: must be a whole number"),
        ("llama-7b", {"hidden_size": True}, "hidden_size: must be a whole number, got True"),
        ("llama-7b", {"hidden_size": None}, "hidden_size: must be a whole number, got None"),
        ("llama-7b", {"hidden_size": -4096}, "hidden_size: must be from 1"),
        ("llama-7b", {"hidden_size": 0}, "hidden_size: must be from 1"),
        ("llama-7b", {"vocab_size": 2**40}, "vocab_size: must be from 1"),
        ("llama-7b", {"vocab_size": 10**5000}, "vocab_size: must be from 1"),
        ("llama-7b", {"num_hidden_layers": 2_000_000}, "num_hidden_layers: must be from 1 to 10000"),
        ("llama-7b", {"hidden_size": 4100}, "hidden_size: 4100 is not divisible by 32 attention heads"),
        ("llama-7b", {"num_key_value_heads": 5}, "num_key_value_heads: 5 does not divide num_attention_heads 32"),
        ("llama-7b", {"attention_dropout": math.nan}, "attention_dropout: must be from 0 to 1, got nan"),
        ("llama-7b", {"attention_dropout": math.inf}, "attention_dropout: must be from 0"),
        ("llama-7b", {"attention_dropout": 1.5}, "attention_dropout: must be from 0"),
        ("llama-7b", {"attention_dropout": 10**400}, "attention_dropout: must be from 0"),
        ("llama-7b", {"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false"),
        ("llama-7b", {"hidden_act": 3}, "hidden_act: must be a string"),
        ("llama-7b", {"architectures": "LlamaForCausalLM"}, "architectures: must be a list of strings"),
        ("llama-7b", {"model_type": None}, "model_type: must be a string"),
        ("gpt2", {"n_head": 7}, "n_embd: 768 is not divisible by 7 attention heads"),
        ("gemma-2-2b", {"final_logit_softcapping": 0}, "final_logit_softcapping: must be above 0"),
        ("gemma-2-2b", {"layer_types": ["full_attention"]}, "layer_types: has 1 entries for 26 layers"),
        ("gemma-2-2b", {"sliding_window": None}, "sliding_window: is null"),
        ("gemma-3-1b", {"sliding_window_pattern": 0}, "sliding_window_pattern: must be from 1"),
        ("gemma-3-4b", {"text_config": 3}, "text_config: must be a JSON object"),
        ("gemma-3-4b", {"text_config": {"hidden_size": "big"}}, "text_config.hidden_size: must be a whole number"),
        ("qwen2-7b", {"layer_types": ["sliding_attention"] * 28}, "sliding_window: is null .or switched off."),
        ("roberta-base", {"max_position_embeddings": 2}, "max_position_embeddings: 2 rows leave no position"),
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
        (
            "llama-7b",
            {"model_type": "mamba9"},
            "model_type: 'mamba9' is not modelled",
        ),
        ("llama-7b", {"architectures": ["T5ForConditionalGeneration"]}, "architectures: 'T5For"),
        ("llama-7b", {"per_layer_config": {"0": {"hidden_size": 1}}}, "per_layer_config"),
        ("llama-7b", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("gpt2", {"architectures": ["GPT2DoubleHeadsModel"]}, "architectures: 'GPT2DoubleHeadsModel'"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("bert-base", {"architectures": ["BertForPreTraining"]}, "architectures: 'BertForPreTraining'"),
        ("bert-base", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert-base", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("gemma-2-2b", {"layer_types": ["linear_attention"] * 26}, "layer_types: 'linear_attention'"),
        ("gemma-3-4b", {"text_config": {"model_type": "rwkv"}}, "text_config.model_type: a text tower 'rwkv'"),
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


def test_labels_that_contradict_each_other() -> None:
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    with pytest.raises(ConfigError, match="num_labels: is 3 but id2label has 1"):
        from_dict({**config, "num_labels": 3, "id2label": {"0": "a"}}, class_defaults=True)
    with pytest.raises(ConfigError, match="id2label: must be an object of labels"):
        from_dict({**config, "id2label": ["a"]}, class_defaults=True)


@pytest.mark.parametrize("config", [None, 3, [], "llama", {3: 4}])
def test_not_an_object(config: object) -> None:
    with pytest.raises(ConfigError, match="must be a JSON object"):
        from_dict(config, class_defaults=True)


def test_model_type_is_needed() -> None:
    with pytest.raises(ConfigError, match="model_type: is missing"):
        from_dict({})


def test_reader_marks_what_it_read() -> None:
    reader = Reader({"a": 1, "b": 2, "c": [3]}, "config.json")
    assert reader.whole("a", default=0) == 1
    reader.ignore("b")
    assert reader.unused() == ("c",)


def test_a_family_that_is_not_modelled_names_its_neighbours() -> None:
    with pytest.raises(NotModelled, match=r"'qwen3_mo' is not modelled .*close to it: qwen3_moe"):
        from_dict({"model_type": "qwen3_mo"})


# Hybrids


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba2", "num_heads": 3}, "num_heads: 3 times head_dim 64 is not expand times hidden_size"),
        ({"model_type": "mamba2", "n_groups": 3}, "3 groups do not divide 128 heads"),
        ({"model_type": "bamba", "mamba_n_heads": 3}, "mamba_n_heads: 3 does not divide 8192 channels"),
        ({"model_type": "bamba", "mamba_d_head": 5}, "5 times 128 heads is not 8192 channels"),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba"]}, "has 1 entries for 32 layers"),
        ({"model_type": "jamba", "attn_layer_offset": 8}, "8 is not within a period of 8 layers"),
        ({"model_type": "qwen3_next", "linear_num_key_heads": 5}, "5 does not divide 32 value heads"),
        ({"model_type": "lfm2_moe"}, "layer_types: is missing"),
        ({"model_type": "lfm2", "intermediate_size": 1}, "leaves no channel"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": ""}, "hybrid_override_pattern"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_contradictions_of_hybrids(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(config, "config.json", class_defaults=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "zamba2"}, r"'zamba2' is not modelled"),
        ({"model_type": "recurrent_gemma"}, "'recurrent_gemma' is not modelled"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M?"}, r"hybrid_override_pattern: '\?'"),
        ({"model_type": "lfm2", "layer_types": ["sliding_attention"] * 32}, "'sliding_attention' is not modelled"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_hybrids_that_are_not_modelled(config: dict[str, Any], message: str) -> None:
    with pytest.raises(NotModelled, match=message):
        from_dict(config, class_defaults=True)
