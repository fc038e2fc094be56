"""Parameters equal those of transformers' own classes, built on the meta device without memory, for every family."""

from __future__ import annotations

from typing import Any

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.model.model import Moe
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families import from_dict, model, model_types, models
from loadgauge.core.families.catalogue import config as shipped
from meta_models import NEEDED, active_size, bare, classed, parameter_sizes, total_size, usual_class


def total(config: dict[str, Any]) -> int:
    """Parameters by loadgauge."""
    return parameters(from_dict(config, class_defaults=True)).total


def has_experts(config: dict[str, Any]) -> bool:
    """Whether a model has a mixture of experts."""
    return any(isinstance(block.mlp, Moe) for block in from_dict(config, class_defaults=True).blocks)


# The catalogue


OWN_TESTS = {"ling-lite", "ling-mini-2.0", "ling-plus", "longcat-flash-560b-a27b", "nemotron-super-49b"}
"""Models that transformers has no class for, or one with more than the weights that were published
(`test_published_2026.py`)."""
COMPARED = sorted(set(models()) - OWN_TESTS)


@pytest.mark.parametrize("name", COMPARED)
def test_shipped_models(name: str) -> None:
    assert parameters(model(name)).total == total_size(shipped(name))


def test_every_family_is_in_the_catalogue() -> None:
    """Families without a shipped config, each for a reason."""
    missing = {
        "flex_olmo",  # a demonstration of merging experts
        "gemma3_text",  # published as gemma3
        "granitemoeshared",  # a test model
        "llama4_text",  # published as llama4
        "llava",  # its text tower is Llama or Mistral
        "ministral",
        "ministral3",
        "mistral3",
    }
    stocked = {model(name).model_type for name in models()}
    assert {kind for kind in model_types() if kind not in stocked} <= missing | UNSTOCKED


