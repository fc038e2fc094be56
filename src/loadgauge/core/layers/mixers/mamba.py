"""Mamba-2: a projection, a causal convolution, a scan over the sequence in chunks, a gate with its norm, a projection.

Legend: T tokens, b sequences, l chunk length, H heads, P head width, N state size, G groups on this rank, z gate,
x values, B and C what writes to and reads from the states, dt time step of each head.

The scan by chunks (source: dao2024, section 6) is four products a chunk: C B^T for each group, its product with x for
each head, the states x^T B, and C times the state before the chunk. A multiply-add is 2 FLOPs; all l^2 pairs of a chunk
count, causal or not.

Kept for backward (`Kernels.recurrence`):
fused, an assumption read off the source of mamba_ssm (`MambaSplitConv1dScanCombinedFn`): the joint projection, the
scan's output, the norm's statistics; convolution, scores and states are made again. With `joint_output` so is the last
product's input.
reference: what autograd keeps of transformers' PyTorch code (5.23), tensor by tensor.
tests/core/oracle/test_hybrids.py counts both.
Tensor parallelism shards heads and groups, as Megatron's MambaMixer does; cp ranks exchange tokens for heads.
"""

from __future__ import annotations

from loadgauge.core.base import NotModelled, Size, ceil_div, maximum, minimum, shard, spread
from loadgauge.core.definitions.model.model import Mamba2
from loadgauge.core.layers.mixers.convolution import causal_convolution, chunk_pairs, heads_for_tokens, whole_mixer
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Gemm, Operation, Tensor, Weight


def mamba2(build: Builder, x: Tensor, spec: Mamba2, hidden_size: Size) -> Tensor:
    """Adds the mixer to the list; `x` is its (normed) input. Returns the output projection."""
    whole_mixer(build, "Mamba-2", "mamba", heads=True, activation=spec.hidden_act)
    view, tokens = build.view, build.view.tokens
    heads = shard(spec.num_heads, view.tp, "num_heads of Mamba-2")
    groups = shard(spec.n_groups, view.tp, "n_groups of Mamba-2")
    inner, channels = heads * spec.head_dim, heads * spec.head_dim + 2 * groups * spec.state_size
    source, kept, reduced, workspace = build.enter("mamba.gather", x, hidden_size)
    there, arriving = heads_for_tokens(build, inner + channels + heads)
    back, returning = heads_for_tokens(build, inner)
    projected = build.linear(
        "mamba.input",
        source,
        tokens,
        hidden_size,
        inner + channels + heads,
        bias=spec.use_bias,
        kept_input=kept,
        shards=view.tp,
        forward_comm=there,
        backward_comm=(*there, *reduced),
        workspace=maximum(workspace, arriving),
    )
    reference = build.kernels.recurrence == "reference"
    with build.as_wide_as(projected):
        if reference:
            mixed = _reference(build, spec, projected, heads, groups)
            gated = _reference_gate(build, spec, projected, mixed, heads, groups)
        else:
            mixed = _fused(build, spec, projected, heads, groups)
            gated = _gate(build, spec, projected, mixed, heads, groups)
    forward, backward, workspace = build.leave(hidden_size)
    joint = build.kernels.joint_output and not reference
    return build.linear(
        "mamba.output",
        gated,
        tokens,
        inner,
        hidden_size,
        bias=spec.output_bias,
        shards=view.tp,
        bias_shards=1,
        output=build.hidden("mamba.output", hidden_size),
        kept_input=mixed if joint else None,
        called=not joint,
        forward_comm=(*back, *forward),
        backward_comm=(*back, *backward),
        workspace=maximum(workspace, returning),
    )


def _vector(build: Builder, name: str, numel: Size) -> Weight:
    return Weight(f"mamba.{name}.weight", numel, build.view.tp, "vector", build.trains(f"mamba.{name}"))


def _decay(build: Builder, heads: Size) -> Tensor:
    """A = -exp(A_log), in float32; the exponential keeps its output."""
    output, exponential = build.float32("mamba.decay", heads), build.float32("mamba.decay_exponential", heads)
    build.operations.append(
        Operation(
            "mamba.decay",
            "elementwise",
            (),
            (output,),
            (_vector(build, "decay", heads),),
            keeps=(exponential,) if build.trains("mamba.decay") else (),
        )
    )
    return output


