"""The causal convolution of each channel that linear mixers begin with, and LFM2's gated short convolution.

Legend: T tokens, b sequences, s positions, c channels on this rank, k width of the convolution, h hidden size.

Kept for backward (`Kernels.recurrence`):
fused: the kernel keeps its input, and makes what its activation needs again (source: causal-conv1d, `CausalConv1dFn`).
reference: transformers' code pads k - 1 tokens in front, computes s + k - 1 outputs and drops the last k - 1; the
activation keeps them all, since it reads a view.
"""

from __future__ import annotations

from loadgauge.core.base import NotModelled, Size, minimum, several, shard
from loadgauge.core.definitions.model.model import ShortConvolution
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Collective, Gemm, Operation, Tensor, Weight
from loadgauge.core.layers.operations.rank_view import View


def whole_mixer(build: Builder, kind: str, file: str, *, heads: bool, activation: str = "silu") -> None:
    """Refuses what the layers of a linear mixer do not model: context parallelism without `heads`, an activation."""
    view = build.view
    reasons = {
        "context parallelism": not heads and (not isinstance(view.cp, int) or view.cp != 1),
        f"activation {activation!r}": activation not in ("silu", "swish"),
        "reference code under autocast": build.autocast and build.kernels.recurrence == "reference",
    }
    for reason, applies in reasons.items():
        if applies:
            raise NotModelled(f"{reason} on a {kind} mixer is not modelled")


def heads_for_tokens(build: Builder, width: Size) -> tuple[tuple[Collective, ...], Size]:
    """Return the exchange by which each cp rank gets all tokens of some heads, or gives them back, and what arrives meanwhile.

    width: numbers of a token that travel (source: megatron-core 0.16, `ssm/mamba_context_parallel.py`, `gated_delta_net.py`)
    """
    view = build.view
    if isinstance(view.cp, int) and view.cp == 1:
        return (), 0
    nbytes = build.dtypes.activation * view.tokens * width
    return (Collective("all_to_all", "cp", nbytes, view.cp),), several(view.cp) * nbytes


def chunk_pairs(view: View, chunk: Size) -> Size:
    """Query-key pairs of a micro-batch where each token meets its whole chunk, min(s, chunk) tokens, causal or not."""
    return minimum(view.pairs, view.tokens * minimum(chunk, view.positions))


def causal_convolution(
    build: Builder,
    name: str,
    x: Tensor,
    channels: Size,
    width: Size,
    *,
    bias: bool,
    activation: str | None,
    shards: Size = 1,
) -> Tensor:
    """Adds the convolution of each channel with its own `width` weights, and the activation that follows it.

    `x` is the tensor whose storage the input is in: a view of a projection keeps all of that projection.
    """
    view = build.view
    weights = [Weight(f"{name}.weight", channels * width, shards, "vector", build.trains(name))]
    if bias:
        weights.append(Weight(f"{name}.bias", channels, shards, "vector", build.trains(name)))
    fused = build.kernels.recurrence == "fused"
    rows = view.tokens if fused else view.sequences * (view.positions + width - 1)
    product = Gemm(rows, 1, width, channels)
    output = build.tensor(name, rows * channels)
    build.operations.append(
        Operation(
            name,
            "convolution",
            (x,),
            (output,),
            tuple(weights),
            keeps=(x,),
            gemms=(product,),
            forward_flops=product.flops,
            input_gradient_flops=product.flops,
            weight_gradient_flops=product.flops,
            rerun_flops=product.flops if fused and activation is not None else 0,
        )
    )
    if activation is None or fused:
        return output
    if activation not in ("silu", "swish"):
        raise NotModelled(f"activation {activation!r} of a convolution is not modelled")
    active = build.tensor(f"{name}_activation", view.tokens * channels)
    return build.elementwise(active.name, (output,), active, keeps=(output,))


def short_convolution(build: Builder, x: Tensor, spec: ShortConvolution, hidden_size: Size) -> Tensor:
    """Adds LFM2's mixer: y = C * convolution(B * x), where one matrix makes B, C and x (source: transformers).

    Tensor-parallel ranks share out the channels, of which each is on its own between the two matrices (source: vllm 0123e1d,
    `model_executor/layers/mamba/short_conv.py`).
    """
    whole_mixer(build, "short convolution", "convolution", heads=False)
    view, tokens = build.view, build.view.tokens
    channels = shard(hidden_size, view.tp, "channels of the short convolution")
    source, kept, reduced, workspace = build.enter("convolution.gather", x, hidden_size)
    joint = build.linear(
        "convolution.input",
        source,
        tokens,
        hidden_size,
        3 * channels,
        bias=spec.conv_bias,
        kept_input=kept,
        shards=view.tp,
        backward_comm=reduced,
        workspace=workspace,
    )
    with build.as_wide_as(joint):
        # Gates and values are views of the projection, and hold all of it.
        gate = build.tensor("convolution.gate", tokens * channels)
        gated = build.elementwise("convolution.gate", (joint,), gate, keeps=(joint,))
        mixed = causal_convolution(
            build,
            "convolution.convolution",
            gated,
            channels,
            spec.conv_L_cache,
            bias=spec.conv_bias,
            activation=None,
            shards=view.tp,
        )
        output = build.tensor("convolution.gated", tokens * channels)
        build.elementwise("convolution.gated", (joint, mixed), output, keeps=(joint, mixed))
    forward, backward, workspace = build.leave(hidden_size)
    return build.linear(
        "convolution.output",
        output,
        tokens,
        channels,
        hidden_size,
        bias=spec.conv_bias,
        shards=view.tp,
        bias_shards=1,
        output=build.hidden("convolution.output", hidden_size),
        forward_comm=forward,
        backward_comm=backward,
        workspace=workspace,
    )
