"""Hybrids and state-space models: parameters against transformers' classes on the meta device, and layers in place."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest

from loadgauge.errors import ConfigError, NotModelled
from loadgauge.estimate.parameters import parameters
from loadgauge.families import from_dict, model, models
from loadgauge.spec.model import (
    Attention,
    GatedDeltaNet,
    LightningAttention,
    Mamba1,
    Mamba2,
    Mlp,
    Moe,
    ShortConvolution,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

CLASSES = {
    "bamba": "Bamba",
    "falcon_h1": "FalconH1",
    "granitemoehybrid": "GraniteMoeHybrid",
    "jamba": "Jamba",
    "lfm2": "Lfm2",
    "lfm2_moe": "Lfm2Moe",
    "mamba2": "Mamba2",
    "minimax": "MiniMax",
    "nemotron_h": "NemotronH",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_next": "Qwen3Next",
}
NEEDED: dict[str, dict[str, Any]] = {"lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16}}
"""Keys without which transformers' own class cannot be built."""


def built(config: dict[str, Any]) -> Any:
    """transformers' class of a config, without memory."""
    rest = {key: value for key, value in json.loads(json.dumps(config)).items() if key != "model_type"}
    read = transformers.AutoConfig.for_model(config["model_type"], **rest)
    name = config.get("architectures", [f"{CLASSES[config['model_type']]}ForCausalLM"])[0]
    with torch.device("meta"):
        found = getattr(transformers, name)(read)
    found.tie_weights()
    return found


def counts(found: Any) -> tuple[int, int]:
    """All parameters, and those that one token passes through."""
    total, active = 0, 0.0
    config = found.config
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", 0)
    for name, parameter in found.named_parameters():
        total += parameter.numel()
        routed = ".experts." in name
        active += parameter.numel() * config.num_experts_per_tok / experts if routed else parameter.numel()
    return total, round(active)


def both(config: dict[str, Any]) -> tuple[int, int]:
    found = parameters(from_dict(config, class_defaults=True))
    return found.total, found.active


@pytest.mark.parametrize("model_type", CLASSES)
@pytest.mark.parametrize("named", [True, False])
def test_defaults(model_type: str, named: bool) -> None:
    config = {"model_type": model_type, **NEEDED.get(model_type, {})}
    if named:
        config["architectures"] = [f"{CLASSES[model_type]}ForCausalLM"]
    assert both(config) == counts(built(config))


SHIPPED = [name for name in models() if model(name).model_type in CLASSES]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped(name: str) -> None:
    text = resources.files("loadgauge").joinpath(f"data/models/{name}.json").read_text(encoding="utf-8")
    config = json.loads(text)
    assert both(config) == counts(built(config))
    assert model(name).unused_keys == ()


@pytest.mark.parametrize(
    ("name", "published"),
    {
        # As the publishers state them: the headers of the weight files on Hugging Face.
        "falcon-h1-0.5b": 521_411_104,
        "falcon-h1-1.5b": 1_554_863_488,
        "falcon-h1-34b": 33_642_516_224,
        "granite-4.0-h-tiny": 6_939_037_248,
        "jamba-1.5-mini": 51_570_323_328,
        "lfm2-350m": 354_483_968,
        "lfm2-700m": 742_489_344,
        "lfm2-1.2b": 1_170_340_608,
        "lfm2-8b-a1b": 8_339_929_856,
        "mamba-codestral-7b": 7_285_403_648,
        "minimax-text-01": 456_089_655_296,
        "nemotron-3-nano-30b-a3b": 31_577_937_344,
        "nemotron-nano-9b-v2": 8_888_227_328,
    }.items(),
)
def test_published_totals(name: str, published: int) -> None:
    assert parameters(model(name)).total == published


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        # In billions, as the names and model cards say it.
        ("qwen3-next-80b-a3b", 80, 4),
        ("nemotron-3-nano-30b-a3b", 32, 4),
        ("granite-4.0-h-small", 32, 9),
        ("granite-4.0-h-tiny", 7, 1),
        ("jamba-1.5-mini", 52, 12),
        ("jamba-1.5-large", 399, 94),
        ("minimax-text-01", 456, 48),
        ("lfm2-8b-a1b", 8, 2),
    ],
)
def test_billions(name: str, total: int, active: int) -> None:
    found = parameters(model(name))
    assert (round(found.total / 1e9), round(found.active / 1e9)) == (total, active)


