"""Blocks between which not one residual stream flows but several: hyper-connections (DeepSeek-V4) and AltUp (Gemma 3n); or that
read earlier values of theirs as well: attention residuals (Kimi K3).

Legend: T tokens, h hidden size, n streams, r rank of the product beside attention (LAuReL).

What is kept for backward is read off transformers' modules (5.23): tests/core/oracle/test_streams.py counts it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from loadgauge.core.base.algebra import Size
from loadgauge.core.definitions.model.model import AltUp, Block, HyperConnections, Mlp, ModelSpec
from loadgauge.core.layers.feed_forward.mlp import activate
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Gemm, Operation, Tensor, Weight

Half = Callable[[Tensor], Tensor]


def stream(build: Builder, name: str, numel: Size) -> Tensor:
    """A tensor of the residual streams."""
    return Tensor(name, numel, build.residual_itemsize)


def _product(
    build: Builder, name: str, first: Tensor, second: Tensor, output: Tensor, gemm: Gemm, keeps: tuple[Tensor, ...]
) -> Tensor:
    """A small matrix of each token times its streams."""
    build.operations.append(
        Operation(
            name,
            "gemm",
            (first, second),
            (output,),
            keeps=keeps,
            gemms=(gemm,),
            forward_flops=gemm.flops,
            input_gradient_flops=2 * gemm.flops,
        )
    )
    return output


# -- hyper-connections ------------------------------------------------------------------------------------------------


def _mixed(build: Builder, name: str, x: Tensor, count: Size, hidden: Size, columns: Size, scales: int) -> Tensor:
    """Numbers made of all streams of a token: their norm and a matrix, in float32, a scale of each kind and a shift."""
    rows, trained = build.local_tokens, build.trains(f"{name}.mix")
    wide = x
    if x.itemsize != 4:
        wide = build.elementwise(f"{name}.float32", (x,), build.float32(f"{name}.float32", x.numel))
    root = Tensor(f"{name}.rstd", rows, 4, "statistic")
    normed = build.float32(f"{name}.norm", x.numel)
    # The square and the product both keep what goes in.
    build.operations.append(
        Operation(
            f"{name}.norm", "norm", (wide,), (normed,), keeps=(wide, root), backward_workspace=2 * normed.nbytes,
            moves=build.norm_moves(wide, normed, gain=False),
        )
    )  # fmt: skip
    mixed = build.linear(
        f"{name}.mix",
        normed,
        rows,
        count * hidden,
        columns,
        operation="router",
        exact=True,
        output=build.float32(f"{name}.mix", rows * columns),
    )
    if build.dtypes.activation != 4 and not build.wide_weights:
        # The float32 copy of the matrix is kept for the gradient of the streams.
        copy = build.float32(f"{name}.mix.matrix", columns * count * hidden)
        build.operations[-1] = msgspec.structs.replace(build.operations[-1], keeps=(normed, copy))
    weights = (
        Weight(f"{name}.base", columns, 1, "vector", trained),
        Weight(f"{name}.scale", scales, 1, "vector", trained),
    )
    scaled = build.float32(f"{name}.scaled", mixed.numel)
    build.operations.append(Operation(f"{name}.scaled", "elementwise", (mixed,), (scaled,), weights, keeps=(mixed,)))
    return scaled


def _collapsed(build: Builder, name: str, x: Tensor, weights: Tensor, count: Size, hidden: Size) -> Tensor:
    """One stream of several: their sum, each times a number between 0 and 1."""
    rows = build.local_tokens
    share = build.float32(f"{name}.pre", rows * count)
    opened = build.float32(f"{name}.pre_sigmoid", rows * count)
    build.elementwise(f"{name}.pre", (weights,), share, keeps=(opened,))
    summed = build.float32(f"{name}.sum", rows * hidden)
    build.operations.append(
        Operation(
            f"{name}.sum",
            "elementwise",
            (share, x),
            (summed,),
            keeps=(share, x),
            workspace=4 * x.numel,
            backward_workspace=4 * x.numel,
        )
    )
    if x.itemsize == 4:
        return summed
    return build.elementwise(f"{name}.collapsed", (summed,), stream(build, f"{name}.collapsed", rows * hidden))


def connected(build: Builder, name: str, x: Tensor, spec: HyperConnections, hidden: Size, half: Half) -> Tensor:
    """Adds one half of a block between its hyper-connections: the streams `x` are collapsed into what `half` reads, its
    output is spread over all of them, and they are mixed by a doubly stochastic matrix. Returns the streams.
    """
    rows, count = build.local_tokens, spec.count
    square = rows * count * count
    coefficients = _mixed(build, name, x, count, hidden, (2 + count) * count, 3)
    post, comb = build.float32(f"{name}.post", rows * count), build.float32(f"{name}.softmax", square)
    build.elementwise(
        f"{name}.post", (coefficients,), post, keeps=(build.float32(f"{name}.post_sigmoid", rows * count),)
    )
    build.elementwise(f"{name}.softmax", (coefficients,), comb, keeps=(comb,))
    steps = 2 * spec.iterations - 1
    normal = build.float32(f"{name}.sinkhorn", square)
    each = (build.float32(f"{name}.steps", steps * square), build.float32(f"{name}.sums", steps * rows * count))
    build.elementwise(f"{name}.sinkhorn", (comb,), normal, keeps=each)
    output = half(_collapsed(build, name, x, coefficients, count, hidden))
    narrow = tuple(stream(build, f"{name}.{n}_cast", each.numel) for n, each in (("post", post), ("comb", normal)))
    build.operations.append(Operation(f"{name}.cast", "elementwise", (post, normal), narrow))
    spread = stream(build, f"{name}.spread", x.numel)
    build.elementwise(f"{name}.spread", (narrow[0], output), spread, keeps=(narrow[0], output))
    mixed = _product(
        build,
        f"{name}.streams",
        narrow[1],
        x,
        stream(build, f"{name}.streams", x.numel),
        Gemm(count, hidden, count, rows),
        (narrow[1], x),
    )
    return build.add(f"{name}.residual", spread, mixed)


def banked(build: Builder, name: str, x: Tensor, count: int, hidden: Size) -> Tensor:
    """Adds what a half reads in place of the stream `x`: the sum of it and of `count` earlier values, by a softmax over the
    product of each, normed, with a vector (source: kimi2026residuals). Each value is kept by the block that it entered, and
    the gradient of them all is there while this runs backwards.
    """
    rows = build.local_tokens
    trained = build.trains(f"{name}.bank")
    weights = tuple(Weight(f"{name}.bank.{part}", hidden, 1, "vector", trained) for part in ("norm", "score"))
    kept = [build.float32(f"{name}.bank.{part}", rows * (count + 1)) for part in ("rstd", "weights")]
    earlier = stream(build, f"{name}.bank.earlier", rows * hidden * count)
    output = stream(build, f"{name}.bank", rows * hidden)
    build.operations.append(Operation(output.name, "elementwise", (x, earlier), (output,), weights, keeps=(x, *kept)))
    return output


def joined(build: Builder, x: Tensor, model: ModelSpec) -> Tensor:
    """Adds what makes one stream of several before the last norm."""
    streams, hidden, rows = model.blocks[-1].streams, model.hidden_size, build.local_tokens
    if isinstance(streams, HyperConnections):
        coefficients = _mixed(build, "head.streams", x, streams.count, hidden, streams.count, 1)
        return _collapsed(build, "head.streams", x, coefficients, streams.count, hidden)
    assert isinstance(streams, AltUp)
    first = stream(build, "head.stream", rows * hidden)
    build.operations.append(Operation("head.stream", "view", (x,), (first,)))
    total = _as_loud(build, "head.altup", first, streams, hidden, lambda index: first, x)
    mean = stream(build, "head.streams", rows * hidden)
    return build.elementwise("head.streams", (total,), mean)


def split(build: Builder, x: Tensor, model: ModelSpec) -> Tensor:
    """Adds what makes several streams of the embedding: copies, or a matrix for each."""
    streams, rows = model.blocks[0].streams, build.local_tokens
    if isinstance(streams, AltUp):
        return _as_loud(build, "embedding.altup", x, streams, model.hidden_size, lambda index: x)
    many = stream(build, "embedding.streams", rows * model.stream_size)
    return build.elementwise("embedding.streams", (x,), many)


def _as_loud(
    build: Builder,
    name: str,
    first: Tensor,
    spec: AltUp,
    hidden: Size,
    source: Callable[[int], Tensor],
    streams: Tensor | None = None,
) -> Tensor:
    """All streams side by side: the first, and of the others the product with a matrix, scaled to be as large as the first.

    streams: what the sources are views of
    """
    rows, many = build.local_tokens, []
    size = Tensor(f"{name}.magnitude", rows, first.itemsize, "statistic")
    build.elementwise(f"{name}.magnitude", (first,), size, keeps=(first, size))
    count = spec.count
    assert isinstance(count, int)
    for index in range(1, count):
        projected = build.linear(f"{name}.{index}", source(index), rows, hidden, hidden, kept_input=streams)
        scaled, own = stream(build, f"{name}.{index}.scaled", projected.numel), f"{name}.{index}.magnitude"
        product = stream(build, f"{name}.{index}.product", projected.numel)
        each = tuple(Tensor(f"{own}{part}", rows, projected.itemsize, "statistic") for part in ("", "_clamped"))
        keeps = (projected, product, size, *each)
        build.elementwise(scaled.name, (projected, size), scaled, keeps=keeps)
        many.append(scaled)
    output = stream(build, f"{name}.streams", rows * hidden * count)
    return build.elementwise(f"{name}.streams", (first, *many), output)


# -- AltUp ------------------------------------------------------------------------------------------------------------


def _modalities(
    build: Builder, name: str, x: Tensor, spec: AltUp, block: Block, hidden: Size, held: Tensor | None = None
) -> Tensor:
    """Numbers of a token, between -1 and 1, that decide how its streams are mixed. held: what `x` is a view of"""
    rows = build.local_tokens
    normed = build.norm(f"{name}.norm", x, block.norm, rows, hidden, kept_input=held)
    scaled = build.elementwise(f"{name}.scaled", (normed,), stream(build, f"{name}.scaled", x.numel))
    routed = build.linear(f"{name}.router", scaled, rows, hidden, spec.count)
    wide = build.float32(f"{name}.tanh", rows * spec.count)
    build.elementwise(f"{name}.tanh", (routed,), wide, keeps=(wide,))
    if build.residual_itemsize == 4:
        return wide
    return build.elementwise(f"{name}.modalities", (wide,), stream(build, f"{name}.modalities", wide.numel))


def alternated(build: Builder, x: Tensor, block: Block, hidden: Size, attend: Half, feed: Half) -> None:
    """Adds a block of Gemma 3n: predicts all streams, computes the first, and corrects the others by what came of it."""
    spec, rows = block.streams, build.local_tokens
    assert isinstance(spec, AltUp)
    count = spec.count
    first = stream(build, "altup.first", rows * hidden)
    build.operations.append(Operation("altup.first", "view", (x,), (first,)))
    # A norm of a view keeps its own float32 copy, or, in float32, all streams.
    decides = _modalities(build, "altup.predict", first, spec, block, hidden, x)
    squares = build.linear("altup.prediction", decides, rows, count, count * count)
    mixed = _product(
        build,
        "altup.mixed",
        squares,
        x,
        stream(build, "altup.mixed", x.numel),
        Gemm(hidden, count, count, rows),
        (squares, x),
    )
    predicted = build.elementwise("altup.predicted", (mixed, x), stream(build, "altup.predicted", x.numel))
    active = stream(build, "altup.active", rows * hidden)
    build.operations.append(Operation("altup.active", "view", (predicted,), (active,)))

    normed = build.norm("attention.norm", active, block.norm, rows, hidden, kept_input=predicted)
    left = build.linear("laurel.left", normed, rows, hidden, spec.laurel_rank)
    right = build.linear("laurel.right", left, rows, spec.laurel_rank, hidden)
    laurel = build.add("laurel.sum", normed, build.norm("laurel.norm", right, block.norm, rows, hidden))
    attended = build.norm("attention.post_norm", attend(normed), block.norm, rows, hidden)
    both = build.add("attention.laurel", build.add("attention.residual", active, attended), laurel)
    y = build.elementwise("attention.scaled_sum", (both,), stream(build, "attention.scaled_sum", both.numel))
    fed = build.norm(
        "mlp.post_norm", feed(build.norm("mlp.norm", y, block.norm, rows, hidden)), block.norm, rows, hidden
    )
    activated = build.add("mlp.residual", y, fed)

    before = len(build.operations)
    decides = _modalities(build, "altup.correct", activated, spec, block, hidden)
    build.operations[before:] = [
        msgspec.structs.replace(operation, weights=(), borrows=operation.weights)
        for operation in build.operations[before:]
    ]  # those of the prediction
    shares = build.linear("altup.correction", decides, rows, count, count)
    # Its matrix is clamped, which makes a copy.
    build.operations[-1] = msgspec.structs.replace(
        build.operations[-1],
        keeps=(*build.operations[-1].keeps, build.tensor("altup.correction.clamped", count * count)),
    )
    innovation = stream(build, "altup.innovation", x.numel)
    build.elementwise("altup.innovation", (activated, predicted), innovation)
    corrected = stream(build, "altup.corrected", x.numel)
    build.elementwise("altup.corrected", (innovation, shares, predicted), corrected, keeps=(innovation, shares))
    copied = build.elementwise("altup.copied", (corrected,), stream(build, "altup.copied", rows * hidden))
    if spec.scaled:
        gain = Weight("altup.scale", hidden, 1, "vector", build.trains("altup.scale"))
        scaled = stream(build, "altup.scaled_copy", copied.numel)
        build.operations.append(
            Operation(
                "altup.scale", "elementwise", (copied,), (scaled,), (gain,), keeps=(copied,) if gain.trainable else ()
            )
        )
        copied = scaled
    assert isinstance(block.mlp, Mlp)
    gate = build.linear("per_layer.gate", copied, rows, hidden, block.per_layer_input, adapter="per_layer_gate")
    opened = activate(build, "per_layer.activation", gate, block.mlp.activation)
    product = stream(build, "per_layer.product", opened.numel)
    product = build.elementwise("per_layer.product", (opened,), product, keeps=(opened,))
    wide = build.linear("per_layer.project", product, rows, block.per_layer_input, hidden, adapter="per_layer_project")
    added = build.norm("per_layer.norm", wide, block.norm, rows, hidden)
    build.add("per_layer.residual", corrected, added)
