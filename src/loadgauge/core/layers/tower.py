"""Steps of a tower of pictures or sounds beside ordinary blocks: from pixels to patches, and to tokens of the language model."""

from __future__ import annotations

import msgspec

from loadgauge.core.base.algebra import Size, maximum
from loadgauge.core.definitions.model.lora import ALL_TARGETS
from loadgauge.core.definitions.model.model import Block, Norm, Part, Step
from loadgauge.core.layers.feed_forward.mlp import activate
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import PIXELS, TYPED, Gemm, Layer, Operation, Tensor, Weight
from loadgauge.core.layers.operations.rank_view import View

NORMS = {
    "layernorm": Norm("layernorm", bias=True),
    "rmsnorm": Norm("rmsnorm"),
    "rmsnorm1": Norm("rmsnorm_plus_one"),
    "unweighted": Norm("rmsnorm", weight=False),
}
"""Norms of a step, by its word."""


SOUND = {"sound": 1, "halve": 2}
"""Steps of a spectrum: the frames that go in for one that comes out."""


def patches(part: Part, view: View) -> View:
    """Return a tower's view of a micro-batch: the patches of its pictures, which every rank of its sequences has whole.

    >>> view = patches(Part(width=64, tiles=2, patches=512, pairs=131072), View.of(4096, 3))
    >>> view.tokens, view.pairs, view.sequences, view.positions
    (1536, 393216, 6, 256.0)
    """
    lora, kernels = view.lora, view.kernels
    if lora is not None and part.whole:
        dtypes = kernels.dtypes
        if lora.casts and dtypes.residual is None:  # autocast of weights in 16 bits
            dtypes = msgspec.structs.replace(dtypes, residual=dtypes.activation)
        lora, kernels = None, msgspec.structs.replace(kernels, dtypes=dtypes)
    elif lora is not None:
        lora = msgspec.structs.replace(lora, targets=ALL_TARGETS)
    return msgspec.structs.replace(
        view,
        kernels=kernels,
        tokens=view.sequences * part.patches,
        pairs=view.sequences * part.pairs,
        kernel_tokens=None,
        sequences=view.sequences * part.tiles,
        positions=part.patches / max(1, part.tiles),
        sequence_parallel=False,
        input_gradients=view.input_gradients and part.hooked,
        cp=1,
        lora=lora,
    )


def entering(build: Builder, block: Block) -> Tensor:
    """Input of a block of a tower; the residual stream of its builder is made as wide as autocast makes it.

    LayerNorms are float32, before all blocks or, of 4-bit layers that hand it on, within them; else 16-bit sums stay so.
    """
    part, lora, narrow = block.tower, build.view.lora, build.dtypes.activation
    assert part is not None
    itemsize = narrow if "narrow" in part.enters else build.residual_itemsize
    if build.autocast and "normed" in part.enters:
        build.residual_itemsize = itemsize = 4
    elif lora is None:
        build.residual_itemsize = itemsize
    elif lora.casts and lora.stored is not None and block.norm.kind == "layernorm":
        build.residual_itemsize = 4
    return Tensor(
        "input", build.local_tokens * part.width, itemsize if "first" in part.enters else build.residual_itemsize
    )


def cast_masks(build: Builder, x: Tensor) -> None:
    """Of a tower whose pictures a mask parts, as wide as its patches: the copy that autocast makes for each layer's kernel."""
    last = next((index for index, each in enumerate(build.operations) if each.name == "attention.flash"), None)
    if last is not None and x.itemsize != build.dtypes.activation:
        flash = build.operations[last]
        copy = build.tensor("attention.mask", build.view.pairs)
        build.operations[last] = msgspec.structs.replace(flash, keeps=(*flash.keeps, copy))


def frozen(operation: Operation) -> Operation:
    """The operation where what it makes is not looked at: its weights, adapters too, get no gradient."""
    weights = tuple(msgspec.structs.replace(weight, trainable=False) for weight in operation.weights)
    return msgspec.structs.replace(operation, weights=weights)