UNSTOCKED = {
    "aya_vision", "bailing_hybrid", "deepseek_vl", "dots_ocr", "minicpmv", "paligemma", "bailing_moe_v2", "kimi_k3",
    "cohere2_vision", "exaone4_5", "exaone_moe", "gemma3n_text", "gemma4_text", "glm46v", "glm4v", "glm4v_moe",
    "idefics3", "internvl", "lfm2_vl", "llava_next", "llava_onevision", "mellum", "muse_glimmer", "nanochat",
    "qwen3_5_moe_text", "qwen3_5_text",
    "phi4_multimodal", "qwen2_audio", "qwen3_omni_moe", "smolvlm", "vaultgemma", "voxtral",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "published"),
    {
        # As the publishers state them: model cards, and the headers of the weight files on Hugging Face. A few of those
        # count buffers or tied tables too, and are left out.
        "bert-base": 109_514_298,
        "bloom-176b": 176_247_271_424,
        "bloom-560m": 559_214_592,
        "bloom-7b1": 7_069_016_064,
        "command-r": 34_980_831_232,
        "command-r-plus": 103_810_674_688,
        "dbrx": 131_596_523_520,
        "deepseek-v2": 235_741_434_880,
        "deepseek-v2-lite": 15_706_484_224,
        "distilbert-base": 66_985_530,
        "exaone-4.0-1.2b": 1_279_391_488,
        "gemma-2b": 2_506_172_416,
        "gemma-7b": 8_537_680_896,
        "gemma-2-2b": 2_614_341_888,
        "gemma-2-9b": 9_241_705_984,
        "gemma-2-27b": 27_227_128_320,
        "gemma-3-1b": 999_885_952,
        "glm-4-9b": 9_399_951_360,
        "glm-4-32b-0414": 32_566_081_536,
        "gpt2": 124_439_808,
        "gpt2-xl": 1_557_611_200,
        "gpt-j-6b": 6_050_882_784,
        "gpt-neox-20b": 20_554_567_680,
        "gpt-oss-20b": 20_914_757_184,
        "gpt-oss-120b": 116_829_156_672,
        "granite-3.0-8b": 8_170_848_256,
        "granite-3.0-2b": 2_533_531_648,
        "llama-2-7b": 6_738_415_616,
        "llama-2-70b": 68_976_648_192,
        "llama-3-8b": 8_030_261_248,
        "llama-3-70b": 70_553_706_496,
        "llama-3.1-405b": 405_853_388_800,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.2-3b": 3_212_749_824,
        "llama-65b": 65_285_660_672,
        "mistral-7b-v0.1": 7_241_732_096,
        "mistral-nemo-12b": 12_247_782_400,
        "mistral-small-24b": 23_572_403_200,
        "mistral-large-123b": 122_610_069_504,
        "mixtral-8x7b": 46_702_792_704,
        "mixtral-8x22b": 140_620_634_112,
        "modernbert-base": 149_655_232,
        "mpt-7b": 6_649_286_656,
        "olmo-1b": 1_176_764_416,
        "olmo-7b": 6_888_095_744,
        "olmo-2-1b": 1_484_916_736,
        "olmo-2-7b": 7_298_617_344,
        "olmo-2-13b": 13_716_198_400,
        "olmo-2-32b": 32_234_279_936,
        "olmo-3-7b": 7_298_011_136,
        "olmoe-1b-7b": 6_919_161_856,
        "opt-350m": 331_196_416,
        "opt-1.3b": 1_315_758_080,
        "phi-1.5": 1_418_270_720,
        "phi-2": 2_779_683_840,
        "phi-3-mini": 3_821_079_552,
        "phi-3-medium": 13_960_238_080,
        "phi-3.5-moe": 41_873_153_344,
        "phi-4": 14_659_507_200,
        "pythia-70m": 70_426_624,
        "pythia-160m": 162_322_944,
        "pythia-410m": 405_334_016,
        "pythia-1b": 1_011_781_632,
        "pythia-1.4b": 1_414_647_808,
        "pythia-2.8b": 2_775_208_960,
        "pythia-6.9b": 6_857_302_016,
        "pythia-12b": 11_846_072_320,
        "qwen1.5-moe-a2.7b": 14_315_784_192,
        "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-3b": 3_085_938_688,
        "qwen2.5-7b": 7_615_616_512,
        "qwen2.5-14b": 14_770_033_664,
        "qwen2.5-32b": 32_763_876_352,
        "qwen2.5-72b": 72_706_203_648,
        "qwen3-4b": 4_022_468_096,
        "qwen3-8b": 8_190_735_360,
        "qwen3-30b-a3b": 30_532_122_624,
        "qwen3-32b": 32_762_123_264,
        "qwen3-235b-a22b": 235_093_634_560,
        "qwen3-coder-480b-a35b": 480_154_875_392,
        "seed-oss-36b": 36_151_104_512,
        "smollm3-3b": 3_075_098_624,
        "stablelm-2-1.6b": 1_644_515_328,
        "stablelm-2-12b": 12_143_185_920,
        "starcoder2-3b": 3_030_371_328,
        "starcoder2-7b": 7_173_923_840,
        "starcoder2-15b": 15_957_889_024,
        "tinyllama-1.1b": 1_100_048_384,
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


def test_the_buffers_in_published_totals() -> None:
    """DeepSeek and Kimi publish the experts' correction biases as weights; in transformers they are buffers."""
    for name, layers, experts, published in (
        ("deepseek-v3", 58, 256, 671_026_419_200),
        ("kimi-k2", 60, 384, 1_026_408_232_448),
    ):
        assert parameters(model(name)).total + layers * experts == published


# Active parameters


@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(shipped(name), id=name) for name in COMPARED if has_experts(shipped(name))),
        *(pytest.param(bare(kind), id=kind) for kind in classed() if has_experts(bare(kind))),
    ],
)
def test_active_parameters(config: dict[str, Any]) -> None:
    """Every tensor of experts in transformers' class, scaled by the share of the experts that a token goes to."""
    found = parameters(from_dict(config, class_defaults=True))
    assert found.active == active_size(config)
    assert found.total - found.active == found.idle >= 0


@pytest.mark.parametrize(
    ("name", "in_all", "active", "table"),
    [
        # As the publishers round them. `table`: whether the active ones count the table of token embeddings: OpenAI's
        # model card says that it leaves it out, and only so do the numbers of DeepSeek and Moonshot come out.
        ("mixtral-8x7b", 46.7, 12.9, True),
        ("mixtral-8x22b", 141, 39, True),
        ("deepseek-v2", 236, 21, True),
        ("deepseek-v3", 671, 37, False),
        ("kimi-k2", 1026, 32, False),
        ("qwen1.5-moe-a2.7b", 14.3, 2.7, True),
        ("qwen2-57b-a14b", 57, 14, True),
        ("qwen3-235b-a22b", 235, 22, True),
        ("qwen3-coder-480b-a35b", 480, 35, True),
        ("gpt-oss-20b", 20.9, 3.6, False),
        ("gpt-oss-120b", 117, 5.1, False),
        ("llama-4-maverick", 401, 17, True),
        ("olmoe-1b-7b", 6.9, 1.3, True),
        ("phi-3.5-moe", 41.9, 6.6, True),
        ("dbrx", 132, 36, True),
        ("hunyuan-a13b", 80, 13, True),
        ("granite-3.0-1b-a400m", 1.3, 0.4, True),
        ("granite-3.0-3b-a800m", 3.3, 0.8, False),
        ("qwen3-next-80b-a3b", 80, 4, True),
        ("nemotron-3-nano-30b-a3b", 32, 4, True),
        ("granite-4.0-h-small", 32, 9, True),
        ("granite-4.0-h-tiny", 7, 1, True),
        ("jamba-1.5-mini", 52, 12, True),
        ("jamba-1.5-large", 399, 94, True),
        ("minimax-text-01", 456, 48, True),
        ("lfm2-8b-a1b", 8, 2, True),
    ],
)
def test_published_active_parameters(name: str, in_all: float, active: float, table: bool) -> None:
    found = parameters(model(name))
    passed = found.active if table else found.active - found.embedding
    digits = (len(str(number).partition(".")[2]) for number in (in_all, active))
    assert [round(size / 1e9, d) for size, d in zip((found.total, passed), digits, strict=True)] == [in_all, active]


