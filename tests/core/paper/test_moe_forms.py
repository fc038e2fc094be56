"""The closed forms of a layer with experts and of one with latent attention, against a derivation by hand.

Legend: T = s b tokens, h hidden size, a heads, k key-value heads, d head width; q and m widths of the latents of
queries and of keys with values, n, r and v of a head's parts without and with positions and of its values; E experts, K
experts a token, f width of an expert, g of the shared MLP; t tensor-parallel, e expert-parallel ranks, u
tensor-parallel ranks of an expert.
16-bit activations; norm statistics and indices are neglected, as the papers do.
"""

from __future__ import annotations

import msgspec
import pytest
import sympy

from loadgauge.core.definitions.model.kernels import Dtypes, Kernels
from loadgauge.core.definitions.model.model import Block, Mlp, ModelSpec, Norm
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families.reference import deepseek_block, llama_model, mixtral_block
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.operations.operations import Layer

s, b, h, a, k, d, q, m, n, r, v, E, K, f, g, t, e, u = sympy.symbols(
    "s b h a k d q m n r v E K f g t e u", positive=True, integer=True
)
T = s * b
GROUPED = Kernels(dtypes=Dtypes(norm_statistic=0, index=0))
FUSED = msgspec.structs.replace(GROUPED, activation="fused", experts="fused")
MIXTRAL, DEEPSEEK = mixtral_block(h, a, k, d, E, K, f), deepseek_block(h, a, q, m, n, r, v, E, K, f, g)


def layer(block: Block, kernels: Kernels = GROUPED, **ranks: object) -> Layer:
    return block_layer(block, h, View.of(s, b, kernels=kernels, **ranks))


def same(found: object, by_hand: object) -> bool:
    return sympy.expand(found - by_hand) == 0


def test_mixtral_parameters() -> None:
    attention = h * a * d + 2 * h * k * d + a * d * h
    router, experts, norms = h * E, E * (h * 2 * f + f * h), 2 * h
    assert same(layer(MIXTRAL).params, attention + router + experts + norms)


def test_mixtral_flops() -> None:
    """Two for each token and matrix element it meets, and two products of the scores' size for each head."""
    matrices = h * a * d + 2 * h * k * d + a * d * h + h * E + K * 3 * h * f
    scores = 2 * (2 * s**2 * d) * a * b
    assert same(layer(MIXTRAL).forward_flops, 2 * T * matrices + scores)
    assert same(layer(MIXTRAL).backward_flops, 2 * (2 * T * matrices + scores))


def test_mixtral_kept_bytes() -> None:
    norm_input, normed = 2 * T * h, 2 * T * h
    queries, keys, values, context, log_sums = 2 * T * a * d, 2 * T * k * d, 2 * T * k * d, 2 * T * a * d, 4 * T * a
    attention = norm_input + normed + queries + keys + values + context + log_sums
    # float32: the scores of all experts, the chosen ones and their sum, and the weights in the order of the rows.
    router = 4 * T * E + 4 * T * K + 4 * T + 4 * T * K
    rows, gate, up, active, product, output = (2 * T * K * width for width in (h, f, f, f, f, h))
    mlp = norm_input + normed + router + rows + gate + up + active + product + output
    assert same(layer(MIXTRAL).saved(), attention + mlp)
    short = T * (8 * h + 4 * a * d + 4 * k * d + 4 * a + 4 * E + 8 * K + 4 + 4 * K * h + 8 * K * f)
    assert same(attention + mlp, short)


def test_mixtral_kept_bytes_fused_and_sharded() -> None:
    """Megatron's form on one rank of t x e x u: each computes u T K / t rows of f / u channels."""
    found = layer(MIXTRAL, FUSED, tp=t, sequence_parallel=True, ep=e, etp=u)
    attention = (2 * h + 2 * h + 2 * a * d + 4 * k * d + 2 * a * d + 4 * a) * T / t
    router = 4 * K * T / t
    rows = u * T * K / t
    mlp = 4 * h * T / t + router + rows * 2 * h + rows * 4 * f / u + rows * 4 + rows * 2 * f / u
    assert same(found.saved(), attention + mlp)