def scaled(build: Builder, name: str, x: Tensor, block: Block) -> Tensor:
    """The output of a half of a block times a vector, where the block has one; keeps it for the vector's gradient."""
    if block.tower is None or not block.tower.scaled:
        return x
    vector = Weight(f"{name}.weight", block.tower.width, 1, "vector", build.trains(name))
    output = Tensor(name, x.numel, x.itemsize)
    build.operations.append(
        Operation(name, "elementwise", (x,), (output,), (vector,), (x,) if vector.trainable else ())
    )
    return output


def _hooked(build: Builder) -> Layer:
    """The frozen first steps of a tower whose embedding's output is made a leaf that needs a gradient: the graph holds it, and what
    follows keeps as if it were reached (source: transformers, `enable_input_require_grads`)."""
    every = build.operations
    end = 1 + next(index for index, each in enumerate(every) if each.gemms)
    product = every[end - 1].outputs
    leaf = Operation(
        "patches.leaf", "view", product, (), keeps=product if every[end:] else ()
    )  # the first block has its input
    build.operations = every[:end]
    frozen = build.layer("tower", reached=False)
    build.operations = every[end:]
    return Layer("tower", (*frozen, leaf, *build.layer("tower")))


def _attend(build: Builder, name: str, x: Tensor, step: Step) -> Tensor:
    """A table of `step.output` queries that attend to the patches of a tile, `step.width` wide, in one head's worth of products
    (source: PyTorch, `MultiheadAttention`)."""
    view, width = build.view, step.width
    rows = view.sequences * step.output
    table = Weight(f"{name}.queries.weight", width * step.output, 1, "vector", build.trains(f"{name}.queries"))
    queries = build.tensor(f"{name}.queries", rows * width)
    build.operations.append(Operation(f"{name}.queries", "view", (), (queries,), (table,)))
    queries = build.norm(f"{name}.normed", queries, NORMS["layernorm"], rows, width)
    query = build.linear(f"{name}.query", queries, rows, width, width, bias=True, adapter="")
    key, value = (
        build.linear(f"{name}.{each}", x, x.numel / width, width, width, bias=True, adapter="")
        for each in ("key", "value")
    )
    context = build.tensor(f"{name}.context", rows * width)
    patches = view.positions
    gemms = (Gemm(step.output, patches, width, view.sequences), Gemm(step.output, width, patches, view.sequences))
    flops = sum(product.flops for product in gemms)
    inputs = (query, key, value)
    build.operations.append(
        Operation(
            f"{name}.context",
            "attention",
            inputs,
            (context,),
            keeps=(*inputs, context),
            gemms=gemms,
            forward_flops=flops,
        )
    )
    return build.linear(f"{name}.output", context, rows, width, width, bias=True, adapter="")


