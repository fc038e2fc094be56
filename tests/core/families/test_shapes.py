"""Models from sizes: what is asked for is met, what is said is kept, and parameters are those of the model that is built."""

from __future__ import annotations

import math

import pytest

from command_line import document, typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.model.model import Attention, ModelSpec, Moe
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families.catalogue import find, find_model
from loadgauge.core.families.shapes import FAMILIES, WITHIN, is_shape, read

SIZES = (1e8, 1.25e8, 2.2e8, 3.5e8, 7e8, 1e9, 1.3e9, 2.7e9, 5e9, 7e9, 8e9, 1e10, 1.3e10, 2e10, 3.4e10, 6.5e10, 7e10, 1.3e11,
         1.75e11, 4.05e11, 5.3e11, 1e12)  # fmt: skip


def counted(model: ModelSpec) -> int:
    """Matrices and vectors one by one, by the definitions of GPT-2, Llama and Mixtral."""
    h = model.hidden_size
    total = model.vocab_size * h * (1 if model.tie_word_embeddings else 2) + model.learned_positions * h
    for index in model.pattern:
        block = model.blocks[index]
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, Attention)
        bias = model.model_type == "gpt2"
        wide, narrow = (
            heads * attention.head_dim for heads in (attention.num_attention_heads, attention.num_key_value_heads)
        )
        for rows, columns in ((wide, h), (narrow, h), (narrow, h), (h, wide)):
            total += rows * columns + (rows if bias else 0)
        if isinstance(mlp, Moe):
            total += mlp.num_experts * h
            for _ in range(mlp.num_experts):
                total += 3 * h * mlp.moe_intermediate_size
        elif bias:
            total += 2 * h * mlp.intermediate_size + mlp.intermediate_size + h
        else:
            total += 3 * h * mlp.intermediate_size
        total += 2 * h * (2 if bias else 1)
    return total + h * (2 if model.model_type == "gpt2" else 1)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size:.3g}")
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_within_one_percent(family: str, size: float) -> None:
    model, shape = read(f"{family}:{size:.0f}")
    assert shape.params == counted(model) == parameters(model).total
    assert abs(shape.params / size - 1) <= WITHIN
    assert shape.hidden % shape.heads == 0
    assert shape.hidden // shape.heads in (64, 128)
    # As published models are: GPT-3's and LLaMA's sizes have 43 to 200.
    assert 40 < shape.hidden / shape.layers < 210
    assert model.num_hidden_layers == shape.layers


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_builds_as_many(family: str) -> None:
    from meta_models import parameter_sizes

    _, shape = read(f"{family}:300M")
    assert sum(map(math.prod, parameter_sizes(shape.config()).values())) == shape.params


@pytest.mark.parametrize(
    ("size", "layers", "hidden", "heads"), [("125M", 12, 768, 12), ("13B", 40, 5120, 40), ("175B", 96, 12288, 96)]
)
def test_sizes_of_gpt_3(size: str, layers: int, hidden: int, heads: int) -> None:
    """Brown et al., table 2.1: the sizes whose name is their count of parameters, and whose heads fill the width."""
    _, shape = read(f"gpt:{size}")
    assert (shape.layers, shape.hidden, shape.heads) == (layers, hidden, heads)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_shape_reads_back_as_itself(family: str) -> None:
    model, shape = read(f"{family}:3B")
    again, same = read(shape.text)
    assert shape == same
    assert parameters(again) == parameters(model)
    assert again.blocks == model.blocks


def test_what_is_said_is_kept() -> None:
    model, shape = read("gpt:layers=48,hidden=6144,heads=48,vocab=50k")
    assert (shape.layers, shape.hidden, shape.heads, shape.vocab, shape.ffn) == (48, 6144, 48, 50_000, 24_576)
    # 12 l h^2 + 13 l h + V h (Narayanan et al., equation 2) and positions.
    assert parameters(model).total == 48 * (12 * 6144**2 + 13 * 6144) + (50_000 + 2048) * 6144 + 2 * 6144
    _, shape = read("moe:47B,layers=32,hidden=4096,experts=8,top-k=2,kv-heads=8")
    assert (shape.layers, shape.hidden, shape.experts, shape.top_k) == (32, 4096, 8, 2)
    assert shape.ffn == pytest.approx(14336, rel=0.02), "Mixtral's"
    _, shape = read("llama:10B,hidden=4096")
    assert shape.hidden == 4096


def test_llama_3_by_its_sizes() -> None:
    text = "llama:layers=32,hidden=4096,heads=32,kv-heads=8,ffn=14336,vocab=128256,positions=131072"
    assert parameters(read(text)[0]) == parameters(find_model("llama-3.1-8b"))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("llama:", "layers"), ("llama:heads=4", "layers"), ("gpt:layers=4,hidden=100,heads=3", "heads"),
        ("gpt:kv-heads=3,layers=1,hidden=64", "model"), ("llama:10B,20B", "size"), ("gpt:10B,layers=2,hidden=64,ffn=64", "size"),
        ("llama:10B,hidden=0", "hidden"), ("llama:ten", "size"), ("moe:layers=1,hidden=64,experts=2,top-k=4", "top-k"),
        ("llama:layers=2,hidden=512,heads=8,kv-heads=3", "kv-heads"), ("gpt:layers=1.5,hidden=64", "layers"),
    ],
)  # fmt: skip
def test_sizes_that_no_model_has(text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find(text)
    assert caught.value.key == key


def test_a_size_that_cannot_be_met_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no gpt with .* has 10.00 B parameters; the nearest is gpt:layers=2"):
        read("gpt:10B,layers=2,hidden=64,ffn=64")


def test_names_of_models_stay_names() -> None:
    assert not any(map(is_shape, ("gpt2", "llama-3.1-8b", "meta-llama/Llama-3.1-8B", "C:\\models\\gpt", "./gpt:x")))


# -- the command line ------------------------------------------------------------------------------------------------------


def test_flags_are_the_name() -> None:
    by_flags = document("estimate --size 10B --family gpt --vocab 50k --seq-len 1024")
    by_name = document("estimate gpt:10B,vocab=50k --seq-len 1024")
    assert by_flags == by_name
    assert abs(by_flags["model"]["params"] / 1e10 - 1) < WITHIN
    assert "chosen as published models have it: layers, hidden, heads, ffn, positions" in by_flags["assumed"]["model"]


def test_other_commands_take_sizes() -> None:
    plan = document("plan --size 3B --gpu h100-sxm5-80gb --gpus 2 --seq-len 512 --global-batch 4 --micro-batch 1")
    assert plan["layouts"]
    found = document("network --layers 24 --hidden 2048 --gpu h100-sxm5-80gb --gpus 16 --tp 2")
    assert found["model"]["name"] == "llama:layers=24,hidden=2048"


def test_a_model_or_sizes() -> None:
    for line, said in (
        ("estimate gpt2 --size 1B", "in place of"), ("estimate", "--size"), ("network --family gpt", "layers"),
        ("plan --gpus 8", "--size"), ("estimate --size 1B --family bert", "family"),
    ):  # fmt: skip
        found = typed(line)
        assert found.code == 2
        assert said in found.err
        assert found.err.count("\n") == 1


def test_transformers_reads_the_config_of_a_shape() -> None:
    from loadgauge.pytorch.trace.programs.target import hugging_face

    config = hugging_face("llama:300M")
    assert (config.model_type, config.num_hidden_layers) == ("llama", read("llama:300M")[1].layers)