# Every key that adds or takes away parameters

SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 97, "pad_token_id": 0}
GATED = {**SMALL, "intermediate_size": 96, "num_key_value_heads": 2}
SCAN = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_d_conv": 3}
BIASES = dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), True)
HALF = ["mamba", "attention", "mamba", "attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 3, "head_dim": 24, "attention_bias": True,
}  # fmt: skip
DOUBLE = {"vocab_size": 97, "hidden_size": 64, "num_heads": 4, "head_dim": 32, "num_hidden_layers": 3}
LETTERS = {**GATED, "head_dim": 24, "mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 12, "n_groups": 3}


def variants() -> list[dict[str, Any]]:
    """Small configs of every family."""
    found: list[dict[str, Any]] = []

    def add(model_type: str, *changes: dict[str, Any], last: str = "ForCausalLM") -> None:
        merged = {key: value for change in changes for key, value in change.items()}
        found.append({"model_type": model_type, "architectures": [CLASSES[model_type] + last], **merged})

    add("mamba2", DOUBLE, {"tie_word_embeddings": True, "use_bias": True, "use_conv_bias": False, "n_groups": 2})
    add("mamba2", DOUBLE, {"state_size": 7, "conv_kernel": 2, "expand": 2, "n_groups": 1}, last="Model")
    add("bamba", GATED, SCAN, BIASES, {"attn_layer_indices": [0, 3], "tie_word_embeddings": True})
    add("bamba", GATED, SCAN, {"mamba_conv_bias": False, "mamba_expand": 1, "num_key_value_heads": None})
    add("bamba", GATED, SCAN, {"attn_layer_indices": []}, last="Model")
    granite = {**GATED, **SCAN, "shared_intermediate_size": 72}
    add("granitemoehybrid", granite, BIASES, {"layer_types": HALF, "num_local_experts": 4})
    add("granitemoehybrid", granite, {"layers_block_type": HALF, "num_local_experts": 0, "tie_word_embeddings": True})
    add("granitemoehybrid", granite, {"num_local_experts": 3, "position_embedding_type": "rope"}, last="Model")
    add("falcon_h1", GATED, SCAN, BIASES, {"mamba_d_ssm": 96, "mamba_rms_norm": True, "head_dim": 24})
    add("falcon_h1", GATED, SCAN, {"mamba_d_ssm": None, "mamba_expand": 3, "tie_word_embeddings": True}, last="Model")
    for pattern in ("M*-", "MM-M", "ME*E", "E"):
        add("nemotron_h", LETTERS, {"hybrid_override_pattern": pattern, "n_routed_experts": 5, "use_bias": True})
    add("nemotron_h", LETTERS, {"layers_block_type": ["mamba", "mlp", "attention", "moe"], "mlp_bias": True})
    old = {"mamba_n_groups": 2, "mamba_d_conv": 2, "mamba_conv_bias": False, "mamba_chunk_size": 16}
    add("nemotron_h", LETTERS, old, {"hybrid_override_pattern": "M", "tie_word_embeddings": True}, last="Model")
    jamba = {**GATED, "mamba_d_state": 5, "mamba_expand": 3, "num_experts": 4, "num_experts_per_tok": 2}
    add("jamba", jamba, {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 7})
    add("jamba", jamba, {"mamba_proj_bias": True, "mamba_conv_bias": False, "expert_layer_period": 4})
    add("jamba", jamba, {"num_experts": 1, "tie_word_embeddings": True}, last="Model")
    add("jamba", jamba, {"num_labels": 5}, last="ForSequenceClassification")
    add("qwen3_next", GATED, LINEAR, EXPERTS, {"shared_expert_intermediate_size": 32, "full_attention_interval": 2})
    add("qwen3_next", GATED, LINEAR, EXPERTS, {"mlp_only_layers": [0], "decoder_sparse_step": 2}, last="Model")
    kinds = {"layer_types": ["full_attention", "linear_attention"] * 2, "num_experts": 0, "num_labels": 3}
    add("qwen3_next", GATED, LINEAR, kinds, last="ForSequenceClassification")
    add("qwen3_5_text", GATED, LINEAR, {"tie_word_embeddings": True})
    add("qwen3_5_moe_text", SMALL, LINEAR, EXPERTS, {"num_key_value_heads": 1})
    add("lfm2", GATED, {"full_attn_idxs": [1], "conv_bias": True, "block_multiple_of": 32})
    add("lfm2", GATED, {"layer_types": ["conv"] * 4, "block_auto_adjust_ff_dim": False, "tie_embedding": False})
    factor = {"block_ff_dim": 200, "block_ffn_dim_multiplier": 1.3, "conv_L_cache": 5, "block_multiple_of": 16}
    add("lfm2", GATED, factor)
    add("lfm2", GATED, {**factor, "layer_types": ["full_attention"] * 4}, last="Model")
    mixed = {"layer_types": ["conv", "full_attention"] * 2}
    add("lfm2_moe", GATED, EXPERTS, mixed, {"num_dense_layers": 1, "conv_bias": True})
    add("lfm2_moe", GATED, EXPERTS, mixed, {"num_dense_layers": 0, "tie_word_embeddings": False}, last="Model")
    add("minimax", GATED, {"num_local_experts": 3, "head_dim": 24, "tie_word_embeddings": True})
    add("minimax", GATED, {"layer_types": ["linear_attention"] * 4, "num_local_experts": 2}, last="Model")
    add("minimax", GATED, {"num_labels": 4}, last="ForSequenceClassification")
    return found


@pytest.mark.parametrize("config", variants(), ids=lambda config: config["architectures"][0])
def test_variants(config: dict[str, Any]) -> None:
    assert both(config) == counts(built(config))


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_text_towers(model_type: str) -> None:
    """The text tower of a vision-language model; what looks at images is not counted."""
    text = {**GATED, **LINEAR, **EXPERTS}
    config = {"model_type": model_type, "text_config": text, "tie_word_embeddings": True}
    found = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    prefix = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[model_type]
    with torch.device("meta"):
        built = getattr(transformers, f"{prefix}ForConditionalGeneration")(found)
    built.tie_weights()
    named = built.named_parameters()
    assert both(config)[0] == sum(parameter.numel() for name, parameter in named if "visual" not in name)
    spec = from_dict(config, class_defaults=True)
    assert spec.unused_keys[0] == "vision_config (not counted)"
    assert sum(isinstance(spec.blocks[kind].attention, GatedDeltaNet) for kind in spec.pattern) == 3


# Which layer is what


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


# What is wrong or outside


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
def test_contradictions(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(config, "config.json", class_defaults=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "zamba2"}, r"'zamba2' is not modelled; add it in src/loadgauge/families/hf\.py"),
        ({"model_type": "recurrent_gemma"}, "'recurrent_gemma' is not modelled"),
        ({"model_type": "falcon_mamba"}, "'falcon_mamba' is not modelled"),
        ({"model_type": "nemotron_h", "moe_latent_size": 1024}, r"moe_latent_size: .* extend layers/moe\.py"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M?"}, r"hybrid_override_pattern: '\?'"),
        ({"model_type": "lfm2", "layer_types": ["sliding_attention"] * 32}, "'sliding_attention' is not modelled"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["model_type"],
)
def test_refusals(config: dict[str, Any], message: str) -> None:
    with pytest.raises(NotModelled, match=message):
        from_dict(config, class_defaults=True)
