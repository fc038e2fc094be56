"""The gated delta net (Qwen3-Next, Qwen3.5): projections, a causal convolution, the delta rule by chunks, a gated norm.

Legend: T tokens, b sequences, l chunk length, A key heads and H value heads on this rank, d_k and d_v their widths;
q, k, v after the convolution, z the gate, beta and g each value head's rate of writing and log decay.

The rule by chunks (source: yang2024gdn, section 3.3), for each value head: scores k k^T; the triangular system that
turns keys and values into what the chunk writes; the state, written and read; scores q k^T and their product with the
values. The inversion of the system is not counted, what it is applied to is.

Kept for backward (`Kernels.recurrence`):
fused, an assumption read off the sources of causal-conv1d and flash-linear-attention (`ChunkGatedDeltaRuleFunction`):
normed queries and keys (of the key heads), values, rates, decays, and the inverted system, l wide; states are made
again. Megatron's layer repeats queries and keys to all value heads first, which is not modelled.
reference: what autograd keeps of transformers' PyTorch code (5.23) in 16 bits.
tests/core/oracle/test_hybrids.py counts both. Tensor parallelism shards both kinds of heads, as
Megatron does; cp ranks exchange tokens for heads.
"""

from __future__ import annotations

from loadgauge.core.base import NotModelled, Size, ceil_div, maximum, minimum, shard, spread
from loadgauge.core.definitions.model.model import GatedDeltaNet
from loadgauge.core.layers.mixers.convolution import causal_convolution, chunk_pairs, heads_for_tokens, whole_mixer
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Gemm, Operation, Tensor, Weight


def gated_delta_net(build: Builder, x: Tensor, spec: GatedDeltaNet, hidden_size: Size) -> Tensor:
    """Adds the mixer to the list; `x` is its (normed) input. Returns the output projection."""
    whole_mixer(build, "gated delta net", "delta", heads=True, activation=spec.hidden_act)
    view, tokens = build.view, build.view.tokens
    heads = shard(spec.linear_num_value_heads, view.tp, "linear_num_value_heads")
    key_heads = shard(spec.linear_num_key_heads, view.tp, "linear_num_key_heads")
    keys, values = key_heads * spec.linear_key_head_dim, heads * spec.linear_value_head_dim
    source, kept, reduced, workspace = build.enter("delta.gather", x, hidden_size)
    there, arriving = heads_for_tokens(build, 2 * keys + 2 * values + 2 * heads)
    back, returning = heads_for_tokens(build, values)

    def project(name: str, width: Size, first: bool = False) -> Tensor:
        return build.linear(
            f"delta.{name}",
            source,
            tokens,
            hidden_size,
            width,
            kept_input=kept,
            shards=view.tp,
            forward_comm=there if first else (),
            backward_comm=(*there, *reduced) if first else (),
            workspace=maximum(workspace, arriving) if first else workspace,
        )

    if spec.separate_projections:
        mixed = project("qkv", 2 * keys + values, first=True)
        gate, rates, steps = project("gate", values), project("rates", heads), project("steps", heads)
    else:
        joint, small = project("qkvz", 2 * keys + 2 * values, first=True), project("rates_steps", 2 * heads)
        # Each head's part is cut out of the joint projections: copies, which stand for them from here on.
        mixed = Tensor("delta.qkv", tokens * (2 * keys + values), joint.itemsize)
        gate = Tensor("delta.gate", tokens * values, joint.itemsize)
        build.operations.append(Operation("delta.split", "elementwise", (joint,), (mixed, gate)))
        rates, steps = (Tensor(f"delta.{name}", tokens * heads, small.itemsize) for name in ("rates", "steps"))
        build.operations.append(Operation("delta.split_small", "elementwise", (small,), (rates, steps)))
    with build.as_wide_as(mixed):
        active = causal_convolution(
            build,
            "delta.convolution",
            mixed,
            2 * keys + values,
            spec.linear_conv_kernel_dim,
            bias=False,
            activation=spec.hidden_act,
            shards=view.tp,
        )
        beta = build.tensor("delta.beta", tokens * heads)
        build.elementwise("delta.beta", (rates,), beta, keeps=(beta,))
        decay = _decay(build, steps, heads)
        if build.kernels.recurrence == "reference":
            output = _reference(build, spec, active, beta, decay, heads)
        else:
            output = _fused(build, spec, active, beta, decay, heads, key_heads)
        normed = _gated_norm(build, output, gate, heads, spec.linear_value_head_dim)
    forward, backward, workspace = build.leave(hidden_size)
    return build.linear(
        "delta.output",
        normed,
        tokens,
        values,
        hidden_size,
        shards=view.tp,
        output=build.hidden("delta.output", hidden_size),
        forward_comm=(*back, *forward),
        backward_comm=(*back, *backward),
        workspace=maximum(workspace, returning),
    )


