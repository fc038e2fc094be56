"""Mamba: a projection, a causal convolution, a scan over the tokens of each channel, a projection.

Legend: T tokens, c channels, n state size, r rank of the time step, k width of the convolution, z gate, B and C what
writes to and reads from the states.

The scan is not made of matrix products; of it only the product of state and C is counted, 2 c n FLOPs a token, as in
transformers' code.

Kept for backward (`Kernels.recurrence`):
fused, an assumption read off the sources of causal-conv1d and mamba_ssm. With norms between the parts, as Jamba has them
(`CausalConv1dFn`, `SelectiveScanFn`): the scan's inputs, channels first, its output, and a state every 2048 tokens. Without
(Mamba and Falcon-Mamba, whose norms have no weights), `MambaInnerFn` runs all from the convolution to the last product: it keeps
the joint projection, channels first, the parameters and their copies, the scan's output and states, and makes the rest again.
reference: not modelled: transformers' code loops over the tokens, and keeps the state of each.
tests/core/oracle/test_hybrids.py counts the former.
Tensor parallelism shards channels, as vLLM's `MambaMixer` does: the parameters of a token are a sum over the ranks.
"""

from __future__ import annotations

from loadgauge.core.base import NotModelled, Size, ceil_div, shard
from loadgauge.core.definitions.model.model import Mamba1
from loadgauge.core.layers.mixers.convolution import causal_convolution, whole_mixer
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Collective, Gemm, Operation, Tensor, Weight

SCAN_CHUNK = 2048
"""Tokens between two states that the kernel keeps (csrc/selective_scan/selective_scan.cpp)."""


def mamba1(build: Builder, x: Tensor, spec: Mamba1, hidden_size: Size) -> Tensor:
    """Adds the mixer to the list; `x` is its (normed) input. Returns the output projection."""
    whole_mixer(build, "Mamba", "mamba1", heads=False, activation=spec.hidden_act)
    if build.kernels.recurrence == "reference":
        raise NotModelled("what transformers' loop of a Mamba mixer keeps is not modelled")
    view, tokens = build.view, build.view.tokens
    state, rank = spec.state_size, spec.time_step_rank
    channels = shard(spec.intermediate_size, view.tp, "intermediate_size of Mamba")
    source, kept, reduced, workspace = build.enter("mamba.gather", x, hidden_size)
    joint = build.linear(
        "mamba.input",
        source,
        tokens,
        hidden_size,
        2 * channels,
        bias=spec.use_bias,
        kept_input=kept,
        shards=view.tp,
        backward_comm=reduced,
        workspace=workspace,
    )
    whole = spec.norm is None
    if whole:
        by_channel = build.tensor("mamba.joint_by_channel", joint.numel)
        joint = build.elementwise("mamba.joint_by_channel", (joint,), by_channel)
    mixed = causal_convolution(
        build,
        "mamba.convolution",
        joint,
        channels,
        spec.conv_kernel,
        bias=spec.use_conv_bias,
        activation=spec.hidden_act,
        shards=view.tp,
    )
    width = rank + 2 * state
    nbytes = build.dtypes.activation * tokens * width
    summed = (Collective("all_reduce", "tp", nbytes, view.tp),)
    small = build.linear(
        "mamba.parameters",
        mixed,
        tokens,
        channels,
        width,
        kept_input=joint if whole else None,
        called=not whole,
        shards=view.tp,
        forward_comm=summed,
    )
    step, write, read = (
        build.tensor(f"mamba.{name}", tokens * size)
        for name, size in (("rank", rank), ("write", state), ("read", state))
    )
    build.operations.append(Operation("mamba.split", "view", (small,), (step, write, read)))
    if spec.norm is not None:
        step = build.norm("mamba.step_norm", step, spec.norm, tokens, rank)
        write = build.norm("mamba.write_norm", write, spec.norm, tokens, state)
        read = build.norm("mamba.read_norm", read, spec.norm, tokens, state)
    quantised = view.lora is not None and view.lora.stored is not None
    step = build.linear(
        "mamba.step",
        step,
        tokens,
        rank,
        channels,
        kept_input=small if whole else None,
        called=quantised and not whole,  # else its matrix is read (source: transformers, `JambaMambaMixer`)
        shards=view.tp,
        backward_comm=summed,
    )
    output, scanned = _scan(build, spec, channels, (joint, mixed, small), (step, write, read))
    forward, backward, workspace = build.leave(hidden_size)
    return build.linear(
        "mamba.output",
        output,
        tokens,
        channels,
        hidden_size,
        bias=spec.use_bias,
        kept_input=scanned if whole else None,
        called=not whole,
        shards=view.tp,
        bias_shards=1,
        output=build.hidden("mamba.output", hidden_size),
        forward_comm=forward,
        backward_comm=backward,
        workspace=workspace,
    )


def _scan(
    build: Builder,
    spec: Mamba1,
    channels: Size,
    projections: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """The kernel: time step, scan, skip and gate, and what it keeps. Returns its gated output, and that before the gate.

    made: the joint projection, the convolution of it, the parameters; inputs: the step of each channel, what writes, what reads
    """
    (joint, mixed, small), (step, write, read) = projections, inputs
    view, state, whole = build.view, spec.state_size, spec.norm is None
    size = view.tokens * channels
    efficiencies, exponential = (build.float32(f"mamba.{n}", channels * state) for n in ("decay", "decay_exponential"))

    def vector(name: str, numel: Size) -> Weight:
        return Weight(f"mamba.{name}.weight", numel, view.tp, "vector", build.trains(f"mamba.{name}"))

    weight = vector("decay", channels * state)
    build.operations.append(
        Operation(
            "mamba.decay",
            "elementwise",
            (),
            (efficiencies,),
            (weight,),
            keeps=(exponential,) if weight.trainable else (),
        )
    )
    large = () if whole else (("values", size), ("gate", size))
    copies = tuple(
        build.tensor(f"mamba.{name}_by_channel", numel)
        for name, numel in (*large, ("write", write.numel), ("read", read.numel))
    )
    from_projections = (write, read) if whole else (mixed, joint, write, read)
    build.operations.append(Operation("mamba.by_channel", "elementwise", from_projections, copies))
    output, gated = build.tensor("mamba.scan", size), build.tensor("mamba.gated", size)
    chunks = view.sequences * ceil_div(view.positions, SCAN_CHUNK)
    states = build.float32("mamba.states", chunks * channels * 2 * state)
    copied = build.dtypes.activation != 4
    floats = tuple(build.float32(f"mamba.{name}_float32", channels) for name in ("step_bias", "skip")) if copied else ()
    product, steps = Gemm(channels, 1, state, view.tokens), Gemm(view.tokens, channels, spec.time_step_rank)
    again = Gemm(view.tokens, 1, spec.conv_kernel, channels).flops + steps.flops if whole else 0
    build.operations.append(
        Operation(
            "mamba.scan",
            "scan",
            (joint, mixed, *copies, step, efficiencies) if whole else (*copies, step, efficiencies),
            (gated,),
            (vector("step_bias", channels), vector("skip", channels)),
            keeps=(*((joint, small) if whole else (step,)), *copies, efficiencies, states, output, *floats),
            gemms=(product,),
            forward_flops=product.flops,
            input_gradient_flops=2 * product.flops,
            rerun_flops=product.flops + again,
            # Convolution, steps and the gated output are made again.
            backward_workspace=3 * build.dtypes.activation * size if whole else 0,
        )
    )
    if whole:
        return gated, output
    # The last matrix needs its input token by token.
    turned = build.tensor("mamba.by_token", size)
    return build.elementwise("mamba.by_token", (gated,), turned), output
