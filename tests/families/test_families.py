"""Reading configs: what each family is made of, contradictions, what is not modelled, and keys that are not read."""

from __future__ import annotations

import json
import math
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from loadgauge.errors import ConfigError, NotModelled
from loadgauge.families import from_dict, from_hf, model, models
from loadgauge.families.reader import Reader
from loadgauge.spec.model import ModelSpec


def shipped(name: str) -> dict[str, Any]:
    """A config of the catalogue, as it is in the file."""
    text = resources.files("loadgauge").joinpath(f"data/models/{name}.json").read_text(encoding="utf-8")
    return json.loads(text)


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


@pytest.mark.parametrize("name", models())
def test_shipped_configs_are_read_whole(name: str) -> None:
    assert [key for key in model(name).unused_keys if "not counted" not in key] == []


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


# What is refused


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
            "model_type: 'mamba9' is not modelled; add it in src/loadgauge",
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
