"""Parameters of models of 2025 and 2026 within the digits that their owners publish.

The configs are those of the catalogue, each with its repository in `data/models/SOURCES.toml`, where the model card has the
figure.
"""

from __future__ import annotations

import math

import pytest

from loadgauge.core.estimate.states.parameters import Parameters, parameters
from loadgauge.core.families import model
from loadgauge.core.families.catalogue import config as shipped
from meta_models import NOT_COUNTED, active_size, everything, total_size


def as_published(size: float, text: str) -> str:
    """A size [billions] in as many digits as `text` has; the zeros at the end of a whole number are none.

    >>> as_published(228.69, "230"), as_published(3.58, "3.6")
    ('230', '3.6')
    """
    whole, dot, rest = text.partition(".")
    if dot:
        return f"{size:.{len(rest)}f}"
    zeros = len(whole) - len(whole.rstrip("0"))
    return f"{round(size, -zeros):.0f}"


TOTALS = {
    "apertus-8b": "8", "deepseek-v3.2": "670", "deepseek-v4-flash": "284", "deepseek-v4-pro": "1600",
    "ernie-4.5-0.3b": "0.36", "ernie-4.5-300b-a47b": "300",
    "exaone-4.0-1.2b": "1.28", "exaone-4.0-32b": "32", "falcon-h1-0.5b": "0.5", "falcon-h1-7b": "7.59",
    "falcon-h1-34b": "34", "gemma-4-26b-a4b": "25.2", "gemma-4-31b": "30.7", "glm-4.7-flash": "30", "glm-5": "744",
    "gpt-oss-20b": "20.9", "gpt-oss-120b": "116.8", "granite-4.0-h-micro": "3", "granite-4.0-h-tiny": "7",
    "granite-4.0-h-small": "32", "hunyuan-a13b": "80", "hy3-preview-295b-a21b": "295", "kimi-k2": "1000",
    "kimi-k2.5": "1000", "kimi-linear-48b-a3b": "49", "lfm2-350m": "0.35", "lfm2-700m": "0.74", "lfm2-1.2b": "1.17",
    "lfm2-8b-a1b": "8.3", "llama-4-maverick": "400", "nemotron-super-49b": "49.9",
    "ling-lite": "16.8", "ling-mini-2.0": "16.26", "ling-plus": "290",
    "longcat-flash-560b-a27b": "560", "mimo-v2-flash": "309", "minimax-m2": "230", "minimax-text-01": "456",
    "mistral-small-4-119b-a6b": "119", "nemotron-3-nano-30b-a3b": "31.6", "nemotron-3-super-120b-a12b": "120",
    "nemotron-3-ultra-550b-a55b": "550", "nemotron-nano-9b-v2": "8.89", "olmo-3-7b": "7", "olmo-3-32b": "32",
    "olmo-hybrid-7b": "7", "qwen3-0.6b": "0.6", "qwen3-1.7b": "1.7", "qwen3-4b": "4.0", "qwen3-8b": "8.2",
    "qwen3-14b": "14.8", "qwen3-32b": "32.8", "qwen3-30b-a3b": "30.5", "qwen3-235b-a22b": "235",
    "qwen3-coder-480b-a35b": "480", "qwen3-next-80b-a3b": "80", "qwen3.5-27b": "27", "qwen3.5-35b-a3b": "35",
    "qwen3.5-122b-a10b": "122", "seed-oss-36b": "36", "smollm3-3b": "3.08", "solar-open-100b": "100",
    "internlm3-8b": "8.8", "jais-2-8b": "8", "trinity-nano-6b-a1b": "6", "trinity-mini-26b-a3b": "26", "youtu-llm-2b": "1.96",
}  # fmt: skip
"""All parameters [billions]; towers that make features of images are not counted (Gemma 4 states them by themselves)."""

WITH_TOWERS = {
    "qwen3-vl-2b": "2", "qwen3-vl-4b": "4.4", "qwen3-vl-8b": "8.8", "qwen3-vl-32b": "33", "qwen3-vl-30b-a3b": "31",
    "qwen3-vl-235b-a22b": "236", "qwen3.5-397b-a17b": "397",
}  # fmt: skip
"""All parameters [billions], with the towers, which transformers' class counts."""

BODIES = {"gemma-3-1b": "698", "gemma-3-4b": "3209", "gemma-3-12b": "10759", "gemma-3-27b": "25600"}
"""Parameters but for the table of embeddings [millions] (arXiv 2503.19786, table 1)."""