def _fused(build: Builder, spec: Mamba2, projected: Tensor, heads: Size, groups: Size) -> Tensor:
    """One kernel for convolution and scan."""
    view, tokens = build.view, build.view.tokens
    width, state, chunk = spec.head_dim, spec.state_size, spec.chunk_size
    inner, channels = heads * width, heads * width + 2 * groups * state
    decay = _decay(build, heads)
    pairs = chunk_pairs(view, chunk)
    convolution = Gemm(tokens, 1, spec.conv_kernel, channels).flops
    scores, inside = 2 * pairs * groups * state, 2 * pairs * inner
    states = 2 * tokens * inner * state
    forward = convolution + scores + inside + 2 * states
    trained = build.trains("mamba.convolution")
    weights = [Weight("mamba.convolution.weight", channels * spec.conv_kernel, view.tp, "vector", trained)]
    if spec.use_conv_bias:
        weights.append(Weight("mamba.convolution.bias", channels, view.tp, "vector", trained))
    weights += [_vector(build, "time_step", heads), _vector(build, "skip", heads)]
    output = build.tensor("mamba.scan", tokens * inner)
    # Alive inside: the convolution's output, and in float32 the scores of each group and the state of each chunk.
    workspace = (
        build.dtypes.activation * tokens * channels + 4 * pairs * groups + 4 * spread(tokens, chunk) * inner * state
    )
    build.operations.append(
        Operation(
            "mamba.scan",
            "scan",
            (projected, decay),
            (output,),
            tuple(weights),
            keeps=(projected, output, decay),
            gemms=(
                Gemm(chunk, chunk, state, spread(tokens, chunk) * groups),
                Gemm(chunk, width, chunk, spread(tokens, chunk) * heads),
                Gemm(width, state, chunk, spread(tokens, chunk) * heads),
                Gemm(chunk, width, state, spread(tokens, chunk) * heads),
            ),
            forward_flops=forward,
            input_gradient_flops=2 * forward - convolution,
            weight_gradient_flops=convolution,
            # Made again: convolution, scores, states; and the products of gradient and x, once more for the decay.
            rerun_flops=convolution + scores + states + inside,
            workspace=workspace,
            backward_workspace=workspace,
        )
    )
    return output


def _gate(build: Builder, spec: Mamba2, projected: Tensor, mixed: Tensor, heads: Size, groups: Size) -> Tensor:
    """The gate and the norm of each group, in one kernel; or the gate alone."""
    if not spec.gated_norm:
        output = build.tensor("mamba.gate", mixed.numel)
        return build.elementwise("mamba.gate", (mixed, projected), output, keeps=(mixed, projected))
    output = build.tensor("mamba.norm", mixed.numel)
    statistic = Tensor("mamba.norm.rstd", build.view.tokens * groups, build.dtypes.norm_statistic, "statistic")
    build.operations.append(
        Operation(
            "mamba.norm",
            "norm",
            (mixed, projected),
            (output,),
            (_vector(build, "norm", heads * spec.head_dim),),
            keeps=(mixed, projected, statistic),
        )
    )
    return output


