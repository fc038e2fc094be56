"""Mamba (Jamba): a projection, a causal convolution, a scan over the tokens of each channel, a projection.

Legend: T tokens, c channels, n state size, r rank of the time step, k width of the convolution, z gate, B and C what
writes to and reads from the states.

The scan is not made of matrix products; of it only the product of state and C is counted, 2 c n FLOPs a token, as in
transformers' code.

Kept for backward (`Kernels.recurrence`):
fused, an assumption read off the sources of causal-conv1d and mamba_ssm (`CausalConv1dFn`, `SelectiveScanFn`) as Jamba
calls them: the scan's inputs, channels first, its output, and a state every 2048 tokens.
reference: not modelled: transformers' code loops over the tokens, and keeps the state of each.
tests/core/oracle/test_hybrids.py counts the former.
"""

from __future__ import annotations

from loadgauge.core.base import NotModelled, Size, ceil_div
from loadgauge.core.definitions.model.model import Mamba1
from loadgauge.core.layers.mixers.convolution import causal_convolution, whole_mixer
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Gemm, Operation, Tensor, Weight

SCAN_CHUNK = 2048
"""Tokens between two states that the kernel keeps (csrc/selective_scan/selective_scan.cpp)."""


def mamba1(build: Builder, x: Tensor, spec: Mamba1, hidden_size: Size) -> Tensor:
    """Adds the mixer to the list; `x` is its (normed) input. Returns the output projection."""
    whole_mixer(build, "Mamba", "mamba1", heads=False, activation=spec.hidden_act)
    if build.kernels.recurrence == "reference":
        raise NotModelled("what transformers' loop of a Mamba mixer keeps is not modelled")
    tokens = build.view.tokens
    channels, state, rank = spec.intermediate_size, spec.state_size, spec.time_step_rank
    joint = build.linear("mamba.input", x, tokens, hidden_size, 2 * channels, bias=spec.use_bias)
    mixed = causal_convolution(
        build,
        "mamba.convolution",
        joint,
        channels,
        spec.conv_kernel,
        bias=spec.use_conv_bias,
        activation=spec.hidden_act,
    )
    small = build.linear("mamba.parameters", mixed, tokens, channels, rank + 2 * state)
    step, write, read = (
        build.tensor(f"mamba.{name}", tokens * width)
        for name, width in (("rank", rank), ("write", state), ("read", state))
    )
    build.operations.append(Operation("mamba.split", "view", (small,), (step, write, read)))
    if spec.norm is not None:
        step = build.norm("mamba.step_norm", step, spec.norm, tokens, rank)
        write = build.norm("mamba.write_norm", write, spec.norm, tokens, state)
        read = build.norm("mamba.read_norm", read, spec.norm, tokens, state)
    step = build.linear("mamba.step", step, tokens, rank, channels)
    output = _scan(build, spec, joint, mixed, step, write, read)
    return build.linear(
        "mamba.output",
        output,
        tokens,
        channels,
        hidden_size,
        bias=spec.use_bias,
        output=build.hidden("mamba.output", hidden_size),
    )


def _scan(
    build: Builder, spec: Mamba1, joint: Tensor, mixed: Tensor, step: Tensor, write: Tensor, read: Tensor
) -> Tensor:
    """The kernel: time step, scan, skip and gate. It takes all of its inputs channels first, most of them as copies."""
    view, channels, state = build.view, spec.intermediate_size, spec.state_size
    size = view.tokens * channels
    efficiencies, exponential = (build.float32(f"mamba.{n}", channels * state) for n in ("decay", "decay_exponential"))

    def vector(name: str, numel: Size) -> Weight:
        return Weight(f"mamba.{name}.weight", numel, 1, "vector", build.trains(f"mamba.{name}"))

    weight = vector("decay", channels * state)
    build.operations.append(
        Operation("mamba.decay", "elementwise", (), (efficiencies,), (weight,), keeps=(exponential,))
    )
    copies = tuple(
        build.tensor(f"mamba.{name}_by_channel", numel)
        for name, numel in (("values", size), ("gate", size), ("write", write.numel), ("read", read.numel))
    )
    build.operations.append(Operation("mamba.by_channel", "elementwise", (mixed, joint, write, read), copies))
    output, gated = build.tensor("mamba.scan", size), build.tensor("mamba.gated", size)
    chunks = view.sequences * ceil_div(view.positions, SCAN_CHUNK)
    states = build.float32("mamba.states", chunks * channels * 2 * state)
    copied = build.dtypes.activation != 4
    floats = tuple(build.float32(f"mamba.{name}_float32", channels) for name in ("step_bias", "skip")) if copied else ()
    product = Gemm(channels, 1, state, view.tokens)
    build.operations.append(
        Operation(
            "mamba.scan",
            "scan",
            (*copies, step, efficiencies),
            (gated,),
            (vector("step_bias", channels), vector("skip", channels)),
            keeps=(*copies, step, efficiencies, states, output, *floats),
            gemms=(product,),
            forward_flops=product.flops,
            input_gradient_flops=2 * product.flops,
            rerun_flops=product.flops,
        )
    )
    # The last matrix needs its input token by token.
    turned = build.tensor("mamba.by_token", size)
    return build.elementwise("mamba.by_token", (gated,), turned)
