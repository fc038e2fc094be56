"""One transformer block: its two halves, their norms, dropouts and residual sums, in the family's order."""

from __future__ import annotations

import msgspec

from loadgauge.core.base.algebra import Size, minimum, remembered, same
from loadgauge.core.definitions.model.model import (
    AltUp,
    Attention,
    Block,
    CompressedAttention,
    HyperConnections,
    LatentAttention,
    Mamba2,
    Moe,
)
from loadgauge.core.layers.attention.attention import attention
from loadgauge.core.layers.attention.compressed import compressed_attention
from loadgauge.core.layers.attention.mla import latent_attention
from loadgauge.core.layers.feed_forward.gemma4 import experts_beside, per_layer_input
from loadgauge.core.layers.feed_forward.mlp import mlp
from loadgauge.core.layers.feed_forward.moe import moe
from loadgauge.core.layers.mixers.mixers import linear_mixer
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Layer, Tensor
from loadgauge.core.layers.operations.rank_view import View, from_code
from loadgauge.core.layers.streams import alternated, banked, connected
from loadgauge.core.layers.tower import cast_masks, entering, frozen, patches, scaled, tower_steps


def _activation(block: Block) -> str:
    assert block.mlp is not None
    return block.mlp.activation


@remembered(64)
def block_layers(blocks: tuple[Block, ...], hidden_size: Size, view: View) -> tuple[Layer, ...]:
    """Return the operations of each of some blocks; a question that varies in other things finds them made.

    >>> from loadgauge import model
    >>> gpt2 = model("gpt2")
    >>> len(block_layers(gpt2.blocks, gpt2.hidden_size, View(tokens=8, pairs=64)))
    1
    """
    return tuple(block_layer(block, hidden_size, view) for block in blocks)