def _reference(build: Builder, spec: Mamba2, projected: Tensor, heads: Size, groups: Size) -> Tensor:
    """transformers' `mamba2_chunk_scan`, operation by operation, in float32, with B and C repeated to all heads."""
    view, tokens, wide, step_of = build.view, build.view.tokens, build.float32, build.elementwise
    width, state, chunk = spec.head_dim, spec.state_size, spec.chunk_size
    inner, channels = heads * width, heads * width + 2 * groups * state
    chunks = ceil_div(view.positions, chunk)
    padded = view.sequences * chunks * chunk
    batch = view.sequences * chunks * heads

    def product(name: str, first: Tensor, second: Tensor, output: Tensor, m: Size, n: Size, k: Size) -> Tensor:
        """`first` and `second` are the operands as the batched product gets them: copies, heads first."""
        gemm = Gemm(m, n, k, batch if name != "mamba.passing" else view.sequences * heads)
        build.operations.append(
            Operation(
                name,
                "gemm",
                (first, second),
                (output,),
                keeps=(first, second),
                gemms=(gemm,),
                forward_flops=gemm.flops,
                input_gradient_flops=2 * gemm.flops,
            )
        )
        return output

    def copies(name: str, x: Tensor, *sizes: tuple[str, Size], keeps: tuple[Tensor, ...] = ()) -> list[Tensor]:
        outputs = tuple(wide(f"mamba.{each}", size) for each, size in sizes)
        build.operations.append(Operation(name, "elementwise", (x,), outputs, keeps=keeps))
        return list(outputs)

    active = causal_convolution(
        build,
        "mamba.convolution",
        projected,
        channels,
        spec.conv_kernel,
        bias=spec.use_conv_bias,
        activation=spec.hidden_act,
        shards=view.tp,
    )
    decay = _decay(build, heads)
    biased, softened, step = (build.tensor(f"mamba.{n}", tokens * heads) for n in ("biased", "softplus", "time_step"))
    build.operations.append(
        Operation(
            "mamba.time_step",
            "elementwise",
            (projected,),
            (step,),
            (_vector(build, "time_step", heads),),
            keeps=(biased, softened),
        )
    )
    if build.dtypes.activation == 4:
        values, steps = active, [step]
    else:
        (values,) = copies("mamba.float32", active, ("values", tokens * inner))
        steps = copies("mamba.time_step_float32", step, *((f"step{i}", tokens * heads) for i in (1, 2)))
    (skipped,) = copies("mamba.pad", values, ("padded_values", padded * inner))
    skip = wide("mamba.skip", padded * inner)
    build.operations.append(
        Operation("mamba.skip", "elementwise", (skipped,), (skip,), (_vector(build, "skip", heads),), keeps=(skipped,))
    )
    scaled = step_of("mamba.scaled", (values, *steps), wide("mamba.scaled", padded * inner), keeps=(values, steps[0]))
    efficiencies = step_of(
        "mamba.efficiencies", (decay, steps[-1]), wide("mamba.efficiencies", padded * heads), keeps=(decay, steps[-1])
    )
    masks = tuple(build.mask(f"mamba.mask{index}", chunk * chunk) for index in (1, 2))
    decays = wide("mamba.decays", padded * chunk * heads)
    step_of("mamba.decays", (efficiencies,), decays, keeps=(*masks, decays))
    # With a single chunk the values of both products are one copy, and the states before and after it one tensor.
    several = minimum(chunks - 1, 1)
    x_inside, x_state = copies(
        "mamba.values_by_head", scaled, ("values_inside", padded * inner), ("values_state", padded * inner * several)
    )
    by_head = padded * heads * state
    write, written, read_inside, read_across = copies(
        "mamba.repeat",
        active,
        *((name, by_head) for name in ("write", "write_by_head", "read_inside", "read_across")),
    )
    scores = wide("mamba.scores", padded * chunk * heads)
    product("mamba.scores", read_inside, written, scores, chunk, chunk, state)
    decayed = wide("mamba.decayed", scores.numel)
    step_of("mamba.decayed", (scores, decays), decayed, keeps=(scores, decays))
    inside = product("mamba.inside", decayed, x_inside, wide("mamba.inside", padded * inner), chunk, width, chunk)
    fade, rise = (wide(f"mamba.{name}", padded * heads) for name in ("fade", "rise"))
    step_of("mamba.fade", (efficiencies,), fade, keeps=(fade,))
    faded = step_of("mamba.faded_write", (write, fade), wide("mamba.faded_write", by_head), keeps=(write, fade))
    held = wide("mamba.states", view.sequences * (chunks + 1) * inner * state)
    product("mamba.states", faded, x_state, held, state, width, chunk)
    passing = wide("mamba.chunk_decays", view.sequences * heads * (chunks + 1) * (chunks + 1))
    masks = tuple(build.mask(f"mamba.chunk_mask{index}", (chunks + 1) * (chunks + 1)) for index in (1, 2))
    step_of("mamba.chunk_decays", (efficiencies,), passing, keeps=(*masks, passing))
    started = wide("mamba.started", view.sequences * maximum(chunks, 2) * inner * state)
    product("mamba.passing", passing, held, started, chunks + 1, width * state, chunks + 1)
    across = wide("mamba.across", padded * inner)
    product("mamba.across", read_across, started, across, chunk, width, state)
    step_of("mamba.rise", (efficiencies,), rise, keeps=(rise,))
    risen = step_of("mamba.risen", (across, rise), wide("mamba.risen", padded * inner), keeps=(across, rise))
    return step_of("mamba.sum", (inside, risen, skip), wide("mamba.sum", padded * inner))


def _reference_gate(
    build: Builder, spec: Mamba2, projected: Tensor, mixed: Tensor, heads: Size, groups: Size
) -> Tensor:
    """The gate and the norm as transformers' code writes them, in float32 (a gate alone: in the model's dtype)."""
    if spec.gated_norm and spec.norm_before_gate:
        raise NotModelled("a Mamba-2 norm before the gate has no reference list")
    size, wide = build.view.tokens * heads * spec.head_dim, build.float32
    output = build.tensor("mamba.gated", size)
    if not spec.gated_norm:
        active = build.tensor("mamba.gate", size)
        return build.elementwise("mamba.gated", (mixed, projected), output, keeps=(mixed, projected, active))
    gate = projected
    if build.dtypes.activation != 4:
        gate = build.elementwise("mamba.gate_float32", (projected,), wide("mamba.gate_float32", size))
    active, product = wide("mamba.gate", size), wide("mamba.gated_values", size)
    build.elementwise("mamba.gate", (mixed, gate), product, keeps=(gate, active, mixed))
    normalised = wide("mamba.norm.normalised", size)
    statistic = Tensor("mamba.norm.rstd", build.view.tokens * groups, 4, "statistic")
    build.operations.append(
        Operation(
            "mamba.norm",
            "norm",
            (product,),
            (output,),
            (_vector(build, "norm", heads * spec.head_dim),),
            keeps=(product, statistic, normalised),
            moves=build.norm_moves(product, output),
        )
    )
    return output
