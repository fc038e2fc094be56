"""Kimi delta attention (Kimi Linear): projections, a causal convolution, the delta rule by chunks, a gated norm.

Legend: T tokens, H heads on this rank of d channels, l chunk length, h hidden size.

The rule is that of the gated delta net with a decay for each channel of the keys (source: kimi2025linear), so scores are
made of keys and queries that are decayed already: the same products.

Kept for backward, an assumption read off the sources of causal-conv1d and flash-linear-attention (`ChunkKDAFunction`):
normed queries and keys, values, rates, the sums of the decays in float32, and of each chunk the scores of queries and the
inverted system, l wide. transformers' own PyTorch code keeps more, and is not modelled (`Kernels.recurrence`).
"""

from __future__ import annotations

from loadgauge.core.base import NotModelled, Size, maximum, minimum, shard, spread
from loadgauge.core.definitions.model.model import KimiDelta
from loadgauge.core.layers.mixers.convolution import causal_convolution, chunk_pairs, heads_for_tokens, whole_mixer
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Gemm, Operation, Tensor, Weight


def kimi_delta(build: Builder, x: Tensor, spec: KimiDelta, hidden_size: Size) -> Tensor:
    """Adds the mixer to the list; `x` is its (normed) input. Returns the output projection."""
    whole_mixer(build, "Kimi delta attention", "kimi_delta", heads=True, activation=spec.hidden_act)
    if build.kernels.recurrence == "reference":
        raise NotModelled("the reference code of Kimi delta attention is not modelled")
    view, tokens, width = build.view, build.view.tokens, spec.linear_head_dim
    heads = shard(spec.linear_num_heads, view.tp, "linear_num_heads")
    inner = heads * width
    source, kept, reduced, workspace = build.enter("kda.gather", x, hidden_size)
    there, arriving = heads_for_tokens(build, 5 * inner + heads)
    back, returning = heads_for_tokens(build, inner)

    def project(name: str, size: Size, first: bool = False) -> Tensor:
        return build.linear(
            f"kda.{name}",
            source,
            tokens,
            hidden_size,
            size,
            kept_input=kept,
            shards=view.tp,
            forward_comm=there if first else (),
            backward_comm=(*there, *reduced) if first else (),
            workspace=maximum(workspace, arriving) if first else workspace,
        )

    def gate(name: str) -> Tensor:
        if name not in spec.narrow:
            return project(name, inner)
        # The matrix into the latent is whole on every rank.
        latent = build.linear(f"kda.{name}_down", source, tokens, hidden_size, width, kept_input=kept)
        return build.linear(f"kda.{name}", latent, tokens, width, inner, shards=view.tp)

    if view.lora is not None:
        # The modules are three, and have an adapter each.
        parts = [project(name, inner, first=name == "query") for name in ("query", "key", "value")]
        mixed = Tensor("kda.qkv", 3 * tokens * inner, parts[0].itemsize)
        build.operations.append(Operation("kda.qkv", "view", tuple(parts), (mixed,)))
    else:
        mixed = project("qkv", 3 * inner, first=True)
    steps, rates = gate("decay"), project("rates", heads)
    opened = gate("gate")
    with build.as_wide_as(mixed):
        active = causal_convolution(
            build,
            "kda.convolution",
            mixed,
            3 * inner,
            spec.linear_conv_kernel_dim,
            bias=False,
            activation=spec.hidden_act,
            shards=view.tp,
        )
        decay, beta = _decay(build, steps, heads, inner), build.tensor("kda.beta", tokens * heads)
        build.elementwise("kda.beta", (rates,), beta, keeps=(beta,))
        normed = _gated_norm(build, _rule(build, spec, active, beta, decay, heads), opened, heads, width)
    forward, backward, workspace = build.leave(hidden_size)
    return build.linear(
        "kda.output",
        normed,
        tokens,
        inner,
        hidden_size,
        shards=view.tp,
        output=build.hidden("kda.output", hidden_size),
        forward_comm=(*back, *forward),
        backward_comm=(*back, *backward),
        workspace=maximum(workspace, returning),
    )