def block_layer(block: Block, hidden_size: Size, view: View) -> Layer:
    """The operations of one block, in forward order, on one rank.

    Korthikanti et al.'s equation 1 (source: korthikanti2022), bytes kept by a GPT layer, 16 bit:

    >>> from loadgauge.core.families.reference import gpt_block
    >>> from loadgauge.core.definitions.model.kernels import PAPER
    >>> s, b, h, a = 2048, 4, 6144, 64
    >>> layer = block_layer(gpt_block(h, a), h, View.of(s, b, kernels=PAPER))
    >>> layer.saved() == 34 * s * b * h + 5 * a * s**2 * b
    True
    """
    if (captured := from_code(block, "layer", view)) is not None:
        return captured  # type: ignore[no-any-return]
    if block.tower is not None:
        view, hidden_size = patches(block.tower, view), block.tower.width
        if block.tower.steps:
            return tower_steps(block, view)
        if (near := getattr(block.attention, "sliding_window", None)) is not None:  # each window by itself
            view = msgspec.structs.replace(view, pairs=minimum(view.pairs, view.tokens * near))
    if not block.adapted and view.lora is not None:
        view = msgspec.structs.replace(view, lora=msgspec.structs.replace(view.lora, targets=frozenset()))
    build = Builder(view, low=view.kernels.products, trained=block.trained)
    wide_residual = block.residual_in_fp32 and not build.autocast and build.dtypes.activation != 4
    if block.residual_in_fp32:
        build.residual_itemsize = 4
    build.widen()
    x = build.residual("input", hidden_size * (1 if block.streams is None else block.streams.count))
    if block.tower is not None:
        x = entering(build, block)

    def norm(name: str, tensor: Tensor, branch: Tensor | None = None) -> Tensor:
        held = branch if branch is not None and build.kernels.compiled and branch.itemsize < tensor.itemsize else None
        if wide_residual:
            tensor = build.elementwise(f"{name}.cast", (tensor,), build.hidden(f"{name}.cast", hidden_size))
        return build.norm(name, tensor, block.norm, build.local_tokens, hidden_size, kept_input=held)

    def mixed(name: str, tensor: Tensor) -> Tensor:
        return banked(build, name, tensor, block.residual_bank, hidden_size) if block.residual_bank else tensor

    def attend(tensor: Tensor) -> Tensor:
        spec = block.attention
        assert spec is not None
        if isinstance(spec, LatentAttention):
            output = latent_attention(build, tensor, spec, hidden_size)
        elif isinstance(spec, Attention):
            output = attention(build, tensor, spec, hidden_size)
            if block.tower is not None and "masked" in block.tower.enters:
                cast_masks(build, x)
        elif isinstance(spec, CompressedAttention):
            output = compressed_attention(build, tensor, spec, hidden_size)
        else:
            output = linear_mixer(build, tensor, spec, hidden_size)
        build.hold(tensor)
        output = scaled(build, "attention.scale", output, block)
        dropout = block.dropout if block.dropout_after_attention else 0.0
        return build.dropout("attention.residual_dropout", output, dropout, "residual_dropout")

    def both(tensor: Tensor, beside: Mamba2) -> Tensor:
        first, second = (
            build.elementwise(f"{name}.input_scaled", (tensor,), build.hidden(f"{name}.input_scaled", hidden_size))
            for name in ("mamba", "attention")
        )
        mixed = linear_mixer(build, first, beside, hidden_size)
        return build.elementwise("attention.both", (mixed, attend(second)), build.hidden("attention.both", hidden_size))

    def feed_forward(tensor: Tensor) -> Tensor:
        dropout = block.dropout if block.dropout_after_mlp else 0.0
        assert block.mlp is not None
        if isinstance(block.mlp, Moe):
            output = moe(build, tensor, block.mlp, hidden_size)
        else:
            output = mlp(build, tensor, block.mlp, hidden_size)
        build.hold(tensor)
        output = scaled(build, "mlp.scale", output, block)
        return build.dropout("mlp.residual_dropout", output, dropout, "residual_dropout")

    if isinstance(block.streams, HyperConnections):
        y = x
        if block.attention is not None:
            y = connected(
                build, "attention.hc", x, block.streams, hidden_size, lambda half: attend(norm("attention.norm", half))
            )
        if block.mlp is not None:  # an engine's layers are asked for by halves
            connected(build, "mlp.hc", y, block.streams, hidden_size, lambda half: feed_forward(norm("mlp.norm", half)))
    elif isinstance(block.streams, AltUp):
        alternated(build, x, block, hidden_size, attend, feed_forward)
    elif block.attention is None or block.mlp is None:
        half, work = ("mlp", feed_forward) if block.attention is None else ("attention", attend)
        build.add(f"{half}.residual", x, work(norm(f"{half}.norm", x)))
    elif block.placement == "parallel":
        normed = norm("attention.norm", x)
        attended = attend(normed)
        fed = feed_forward(normed if block.shared_norm else norm("mlp.norm", x))
        build.add("mlp.residual", build.add("attention.residual", x, attended), fed)
    elif block.placement == "post":
        y = norm("attention.norm", build.add("attention.residual", x, attend(x)))
        norm("mlp.norm", build.add("mlp.residual", y, feed_forward(y)))
    elif block.placement == "after":
        y = build.add("attention.residual", x, norm("attention.post_norm", attend(x)))
        build.add("mlp.residual", y, norm("mlp.post_norm", feed_forward(y)))
    else:
        sandwich = block.placement == "sandwich"
        normed = norm("attention.norm", mixed("attention", x)) if block.first_norm else x
        attended = attend(normed) if block.beside is None else both(normed, block.beside)
        attended = norm("attention.post_norm", attended) if sandwich else attended
        y = build.add("attention.residual", x, attended)
        normed = norm("mlp.norm", mixed("mlp", y), attended)
        apart = isinstance(block.mlp, Moe) and block.mlp.own_norms
        fed = experts_beside(build, y, normed, block, hidden_size) if apart else feed_forward(normed)
        y = build.add("mlp.residual", y, norm("mlp.post_norm", fed) if sandwich else fed)
        if isinstance(block.mlp, Moe) and block.mlp.everywhere:  # whose layer has a name for it
            build.operations[-1] = msgspec.structs.replace(build.operations[-1], holds=(attended,))
        if not same(block.per_layer_input, 0):
            per_layer_input(build, y, block, hidden_size, _activation(block))
    if block.tower is not None and block.tower.unused:
        build.operations = [frozen(operation) for operation in build.operations]
    if block.shares_weights:
        build.operations = [msgspec.structs.replace(operation, weights=()) for operation in build.operations]
    return build.layer("block", reached=block.reached or view.input_gradients)
