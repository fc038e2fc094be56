"""Parts of Gemma 4's blocks beside attention and MLP: experts next to the MLP, and a small input of each layer's own.

Legend: T tokens, h hidden size, p channels of a layer's own input, L layers.
"""

from __future__ import annotations

import msgspec

from loadgauge.core.base.algebra import Size
from loadgauge.core.definitions.model.model import Block, ModelSpec, Moe
from loadgauge.core.layers.feed_forward.mlp import activate, mlp
from loadgauge.core.layers.feed_forward.moe import moe
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Operation, Tensor, Weight


def experts_beside(build: Builder, y: Tensor, normed: Tensor, block: Block, hidden_size: Size) -> Tensor:
    """Adds an MLP, which reads the block's `normed` stream, and experts, which read the stream `y` behind a norm of their
    own; each has a norm after it. Returns their sum.
    """
    spec, rows = block.mlp, build.local_tokens
    assert isinstance(spec, Moe)
    assert spec.shared is not None
    dense = mlp(build, normed, spec.shared, hidden_size, prefix="mlp.shared")
    first = build.norm("mlp.shared_norm", dense, block.norm, rows, hidden_size)
    plain = build.norm("mlp.router_norm", y, msgspec.structs.replace(block.norm, weight=False), rows, hidden_size)
    scale = Weight("mlp.router.scale", hidden_size, 1, "vector", build.trains("mlp.router"))
    scaled = build.tensor("mlp.router_input", y.numel)
    keeps = (plain,) if scale.trainable else ()
    build.operations.append(Operation("mlp.router_input", "elementwise", (plain,), (scaled,), (scale,), keeps=keeps))
    routed = build.norm("mlp.experts_norm", y, block.norm, rows, hidden_size)
    routed_out = moe(build, routed, msgspec.structs.replace(spec, shared=None), hidden_size, scaled)
    second = build.norm("mlp.experts_post_norm", routed_out, block.norm, rows, hidden_size)
    return build.add("mlp.both", first, second)


def per_layer_input(build: Builder, x: Tensor, block: Block, hidden_size: Size, activation: str) -> Tensor:
    """Adds the layer's own input to the stream `x`: gated by the stream, widened, and behind a norm.

    All layers' inputs are one tensor, which is kept where it is made (`per_layer_inputs`).
    """
    rows, width = build.local_tokens, block.per_layer_input
    gate = build.linear("per_layer.gate", x, rows, hidden_size, width, adapter="per_layer_gate")
    active = activate(build, "per_layer.activation", gate, activation)
    product = build.tensor("per_layer.product", rows * width)
    product = build.elementwise("per_layer.product", (active,), product, keeps=(active,))
    wide = build.linear("per_layer.project", product, rows, width, hidden_size, adapter="per_layer_project")
    return build.add("per_layer.residual", x, build.norm("per_layer.norm", wide, block.norm, rows, hidden_size))


def per_layer_inputs(build: Builder, x: Tensor, model: ModelSpec, indices: Tensor) -> None:
    """Adds what the layers' own inputs are made of: a row of L p from a table, and as much made of the embedding `x`.

    Bytes of the table, 16 bits, for Gemma 4 E2B's 262144 tokens, 35 layers and 256 channels: 2 * 262144 * 35 * 256.
    """
    rows, count, width = build.local_tokens, model.num_hidden_layers, model.blocks[0].per_layer_input
    together = count * width
    trained = build.trains("embedding.per_layer")
    table = Weight(
        "embedding.per_layer.weight",
        model.per_layer_vocab * together,
        1,
        "table",
        trained,
        shape=(model.per_layer_vocab, together),
    )
    row = build.tensor("embedding.per_layer", rows * together)
    keeps = (indices,) if trained else ()
    build.operations.append(Operation("embedding.per_layer", "lookup", (indices,), (row,), (table,), keeps))
    projected = build.linear("embedding.per_layer_project", x, rows, model.hidden_size, together)
    normed = build.norm("embedding.per_layer_norm", projected, model.blocks[0].norm, rows * count, width)
    inputs = build.tensor("embedding.per_layer_inputs", rows * together)
    build.elementwise("embedding.per_layer_inputs", (normed, row), inputs, keeps=(inputs,))