def _decay(build: Builder, steps: Tensor, heads: Size, inner: Size) -> Tensor:
    """The decay of each channel, in float32. A kernel keeps what it is made of; transformers' code the parts of its softplus, and
    what the gradients of its weights read.
    """
    size, exact, trained = steps.numel, build.float32, build.trains("kda.decays")
    keeps: tuple[Tensor, ...] = (steps,)
    if build.kernels.norm == "upcast":
        parts = ("exponential", "above_one", "softplus")[: 2 + trained]
        keeps = (*(exact(f"kda.decays.{part}", size) for part in parts), build.mask("kda.decays.mask", size))
        keeps += tuple(exact(f"kda.decays.{part}", heads) for part in ("rate", "negative")[: 1 + trained])
    weights = tuple(
        Weight(f"kda.{name}.weight", numel, build.view.tp, "vector", build.trains(f"kda.{name}"))
        for name, numel in (("rate_log", heads), ("step", inner))
    )
    output = exact("kda.decays", size)
    build.operations.append(Operation(output.name, "elementwise", (steps,), (output,), weights, keeps=keeps))
    return output


def _gated_norm(build: Builder, x: Tensor, gate: Tensor, heads: Size, width: Size) -> Tensor:
    """norm(x) sigmoid(z), over each head. transformers' module makes all of it in float32."""
    gain = Weight("kda.norm.weight", width, 1, "vector", build.trains("kda.norm"))
    statistic, output = build.dtypes.norm_statistic, build.tensor("kda.norm", x.numel)
    keeps: tuple[Tensor, ...] = (x, gate)
    if build.kernels.norm == "upcast":
        parts, statistic = ("weighted", "sigmoid", "normalised")[: 2 + gain.trainable], 4
        keeps = (
            x if x.itemsize == 4 else build.float32("kda.norm.float32", x.numel),
            build.float32("kda.norm.gain", width),
        )
        keeps += tuple(build.float32(f"kda.norm.{part}", x.numel) for part in parts)
    keeps = (*keeps, Tensor("kda.norm.rstd", build.view.tokens * heads, statistic, "statistic"))
    build.operations.append(Operation("kda.norm", "norm", (x, gate), (output,), (gain,), keeps=keeps))
    return output


def _rule(build: Builder, spec: KimiDelta, active: Tensor, beta: Tensor, decay: Tensor, heads: Size) -> Tensor:
    """One kernel for the rule, the norm of queries and keys included."""
    view, tokens, chunk, width = build.view, build.view.tokens, spec.chunk_size, spec.linear_head_dim
    pairs = chunk_pairs(view, chunk) * heads
    scores, state = 2 * pairs * width, 2 * tokens * heads * width**2
    # Scores of keys and of queries, keys and values through the system, what queries read; the state: corrected, written, read.
    system = 2 * pairs * 2 * width
    forward = 2 * scores + system + 2 * pairs * width + 3 * state
    queries, keys, values = (
        build.tensor(f"kda.{name}", tokens * heads * width) for name in ("normed_query", "normed_key", "values")
    )
    build.operations.append(Operation("kda.heads", "elementwise", (active,), (queries, keys, values)))
    statistics = [
        Tensor(f"kda.{name}.rstd", tokens * heads, build.dtypes.norm_statistic, "statistic")
        for name in ("query", "key")
    ]
    inside = [build.tensor(f"kda.{name}", tokens * heads * chunk) for name in ("scores", "inverse")]
    total = build.float32("kda.decay_sums", tokens * heads * width)
    output = build.tensor("kda.rule", tokens * heads * width)
    many = spread(tokens, chunk) * heads
    build.operations.append(
        Operation(
            "kda.rule",
            "scan",
            (queries, keys, values, beta, decay),
            (output,),
            keeps=(queries, keys, *statistics, values, beta, total, *inside),
            gemms=(
                Gemm(chunk, chunk, width, 2 * many),
                Gemm(chunk, 2 * width, chunk, many),
                Gemm(chunk, width, width, 2 * many),
                Gemm(width, width, chunk, many),
                Gemm(chunk, width, chunk, many),
            ),
            forward_flops=forward,
            input_gradient_flops=2 * forward,
            # Made again: what the chunks write and the states; the inverse's gradient takes two products more.
            rerun_flops=system + 2 * state + 4 * pairs * minimum(chunk, view.positions),
            workspace=build.dtypes.activation * (3 * tokens * heads * width + many * width**2),
        )
    )
    return output
