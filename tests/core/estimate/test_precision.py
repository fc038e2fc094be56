"""Recipes of 8 and 4 bits: what they cost by the definitions of their formats, and what others measured of them."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from command_line import document, typed
from loadgauge import Layout, cluster, estimate, gpu, model
from loadgauge.core.base.errors import ConfigError, NotModelled
from loadgauge.core.command_line.options.options import parse
from loadgauge.core.definitions.layout.layout import RecomputePolicy
from loadgauge.core.definitions.model.lora import BASE_FORMATS, BaseName, Lora
from loadgauge.core.definitions.training.frameworks import LOW_PRECISIONS
from loadgauge.core.definitions.training.precision import ALIASES, PRECISIONS, Precision
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.memory.recompute import applied
from loadgauge.core.estimate.states.states import RankWeights, WeightCount, gathered_bytes, model_states
from loadgauge.core.families.reference import deepseek_block, gpt_block, llama_block, mixtral_block
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Layer
from loadgauge.core.resolve.reproduce import completer
from loadgauge.core.resolve.resolve import resolve_job

MEGATRON = LOW_PRECISIONS["megatron"]
BESIDE = [name for name in MEGATRON if not name.endswith("-primary")]
MIB, GIB = 2**20, 2**30


def layer_of(framework: str, recipe: str, **view: Any) -> Layer:
    kernels = training(framework, recipe).kernels
    return block_layer(llama_block(512, 8, 4, 64, 1408), 512, View.of(256, 2, kernels=kernels, **view))


def elements(layer: Layer, name: str) -> float:
    return next(tensor.numel for tensor in layer.kept() if tensor.name == name)


# -- names ------------------------------------------------------------------------------------------------------------


def test_names() -> None:
    for framework, recipes in LOW_PRECISIONS.items():
        for name, low in recipes.items():
            found = training(framework, name)
            assert found.precision.name == name
            assert found.precision.products == found.kernels.products == low
            assert found.kernels.dtypes.activation == 2, "all but the products stays in 16 bits"
    assert training("megatron", "fp8").precision == training("megatron", ALIASES["fp8"]).precision
    for name in PRECISIONS:
        assert training("megatron", name).kernels.products is None


def test_what_is_not_known_or_not_modelled_says_so() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown precision 'fp8-blokwise' \(known: .*\); did you mean 'fp8-blockwise'"
    ):
        training("megatron", "fp8-blokwise")
    for framework, name in (
        ("litgpt", "nvfp4"), ("deepspeed", "fp8-rowwise"), ("torchtitan", "nvfp4"), ("megatron", "fp8-rowwise"),
    ):  # fmt: skip
        with pytest.raises(NotModelled, match=f"is modelled for .*, not for {framework}: "):
            training(framework, name)
    with pytest.raises(NotModelled, match="stored in 4 bits"):
        training("megatron", "fp8", lora=Lora(rank=8, quantised="nf4"))
    with pytest.raises(ConfigError, match="unknown format of a base 'int3'"):
        Lora(rank=8, quantised="int3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no routed experts"):
        training(lora=Lora(rank=8, quantised="mxfp4")).check(model("llama-3.1-8b"))
    training(lora=Lora(rank=8, quantised="mxfp4")).check(model("gpt-oss-20b"))


@pytest.mark.parametrize(("zero", "weight", "moment"), [(0, 2, 2), (3, 4, 4)])
def test_transformers_quantises_the_products_of_what_it_loads(zero: int, weight: int, moment: int) -> None:
    """accelerate's 8-bit back-ends change the products: weights are those of plain bf16, as loaded or in float32 shards."""
    plain, eight = (training("huggingface", name).under(zero).precision for name in ("bf16", "fp8"))
    assert (eight.weight, eight.moment) == (plain.weight, plain.moment) == (weight, moment)
    assert plain.products is None
    assert eight.products is not None


# -- what is published ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "published"), [("bf16", 6.00), ("fp8-delayed", 6.02)])
def test_the_linear_layer_of_transformer_engines_documentation(precision: str, published: float) -> None:
    """Memory after the forward of one (1024, 1024) layer on 1024 tokens (source: transformer-engine).

    Its input wants no gradient, so of the quantised weight only the rows are made; the rest of the second figure are
    states of the recipe's scales.
    """
    kind = training("megatron", precision)
    low = kind.precision.products
    build = Builder(View(tokens=1024, pairs=1, kernels=kind.kernels), low=low)
    x = build.tensor("x", 1024 * 1024)
    y = build.linear("y", x, 1024, 1024, 1024)
    weight = build.layer("linear").params
    held = kind.precision.weight * weight + build.layer("linear").saved() + y.nbytes
    if low is not None:
        held = held + low.weight_element * weight
    assert round(held / MIB, 1) == round(published, 1)
    assert 0 <= published - held / MIB < 0.03