ACTIVE = {
    "deepseek-v3.2": "37-", "deepseek-v4-flash": "13-", "deepseek-v4-pro": "49-",
    "ernie-4.5-300b-a47b": "47-", "gemma-4-26b-a4b": "3.8", "gpt-oss-20b": "3.6-",
    "gpt-oss-120b": "5.1-", "granite-4.0-h-tiny": "1", "granite-4.0-h-small": "9", "hunyuan-a13b": "13",
    "hy3-preview-295b-a21b": "21", "kimi-k2.5": "32-", "kimi-linear-48b-a3b": "3", "ling-lite": "2.75",
    "ling-mini-2.0": "1.43", "llama-4-scout": "17",
    "longcat-flash-560b-a27b": "27-", "mimo-v2-flash": "15", "minimax-m2": "10-", "mistral-small-4-119b-a6b": "6-",
    "nemotron-3-nano-30b-a3b": "3.6", "nemotron-3-super-120b-a12b": "12-", "nemotron-3-ultra-550b-a55b": "55-",
    "qwen3-235b-a22b": "22", "qwen3-coder-480b-a35b": "35", "qwen3.5-35b-a3b": "3", "qwen3.5-122b-a10b": "10",
    "qwen3.5-397b-a17b": "17", "solar-open-100b": "12", "trinity-nano-6b-a1b": "1", "trinity-mini-26b-a3b": "3",
}  # fmt: skip
"""Parameters that a token passes through [billions]; a hyphen: without the table of embeddings."""


def passed(found: Parameters, text: str) -> float:
    """Active parameters [billions], by the owner's way of counting."""
    return float(found.active - found.embedding if text.endswith("-") else found.active) / 1e9


@pytest.mark.parametrize("name", TOTALS)
def test_totals(name: str) -> None:
    assert as_published(float(parameters(model(name)).total) / 1e9, TOTALS[name]) == TOTALS[name]


@pytest.mark.parametrize("name", WITH_TOWERS)
def test_totals_with_towers(name: str) -> None:
    """Ours, and the tensors of transformers' class that ours leaves out."""
    towers = sum(size for key, size in everything(shipped(name)).items() if any(part in key for part in NOT_COUNTED))
    assert towers > 0
    assert as_published((float(parameters(model(name)).total) + towers) / 1e9, WITH_TOWERS[name]) == WITH_TOWERS[name]


@pytest.mark.parametrize("name", BODIES)
def test_bodies(name: str) -> None:
    found = parameters(model(name))
    assert round(float(found.total - found.embedding) / 1e6) == int(BODIES[name])


@pytest.mark.parametrize("name", ACTIVE)
def test_active(name: str) -> None:
    text = ACTIVE[name]
    assert as_published(passed(parameters(model(name)), text), text.rstrip("-")) == text.rstrip("-")


def test_they_are_many() -> None:
    assert len({*TOTALS, *WITH_TOWERS, *BODIES}) >= 60


# Where the published weights and transformers' class differ


def test_longcat_flash() -> None:
    """transformers' class has room for the first matrix of 256 experts that compute nothing; no weights were published for it."""
    config = shipped("longcat-flash-560b-a27b")
    layers, width, hidden = config["num_layers"], config["expert_ffn_hidden_size"], config["hidden_size"]
    spare = config["zero_expert_num"] * 2 * width * hidden * layers
    assert parameters(model("longcat-flash-560b-a27b")).total + spare == total_size(config)


def test_longcat_flash_at_an_even_share_of_its_choices() -> None:
    """12 choices among 512 experts and 256 that compute nothing are 8 experts a token."""
    config = {**shipped("longcat-flash-560b-a27b"), "zero_expert_num": 0, "moe_topk": 8}
    router = 256 * config["hidden_size"] * config["num_layers"]
    assert parameters(model("longcat-flash-560b-a27b")).active == active_size(config) + router


def test_ling_2() -> None:
    """By hand, from the shapes in the published code: one matrix for queries, keys and values, norms of heads, one dense layer."""
    hidden, vocabulary, layers, heads, keys, head = 2048, 157_184, 20, 16, 4, 128
    each = hidden * (heads + 2 * keys) * head + heads * head * hidden + 2 * head + 2 * hidden
    sparse = 257 * 3 * hidden * 512 + 256 * hidden
    total = 2 * vocabulary * hidden + hidden + layers * each + 3 * hidden * 5120 + (layers - 1) * sparse
    assert parameters(model("ling-mini-2.0")).total == total


def test_nemotron_nas() -> None:
    """By hand, from the layers of the published list: 49 of 80 attend, and MLPs are from 2816 to 28672 wide."""
    config = shipped("nemotron-super-49b")
    hidden, vocabulary, head, keys = 8192, 128_256, 128, 8
    total = 2 * vocabulary * hidden + hidden
    for block in config["block_configs"]:
        if not block["attention"]["no_op"]:
            total += 2 * hidden * hidden + 2 * hidden * keys * head + hidden
        width = math.ceil(int(2 * block["ffn"]["ffn_mult"] * hidden / 3) / 256) * 256
        total += 3 * hidden * width + hidden
    assert parameters(model("nemotron-super-49b")).total == total