def tower_steps(block: Block, view: View) -> Layer:
    """The operations of the steps of a block: convolutions (as products), linear layers, norms, tables, activations and pools."""
    part = block.tower
    assert part is not None
    if not block.adapted and view.lora is not None:
        view = msgspec.structs.replace(view, lora=msgspec.structs.replace(view.lora, targets=frozenset()))
    build = Builder(view, low=view.kernels.products, trained=block.trained)
    x = entering(build, block)
    seen = not (part.projects or part.beside)
    if seen:
        first = next(step for step in part.steps if step.kind != "copied")
        patched = view.tokens * (part.padded / part.patches if part.padded else 1)
        # Where none is a convolution, the model leaves its dtype to who calls it.
        wide = build.dtypes.activation if first.kind == "linear" and not build.autocast else 4
        x = pixels = Tensor("pixels", patched * first.width * (2 if first.kind in SOUND else 1), wide, "float32")
        if build.residual_itemsize != wide:
            # Qwen's models have a name for pixels in the dtype of the tower's weights.
            name = TYPED if "narrow" in part.enters and not build.wide_weights else "pixels.cast"
            x = build.cast(name, pixels, build.residual_itemsize)
    for index, step in enumerate(part.steps):
        name = f"{'projector' if part.projects else 'patches'}.{step.kind}_{index}"
        rows: Size = x.numel / (step.width or 1)
        if step.kind in ("conv", "linear", "matrix"):
            adapter = "up" if step.kind == "linear" else ""
            x = build.linear(name, x, rows, step.width, step.output, bias=step.bias, adapter=adapter,
                             output=build.tensor(name, rows * step.output))  # fmt: skip
            if part.projects and step.kind == "conv":  # which keeps what goes in for either gradient
                build.operations[-1] = msgspec.structs.replace(build.operations[-1], keeps=build.operations[-1].inputs)
        elif step.kind in SOUND:  # convolutions of three frames, of which the second halves them
            rows = rows / SOUND[step.kind]
            output = build.tensor(name, rows * step.output)
            x = build.linear(name, x, rows, 3 * step.width, step.output, bias=step.bias, adapter="", output=output)
            if step.kind == "halve":
                build.operations[-1] = msgspec.structs.replace(build.operations[-1], keeps=build.operations[-1].inputs)
        elif step.kind in NORMS:
            x = build.norm(name, x, NORMS[step.kind], rows, step.width)
        elif step.kind in ("positions", "vector", "idle", "fixed"):
            size = step.width * (step.output or 1)
            weight = Weight(
                f"{name}.weight", size, 1, "vector", step.kind not in ("idle", "fixed") and build.trains(name)
            )
            if step.kind == "positions" and "narrow" in part.enters:  # made in float32, and named
                named = build.float32(f"{TYPED}.positions", x.numel)
                build.operations.append(Operation(named.name, "view", (), (named,), gradients=False))
            wide = x.itemsize if "narrow" in part.enters or step.kind == "idle" else build.residual_itemsize
            x, before = Tensor(name, x.numel, maximum(x.itemsize, wide)), x
            build.operations.append(Operation(name, "view" if step.kind == "idle" else "elementwise", (before,), (x,),
                                              (weight,), shares_gradient=True))  # fmt: skip
        elif step.kind in ("mask", "angles"):
            angles = step.kind == "angles"
            wide = build.float32(name, view.tokens * 2 * step.width) if angles else Tensor(name, view.pairs, x.itemsize)
            x = build.elementwise(name, (x,), Tensor(name, x.numel, x.itemsize), (wide,), shares_gradient=True)
        elif step.kind in ("cropped", "join"):  # what several layers made, side by side
            every = view.tokens * step.width if step.kind == "cropped" else rows * step.output
            x = build.elementwise(name, (x,), build.tensor(name, every))
        elif step.kind == "rescale":
            x = build.elementwise(name, (x,), Tensor(name, x.numel, x.itemsize), shares_gradient=True)
        elif step.kind == "copied":
            x = build.elementwise(name, (x,), build.tensor(name, x.numel))
        elif step.kind == "pool":
            x = build.elementwise(name, (x,), build.tensor(name, rows), (x,))
        elif step.kind == "blend":
            x = build.elementwise(
                name, (x,), build.tensor(name, rows), (build.float32(f"{name}.shares", view.pairs / step.width),)
            )
        elif step.kind == "attend":
            x = _attend(build, name, x, step)
        elif step.kind == "swiglu":  # of halves of what comes, which is kept whole
            active = build.elementwise(
                f"{name}.activation", (x,), build.tensor(f"{name}.activation", rows * step.output), (x,)
            )
            x = build.elementwise(name, (active, x), build.tensor(name, rows * step.output), (active, x))
        elif step.kind == "mlp":
            gate, up = (
                build.linear(f"{name}.{each}", x, rows, step.width, step.output, adapter=each)
                for each in ("gate", "up")
            )
            active = activate(build, f"{name}.activation", gate, "silu")
            inner = build.elementwise(
                f"{name}.multiply", (active, up), Tensor(f"{name}.multiply", up.numel, up.itemsize), (active, up)
            )
            x = build.linear(f"{name}.down", inner, rows, step.output, step.width, adapter="down")
        else:
            x = activate(build, name, x, step.kind)
    if part.beside and block.reached:
        build.operations = [
            msgspec.structs.replace(step, keeps=tuple(kept for kept in step.keeps if kept.name != "input"))
            for step in build.operations
        ]
    # Angles are kept by what turns the first vectors that need a gradient.
    turns = (block.trained is None or view.input_gradients) and any(step.kind == "angles" for step in part.steps)
    layer = build.layer("tower", reached=block.reached or turns or (view.input_gradients and part.projects))
    if not seen:
        return layer
    if view.input_gradients and block.trained is not None:
        layer = _hooked(build)
    # The loop that trains holds the pixels until the step is over.
    held = Operation(PIXELS, "view", (), (pixels,), keeps=(pixels,))
    return Layer(layer.name, (held, *layer))