@pytest.mark.parametrize(
    ("name", "single", "double"),
    [("llama-2-7b", 14.14, 13.84), ("llama-2-13b", 23.14, 22.55), ("phi-1.5", 3.78, 3.72)],
)
def test_quantised_scales_in_litgpts_table(name: str, single: float, double: float) -> None:
    """QLoRA with and without quantised scales on one A100, in GB of two decimals (litgpt, resource-tables.md).

    The pair differs in nothing but how the base is stored.
    """
    spec, layout = model(name), Layout(micro_batch=1, global_batch=1, seq_len=512)
    weights = {
        stored: estimate(spec, layout, training(lora=Lora(rank=8, quantised=stored))).memory.parts["weights"]
        for stored in ("nf4-single", "nf4")
    }
    assert (weights["nf4-single"] - weights["nf4"]) / 1e9 == pytest.approx(single - double, abs=0.015)


@pytest.mark.parametrize(("name", "published"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_checkpoints_with_experts_in_mxfp4(name: str, published: float) -> None:
    """GiB of the checkpoint: experts in MXFP4, all else in 16 bits (source: openai2025, table 1)."""
    spec = model(name)
    lora = Lora(rank=1, targets=frozenset({"query"}), quantised="mxfp4")
    result = estimate(spec, Layout(micro_batch=1, global_batch=1, seq_len=512), training(lora=lora))
    adapters = 2 * spec.num_hidden_layers * (spec.hidden_size + 64 * 64)
    assert (result.memory.parts["weights"] - adapters) / GIB == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(
    ("recipe", "micro_batch", "bf16", "low"),
    [
        ("fp8-tensorwise", 1, 47.65, 47.77), ("fp8-rowwise", 1, 47.65, 47.79),
        ("fp8-tensorwise", 1, 39.09, 39.07), ("fp8-rowwise_with_gw_hp", 1, 39.09, 39.32),
        ("fp8-tensorwise", 1, 33.71, 33.38), ("fp8-rowwise", 1, 33.71, 33.72), ("mxfp8", 1, 33.71, 33.88),
        ("fp8-tensorwise", 2, 77.0, 76.8),
    ],
)  # fmt: skip
def test_torchao_hardly_changes_the_memory(recipe: str, micro_batch: int, bf16: float, low: float) -> None:
    """Llama 3 8B, 8 GPUs, FSDP, 8192 tokens: GiB reserved (source: torchao; torchtitan, llama3_h100_202412)."""
    layout = Layout(dp=8, zero=3, micro_batch=micro_batch, global_batch=8 * micro_batch, seq_len=8192)
    before, after = (
        estimate(model("llama-3-8b"), layout, training("torchtitan", name)).memory.total for name in ("bf16", recipe)
    )
    assert after / before - 1 == pytest.approx(low / bf16 - 1, abs=0.01)


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("fp8-tensorwise", 2.0), ("fp8-delayed", 2.0), ("fp8-blockwise", 2 * (1 + 4 / 16384)),
        ("mxfp8", 2 * 33 / 32), ("nvfp4", 2 * 9 / 16),
    ],
)  # fmt: skip
def test_copies_of_the_weights(name: str, each: float) -> None:
    """By rows and by columns: beside the 16 bits, or instead of them; of block matrices only."""
    of = training("megatron", name).precision
    count = WeightCount(trainable=1_000_000, quantised=600_000)
    plain = model_states(count, PRECISIONS["bf16-mixed-18"])
    assert model_states(count, of).weights == pytest.approx(plain.weights + each * 600_000, rel=1e-12)
    primary = training("megatron", f"{name}-primary").precision
    assert model_states(count, primary).weights == pytest.approx(2 * 400_000 + each * 600_000, rel=1e-12)
    for other in (of, primary):
        assert model_states(count, other).gradients == plain.gradients
        assert model_states(count, other).optimizer == plain.optimizer
    # ZeRO-3 quantises what it gathered, or gathers it quantised.
    assert model_states(count, of, zero=3, dp=4).weights == plain.weights / 4
    assert model_states(count, primary, zero=3, dp=4).weights == model_states(count, primary).weights / 4
    assert gathered_bytes(count, of) == 2_000_000
    assert gathered_bytes(count, primary) == pytest.approx(2 * 400_000 + each / 2 * 600_000, rel=1e-12)