def test_llama_4_maverick_and_kimi_k2_as_published() -> None:
    """Meta rounds Maverick to 400B. Kimi K2's report says 1.04T: the published weights have less, and the config says
    that no layer predicts a second token, as DeepSeek-V3's does; one layer more would make 1.04T.
    """
    assert float(f"{parameters(model('llama-4-maverick')).total / 1e9:.2g}") == 400
    kimi = model("kimi-k2")
    found = parameters(kimi)
    layers = (found.layers - parameters(from_dict({**shipped("kimi-k2"), "num_hidden_layers": 60})).layers) / 1e12
    assert kimi.num_nextn_predict_layers == 0
    assert round(found.total / 1e12, 2) == 1.03
    assert round(found.total / 1e12 + layers, 2) == 1.04


# What a config leaves out


@pytest.mark.parametrize("model_type", classed())
def test_defaults(model_type: str) -> None:
    for config in (bare(model_type), {**bare(model_type), "architectures": [usual_class(model_type)]}):
        assert total(config) == total_size(config)


@pytest.mark.parametrize("model_type", NEEDED)
def test_defaults_that_make_no_model(model_type: str) -> None:
    """Without what they lack, transformers cannot build the model, or loadgauge says what is missing."""
    config = {"model_type": model_type}
    try:
        parameter_sizes(config)
    except (AttributeError, TypeError):
        return
    with pytest.raises(ConfigError, match="is missing"):
        from_dict(config, class_defaults=True)


# Kimi K2, from its published config. The report (arXiv 2507.20534) prints 1.04T and 32.6B activated. No sum over the
# published tensors gives either: the weights have 1.026T, and 31.7B activated without the table of embeddings, 32.9B with it.

LAYERS, DENSE, HIDDEN, VOCABULARY = 61, 1, 7168, 163_840
EXPERTS, CHOSEN, SHARED, EXPERT_WIDTH, DENSE_WIDTH = 384, 8, 1, 2048, 18_432
HEADS, QUERY_RANK, KEY_RANK, NOPE, ROPE, VALUE = 64, 1536, 512, 128, 64, 128


def kimi_k2_by_hand(experts: int) -> int:
    """Parameters of Kimi K2 with this many routed experts in each sparse layer."""
    attention = (
        HIDDEN * QUERY_RANK + QUERY_RANK + QUERY_RANK * HEADS * (NOPE + ROPE)
        + HIDDEN * (KEY_RANK + ROPE) + KEY_RANK + KEY_RANK * HEADS * (NOPE + VALUE)
        + HEADS * VALUE * HIDDEN
    )  # fmt: skip
    expert = 3 * HIDDEN * EXPERT_WIDTH
    dense = attention + 3 * HIDDEN * DENSE_WIDTH + 2 * HIDDEN
    sparse = attention + HIDDEN * EXPERTS + (experts + SHARED) * expert + 2 * HIDDEN
    return DENSE * dense + (LAYERS - DENSE) * sparse + 2 * VOCABULARY * HIDDEN + HIDDEN


def test_kimi_k2_by_hand() -> None:
    found = parameters(model("kimi-k2"))
    assert found.total == kimi_k2_by_hand(EXPERTS) == 1_026_408_209_408
    assert found.active == kimi_k2_by_hand(CHOSEN) == 32_861_477_888


def test_kimi_k2_by_its_model_card() -> None:
    """1T in all, 32B activated: without the table of embeddings, which only looks up."""
    found = parameters(model("kimi-k2"))
    assert round(found.total / 1e12) == 1
    assert round((found.active - found.embedding) / 1e9) == 32


def test_kimi_k2_by_its_report() -> None:
    """1.04T and 32.6B. A multi-token prediction module as DeepSeek-V3's would make 1.04T; this model came with none."""
    spec = model("kimi-k2")
    found = parameters(spec)
    assert round(found.total / 1e12, 2) == 1.03
    assert spec.num_nextn_predict_layers == 0
    assert round(parameters(spec.with_mtp(1)).total / 1e12, 2) == 1.04
    activated = {round(size / 1e9, 1) for size in (found.active, found.active - found.embedding)}
    assert activated == {31.7, 32.9}