def _decay(build: Builder, steps: Tensor, heads: Size) -> Tensor:
    """g = -exp(A_log) softplus(step + bias), in float32: both factors are kept, and what made them."""
    output = build.float32("delta.decay", steps.numel)
    trained = build.trains("delta.decay")  # what its own gradient reads is not kept where it is frozen
    kept = [build.float32(f"delta.decay.{name}", steps.numel) for name in ("biased", "softplus")[: 1 + trained]]
    kept += [build.float32(f"delta.decay.{name}", heads) for name in ("negative", "exponential")[: 1 + trained]]
    weights = tuple(
        Weight(f"delta.{name}.weight", heads, build.view.tp, "vector", build.trains(f"delta.{name}"))
        for name in ("decay", "step")
    )
    build.operations.append(Operation("delta.decay", "elementwise", (steps,), (output,), weights, keeps=tuple(kept)))
    return output


def _fused(
    build: Builder, spec: GatedDeltaNet, active: Tensor, beta: Tensor, decay: Tensor, heads: Size, key_heads: Size
) -> Tensor:
    """One kernel for the rule, the norm of queries and keys included."""
    view, tokens, chunk = build.view, build.view.tokens, spec.chunk_size
    key, value = spec.linear_key_head_dim, spec.linear_value_head_dim
    pairs = chunk_pairs(view, chunk) * heads
    scores, system, state = 2 * pairs * key, 2 * pairs * (key + value), 2 * tokens * heads * key * value
    forward = 2 * scores + system + 2 * pairs * value + 3 * state
    queries, keys = (build.tensor(f"delta.{name}", tokens * key_heads * key) for name in ("query", "key"))
    values = build.tensor("delta.value", tokens * heads * value)
    statistics = [
        Tensor(f"delta.{name}.rstd", tokens * key_heads, build.dtypes.norm_statistic, "statistic")
        for name in ("query", "key")
    ]
    build.operations.append(Operation("delta.heads", "elementwise", (active,), (queries, keys, values)))
    output = build.tensor("delta.rule", tokens * heads * value)
    inverse = build.tensor("delta.inverse", tokens * heads * chunk)
    total = build.float32("delta.decay_sums", tokens * heads)
    many = spread(tokens, chunk) * heads
    build.operations.append(
        Operation(
            "delta.rule",
            "scan",
            (queries, keys, values, beta, decay),
            (output,),
            keeps=(queries, keys, *statistics, values, beta, total, inverse),
            gemms=(
                Gemm(chunk, chunk, key, 2 * many),
                Gemm(chunk, key + value, chunk, many),
                Gemm(chunk, value, key, 2 * many),
                Gemm(key, value, chunk, many),
                Gemm(chunk, value, chunk, many),
            ),
            forward_flops=forward,
            input_gradient_flops=2 * forward,
            # Made again: what the chunks write, the states, the scores; the inverse's gradient takes two products more.
            rerun_flops=system + 2 * state + scores + 4 * pairs * minimum(chunk, view.positions),
            # What each chunk writes (keys and values), and a state for each.
            workspace=build.dtypes.activation * (tokens * heads * (key + 2 * value) + many * key * value),
        )
    )
    return output


def _gated_norm(build: Builder, x: Tensor, gate: Tensor, heads: Size, width: Size) -> Tensor:
    """norm(x) silu(z), over each head. transformers' module makes the product in float32."""
    tokens = build.view.tokens
    weight = Weight("delta.norm.weight", width, 1, "vector", build.trains("delta.norm"))
    statistic = Tensor("delta.norm.rstd", tokens * heads, build.dtypes.norm_statistic, "statistic")
    output = build.tensor("delta.norm", x.numel)
    keeps: list[Tensor] = [x, gate, statistic]
    if build.kernels.norm == "upcast":
        exact, copied = build.float32, build.dtypes.activation != 4
        keeps = [exact("delta.norm.float32", x.numel) if copied else x]
        keeps.append(exact("delta.gate.float32", x.numel) if copied else gate)
        products = ("weighted", "normalised")[: 1 + build.trains("delta.norm")]
        keeps += [build.tensor(f"delta.norm.{name}", x.numel) for name in products]
        keeps += [Tensor("delta.norm.rstd", tokens * heads, 4, "statistic"), exact("delta.gate.silu", x.numel)]
    moves = build.norm_moves(x, output, trained=weight.trainable)
    build.operations.append(
        Operation("delta.norm", "norm", (x, gate), (output,), (weight,), keeps=tuple(keeps), moves=moves)
    )
    return output