def test_gathered_bytes_of_a_frozen_base_are_those_it_is_stored_in() -> None:
    count = WeightCount(trainable=1000, frozen=100, base=10_000)
    for name, stored in BASE_FORMATS.items():
        assert gathered_bytes(count, PRECISIONS["bf16-pure"], name) == 2200 + stored.nbytes * 10_000


def test_which_weights_are_quantised() -> None:
    kernels = training("megatron", "fp8").kernels
    block = deepseek_block(512, 8, 128, 64, 32, 16, 32, 8, 2, 256, 256)
    layer = block_layer(block, 512, View.of(256, 1, kernels=kernels))
    by_name = {weight.name: weight for weight in layer.weights}
    matrices = {name for name, weight in by_name.items() if weight.kind == "matrix"}
    low = {name for name, weight in by_name.items() if weight.quantised}
    assert matrices - low == {"mlp.router.weight"}
    assert RankWeights.of(layer.weights).all.quantised == sum(by_name[name].numel for name in low)
    spec = model("llama-3.1-8b")
    h, f = spec.hidden_size, 14336
    # The gate of the shared experts, a row, is no layer of the library.
    gated = model("qwen1.5-moe-a2.7b")
    weights = block_layer(gated.blocks[0], gated.hidden_size, View.of(256, 1, kernels=kernels)).weights
    exact = {weight.name for weight in weights if weight.kind == "matrix" and not weight.quantised}
    assert exact == {"mlp.router.weight", "mlp.shared_gate.weight"}
    result = estimate(spec, Layout(micro_batch=1, global_batch=1, seq_len=512), training("megatron", "fp8"))
    plain = estimate(spec, Layout(micro_batch=1, global_batch=1, seq_len=512), training("megatron", "bf16"))
    extra = result.memory.parts["weights"] - plain.memory.parts["weights"]
    assert extra == 2 * 32 * (2 * h * h + 2 * h * h / 4 + 3 * h * f), "not the embedding, not the head"


def test_autocast_copies_no_experts_of_transformers() -> None:
    """Their grouped product runs in float32 there; what is copied are the other matrices, the head among them."""
    spec = model("olmoe-1b-7b")
    result = estimate(
        spec, Layout(micro_batch=1, global_batch=1, seq_len=512), training("huggingface", "bf16-autocast")
    )
    h, layers = spec.hidden_size, spec.num_hidden_layers
    matrices = layers * (4 * h * h + 64 * h) + spec.vocab_size * h
    assert max(moment.parts["gathered"] for moment in result.memory.moments) == 2 * matrices, "all of them, in forward"


def test_a_stored_base_is_gathered_as_it_is_stored() -> None:
    """4 bits and scales on the wire under ZeRO-3, and not 16."""
    spec, h100s = model("llama-3.2-1b"), cluster(gpu("h100-sxm5-80gb"), 4)
    layout = Layout(dp=4, zero=3, micro_batch=1, global_batch=4, seq_len=512)
    wire = {}
    for stored in ("nf4", False):
        result = estimate(spec, layout, training(lora=Lora(rank=8, quantised=stored)), cluster=h100s)
        rows = [row for row in result.network if row.what.startswith("weights") and "head" not in row.what]
        wire[stored] = sum(row.payload for row in rows)
    base = 2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 8192
    assert wire[False] - wire["nf4"] == pytest.approx((2 - BASE_FORMATS["nf4"].nbytes) * base, rel=1e-9)


@pytest.mark.parametrize("recipe", [*MEGATRON, "bf16"])
def test_the_explanation_adds_up(recipe: str) -> None:
    layout = Layout(tp=2, dp=2, zero=1, sequence_parallel=True, micro_batch=1, global_batch=2, seq_len=2048)
    result = estimate(model("qwen3-0.6b"), layout, training("megatron", recipe))
    for part in ("weights", "activations", "transient"):
        found = result.explain(part)
        assert sum(step.nbytes for step in found.steps) == pytest.approx(found.total, rel=1e-12)
        assert not any("not itemised" in step.what for step in found.steps), found.steps