def test_traffic_of_the_experts() -> None:
    """Out and back, forward and backward: T K / t rows of h, of which (e - 1) / e leave the rank; then the u ranks."""
    found = layer(MIXTRAL, FUSED, tp=t, sequence_parallel=True, ep=e, etp=u)
    rows = 2 * T * K * h / t
    assert same(sum(c.wire for c in found.comm if c.axis == "ep"), 4 * rows * (e - 1) / e)
    assert same(sum(c.wire for c in found.comm if c.axis == "etp"), 4 * rows * (u - 1))


def test_deepseek_parameters() -> None:
    queries = h * q + q + q * a * (n + r)
    keys_and_values = h * (m + r) + m + m * a * (n + v)
    experts = h * E + 3 * E * h * f + 3 * h * g
    assert same(layer(DEEPSEEK).params, queries + keys_and_values + a * v * h + experts + 2 * h)


def test_deepseek_flops() -> None:
    attention = h * q + q * a * (n + r) + h * (m + r) + m * a * (n + v) + a * v * h
    mlp = h * E + 3 * K * h * f + 3 * h * g
    scores = 2 * s**2 * b * a * (n + r) + 2 * s**2 * b * a * v
    assert same(layer(DEEPSEEK).forward_flops, 2 * T * (attention + mlp) + scores)
    assert same(layer(DEEPSEEK).backward_flops, 2 * (2 * T * (attention + mlp) + scores))


def test_deepseek_kept_bytes() -> None:
    norm_input, normed = 2 * T * h, 2 * T * h
    # Of each latent, what goes into its norm and what comes out, which the matrix after it keeps.
    latents = 2 * (2 * T * q) + 2 * (2 * T * m)
    queries, keys, values, context = (2 * T * a * width for width in (n + r, n + r, v, v))
    attention = norm_input + normed + latents + queries + keys + values + context + 4 * T * a
    # The router's product is in float32: its input and its matrix are copied.
    router = 4 * T * h + 4 * E * h + 4 * T * E + 4 * T * K + 4 * T + 4 * T * K
    rows, gate, up, active, product, output = (2 * T * K * width for width in (h, f, f, f, f, h))
    shared = 4 * (2 * T * g)
    mlp = norm_input + normed + router + rows + gate + up + active + product + output + shared
    assert same(layer(DEEPSEEK).saved(), attention + mlp)


def test_traffic_of_latent_attention() -> None:
    """Sequence parallelism gathers q + m + r channels into attention, and scatters h out of it.

    Forward once; in backward the two latents again, and the reverse of each.
    """
    found = layer(DEEPSEEK, FUSED, tp=t, sequence_parallel=True, ep=e)
    sent = sum(c.wire for o in found if o.name.startswith("attention.") for c in (*o.forward_comm, *o.backward_comm))
    share = 2 * T * (t - 1) / t
    assert same(sent, share * (3 * (q + m) + 2 * r + 2 * h))


MODELS = {
    # total, active, and whether the published active parameters count the embedding
    "mixtral-8x7b": ("46.7", "12.9", True),
    "deepseek-v3": ("671", "37", False),
}


def model(name: str) -> ModelSpec:
    if name == "mixtral-8x7b":
        plain = llama_model(32, 4096, 32, 32000)
        return msgspec.structs.replace(plain, blocks=(mixtral_block(4096, 32, 8, 128, 8, 2, 14336),))
    block = deepseek_block(7168, 128, 1536, 512, 128, 64, 128, 256, 8, 2048, 2048)
    dense = msgspec.structs.replace(block, mlp=Mlp(intermediate_size=18432))
    return ModelSpec(
        name=name, model_type="deepseek_v3", hidden_size=7168, vocab_size=129280, blocks=(dense, block),
        pattern=(0,) * 3 + (1,) * 58, final_norm=Norm("rmsnorm"),
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_published_parameters(name: str) -> None:
    """In billions, to the digits published (source: jiang2024; deepseek2024v3)."""
    total, active, embedding = MODELS[name]
    found = parameters(model(name))
    counted = found.active if embedding else found.active - found.embedding
    for printed, value in ((total, found.total), (active, counted)):
        digits = len(printed.partition(".")[2])
        assert f"{value / 1e9:.{digits}f}" == printed