def _reference(build: Builder, spec: GatedDeltaNet, active: Tensor, beta: Tensor, decay: Tensor, heads: Size) -> Tensor:
    """transformers' `torch_chunk_gated_delta_rule`, operation by operation, in float32, keys repeated to all heads."""
    if build.dtypes.activation == 4:
        raise NotModelled("the reference code of the gated delta net in float32 is not modelled (16 bits are)")
    view, tokens, exact = build.view, build.view.tokens, build.float32
    key, value, chunk = spec.linear_key_head_dim, spec.linear_value_head_dim, spec.chunk_size
    chunks = ceil_div(view.positions, chunk)
    padded = view.sequences * chunks * chunk * heads  # rows of all heads, each sequence filled up to whole chunks
    batch = view.sequences * chunks * heads

    def made(name: str, inputs: tuple[Tensor, ...], width: Size, *keeps: Tensor, keep: bool = False) -> Tensor:
        output = exact(f"delta.{name}", padded * width)
        return build.elementwise(output.name, inputs, output, keeps=(*keeps, output) if keep else keeps)

    def product(name: str, first: Tensor, second: Tensor, output: Tensor, m: Size, n: Size, k: Size) -> Tensor:
        gemm = Gemm(m, n, k, batch)
        build.operations.append(
            Operation(
                f"delta.{name}",
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

    def normed(name: str) -> Tensor:
        wide = exact(f"delta.{name}_float32", tokens * heads * key)
        build.elementwise(wide.name, (active,), wide)
        return made(name, (wide,), key, wide, exact(f"delta.{name}_rstd", tokens * heads))

    query, keys, values, rate = (
        normed("query"),
        normed("key"),
        made("value", (active,), value),
        made("rate", (beta,), 1),
    )
    write_values = made("write_values", (values, rate), value, values, rate)
    write_keys = made("write_keys", (keys, rate), key, keys, rate)
    pairwise = made("pairwise", (decay,), chunk, build.mask("delta.mask", chunk * chunk), keep=True)
    scores = product("key_scores", write_keys, keys, exact("delta.key_scores", padded * chunk), chunk, chunk, key)
    system = made("system", (scores, pairwise), chunk, scores, pairwise)
    scores = product("query_scores", query, keys, exact("delta.query_scores", padded * chunk), chunk, chunk, key)
    inside = made("inside", (scores, pairwise), chunk, scores, pairwise)
    since = made("since", (decay,), 1, keep=True)
    faded_keys = made("faded_keys", (write_keys, since), key, write_keys, since)
    solved = []
    for name, right, width in (("new_values", write_values, value), ("read_keys", faded_keys, key)):
        output = exact(f"delta.{name}", padded * width)
        substitution = padded * chunk * width  # substitution: half of the pairs, a multiply-add each
        build.operations.append(
            Operation(
                f"delta.{name}",
                "solve",
                (system, right),
                (output,),
                keeps=(system, output),
                forward_flops=substitution,
                input_gradient_flops=3 * substitution,
            )
        )
        solved.append(output)
    again = made("since_query", (decay,), 1, keep=True)
    # With a single chunk nobody reads a state, or keeps what would read or write one.
    several = minimum(chunks - 1, 1)
    faded_query = made("faded_query", (query, again), key * several, query, again)
    until = made("until", (decay,), 1, keep=True)
    last_keys = made("last_keys", (keys, until), key * several, keys, until)
    whole = exact("delta.chunk_decay", batch)
    build.elementwise(whole.name, (decay,), whole, keeps=(whole,))
    states = exact("delta.states", batch * key * value)
    # The loop over the chunks: each corrects what it writes by the state before it, reads that, and writes the next.
    corrected = product("correct", solved[1], states, exact("delta.correct", padded * value), chunk, value, key)
    written = build.elementwise("delta.written", (solved[0], corrected), exact("delta.written", padded * value))
    added = product("write", last_keys, written, exact("delta.write", states.numel), key, value, chunk)
    build.elementwise("delta.carry", (added, whole), states, keeps=(states, whole))
    read = product("read", faded_query, states, exact("delta.read", padded * value), chunk, value, key)
    local = product("local", inside, written, exact("delta.local", padded * value), chunk, value, chunk)
    output = build.tensor("delta.rule", tokens * heads * value)
    return build.elementwise("delta.rule", (read, local), output)