# -- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", BESIDE)
def test_what_a_block_saves(recipe: str) -> None:
    """Two norms' outputs and the last matrix's input shrink; the context does where another tensor can stand for it."""
    low, bf16 = layer_of("megatron", recipe), layer_of("megatron", "bf16")
    shrunk = sum(elements(bf16, name) for name in ("attention.norm", "mlp.norm", "mlp.multiply"))
    context = elements(bf16, "attention.context")
    element = MEGATRON[recipe].element
    added = element * context if recipe == "fp8-delayed" else 0
    assert bf16.saved() - low.saved() == (2 - element) * shrunk - added
    names = {tensor.name for tensor in low.kept()}
    assert {"attention.norm", "mlp.norm", "mlp.multiply"}.isdisjoint(names)
    assert {"attention.norm.quantised", "mlp.norm.quantised", "mlp.multiply.quantised", "attention.context"} <= names


@pytest.mark.parametrize("recipe", BESIDE)
def test_what_latent_attention_and_experts_save(recipe: str) -> None:
    """The norms' and activations' outputs and the dispatched rows, quantised; where 16 bits are held anyway, those."""
    block = deepseek_block(512, 8, 128, 64, 32, 16, 32, 8, 2, 256, 256)
    kept = block_layer(block, 512, View.of(256, 2, kernels=training("megatron", recipe).kernels)).kept()
    quantised = {tensor.name.removesuffix(".quantised") for tensor in kept if tensor.dtype == "quantised"}
    held = {"attention.context", "mlp.norm"}
    always = {
        "attention.norm", "attention.query_norm", "attention.key_value_norm",
        "mlp.dispatch", "mlp.multiply", "mlp.shared.multiply",
    }  # fmt: skip
    assert quantised == (always | held if recipe == "fp8-delayed" else always)
    assert held <= {tensor.name for tensor in kept}


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_what_experts_quantise_inside_backward(framework: str) -> None:
    """The gradient of every row twice; torchao's rows and weights too, where torchtitan has two first matrices."""
    kernels = training(framework, "mxfp8").kernels
    block = mixtral_block(512, 8, 4, 64, 8, 2, 256)
    layer = block_layer(block, 512, View.of(256, 2, kernels=kernels))
    rows, h, f = 512 * 2, 512, 256
    name, halves, again = ("mlp.gate", 1, 1) if framework == "torchtitan" else ("mlp.gate_up", 2, 0)
    first = next(op for op in layer if op.name == name)
    assert first.workspace == 33 / 32 * (2 * rows * halves * f + again * (rows * h + 8 * h * halves * f))


@pytest.mark.parametrize("recipe", BESIDE)
def test_what_recomputation_drops(recipe: str) -> None:
    layer = layer_of("megatron", recipe)
    again = applied(RecomputePolicy(mode="ops", ops=("mlp.multiply", "mlp.norm")), layer)
    dropped = {tensor.name for tensor in layer.kept()} - {tensor.name for tensor in layer.kept(again)}
    assert {"mlp.multiply.quantised", "mlp.norm.quantised"} <= dropped
    # Attention alone: its output stands for itself, or its quantised copy does.
    left = {tensor.name for tensor in layer.kept(applied(RecomputePolicy(mode="selective"), layer))}
    context = "attention.context.quantised" if recipe == "fp8-delayed" else "attention.context"
    assert {name for name in left if name.startswith("attention.context")} == {context}
    full = layer.kept(applied(RecomputePolicy(mode="full"), layer))
    assert [tensor.name for tensor in full] == ["input"]


def test_the_quantised_copy_is_of_the_ranks_own_tokens() -> None:
    """Under sequence parallelism the gather travels in 8 bits, and a sum does not."""
    low, bf16 = (layer_of("megatron", name, tp=2, sequence_parallel=True) for name in ("fp8-blockwise", "bf16"))
    assert elements(low, "mlp.norm.quantised") == elements(bf16, "mlp.norm") == 512 * 256
    for one, other in zip(low.comm, bf16.comm, strict=True):
        factor = 1.03125 / 2 if one.kind == "all_gather" else 1
        assert one.nbytes == factor * other.nbytes
    for name in ("mlp.up", "mlp.gate", "mlp.down"):
        narrow, wide = (next(op for op in layer if op.name == name).workspace for layer in (low, bf16))
        made = 0 if name == "mlp.down" else 2 * 1.03125 * 512 * 704
        assert narrow == (wide if name == "mlp.down" else wide * 1.03125 / 2) + made


@pytest.mark.parametrize(
    ("framework", "recipe"), [("megatron", "mxfp8"), ("torchtitan", "mxfp8"), ("torchtitan", "fp8-rowwise_with_gw_hp")]
)
def test_what_is_quantised_inside_backward(framework: str, recipe: str) -> None:
    """The gradient twice; torchao's input and weight too, and none of the input where its product is in 16 bits."""
    workspaces = {op.name: op.workspace for op in layer_of(framework, recipe)}
    tokens, h, f = 512, 512, 1408
    each = {"mxfp8": 33 / 32}.get(recipe, 1)
    gradient, taken, weight = tokens * f, tokens * h, h * f
    want = {
        ("megatron", "mxfp8"): 2 * gradient,
        ("torchtitan", "mxfp8"): 2 * gradient + taken + weight,
        ("torchtitan", "fp8-rowwise_with_gw_hp"): gradient + weight,
    }[framework, recipe]
    assert workspaces["mlp.up"] == each * want
    plain = {op.name: op.workspace for op in layer_of(framework, "bf16")}
    assert {name for name in plain if workspaces[name] != plain[name]} == {
        "attention.query", "attention.key", "attention.value", "attention.output", "mlp.gate", "mlp.up", "mlp.down",
    }  # fmt: skip


@pytest.mark.parametrize("recipe", BESIDE)
def test_a_frozen_block_keeps_what_adapters_need(recipe: str) -> None:
    """Adapters run in 16 bits, and a frozen matrix keeps nothing; its gradient is quantised by rows only."""
    lora = Lora(rank=8)
    low, bf16 = (layer_of("megatron", name, lora=lora) for name in (recipe, "bf16"))
    assert low.saved() == bf16.saved()
    gradient = next(op for op in low if op.name == "mlp.up").workspace
    assert gradient == MEGATRON[recipe].element * 512 * 1408


@pytest.mark.parametrize("stored", [False, True, *BASE_FORMATS])
def test_a_stored_base_is_made_in_16_bits_by_each_product(stored: bool | BaseName) -> None:
    kernels = training("huggingface").kernels
    view = View.of(256, 2, kernels=kernels, lora=Lora(rank=8, quantised=stored))
    dense = {op.name: op for op in block_layer(llama_block(512, 8, 4, 64, 1408), 512, view)}
    block = deepseek_block(512, 8, 128, 64, 32, 16, 32, 8, 2, 256, 256)
    routed = {op.name: op for op in block_layer(block, 512, view)}
    experts_only = stored == "mxfp4"
    assert dense["mlp.up"].workspace == (0 if experts_only or not stored else 2 * 512 * 1408)
    assert dense["mlp.up"].weights[0].base is not experts_only
    assert routed["mlp.down"].workspace == (2 * 8 * 256 * 512 if stored else 0)
    assert routed["mlp.down"].weights[0].base
    assert not routed["mlp.router"].weights[0].base


def test_an_unquantised_block_is_what_it_was() -> None:
    layer = block_layer(gpt_block(512, 8), 512, View.of(256, 2))
    assert not any(tensor.dtype == "quantised" for operation in layer for tensor in operation.keeps)
    assert not any(weight.quantised for weight in layer.weights)


def test_sources_are_cited() -> None:
    from loadgauge.core.base.sources import cite

    for recipes in LOW_PRECISIONS.values():
        for low in recipes.values():
            assert re.search("Engine|torchao", str(cite(low.source)))
    for stored in BASE_FORMATS.values():
        assert cite(stored.source)
    assert msgspec.structs.asdict(Precision(name="x", weight=2, compute=2, gradient=2))["products"] is None


@pytest.mark.parametrize("weights", ["", "--weights float32", "--weights bfloat16"])
def test_accelerates_products_in_eight_bits_leave_the_weights_as_they_are_loaded(weights: str) -> None:
    """torchao keeps 16-bit inputs and weights (torchao, float8 README): the states are those of bf16, only the products differ."""
    line = f"estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3 {weights}"
    wide, few = (document(f"{line} --precision {name}") for name in ("bf16", "fp8"))
    for part in ("weights", "gradients", "optimizer"):
        assert few["memory"]["parts"][part] == wide["memory"]["parts"][part]
    assert few["time"]["step"] < wide["time"]["step"]
    setup = resolve_job(parse(f"{line} --precision fp8".split()[1:]))
    again = document(completer(setup.job)(setup.estimate()).command().removeprefix("loadgauge "))
    assert again["memory"]["total"] == few["memory"]["total"]


def test_the_recipes_are_in_the_help() -> None:
    said = " ".join(typed("estimate --help-all").out.replace("-\n", "-").split())
    named = said.partition("--precision NAME")[2].partition("--with")[0].replace("- ", "-")
    for name in ("fp8", "nvfp4", *(name for recipes in LOW_PRECISIONS.values() for name in recipes)):
        assert name in named
