"""Softmax attention, written out (eager) or fused (flash), on tensor-parallel heads.

Legend: T tokens, P query-key pairs, a query heads and k key-value heads on this rank, d head width.

Kept for backward by PyTorch (source: pytorch; korthikanti2022 section 4.1 for the eager form with dropout):
eager: queries, keys, the softmax's output, the dropout mask, the dropped probabilities, values.
flash: queries, keys, values, the output and one log-sum-exp a token and head.
"""

from __future__ import annotations

import msgspec

from loadgauge.core.base import NotModelled, Size, ceil_div, maximum, minimum, same, shard, spread
from loadgauge.core.definitions.model.model import Attention
from loadgauge.core.layers.adapters.adapters import JOINT, joint_adapted
from loadgauge.core.layers.attention.context_parallel import exchange
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Gemm, Operation, Tensor, Weight

CORE = frozenset(
    {
        "attention.scores",
        "attention.softmax",
        "attention.dropped",
        "attention.context",
        "attention.flash",
        "attention.mask",
    }
    | {"attention.softcap", "attention.masked", "attention.softmax_cast", "attention.repeat_k", "attention.repeat_v"}
    | {
        "attention.scaled",
        "attention.softmax_upcast",
        "attention.shifted",
        "attention.by_token",
        "attention.with_sinks",
    }
    | {"attention.query_float32", "attention.key_float32", "attention.floored", "attention.exchanged"}
    | {"attention.unpad_q", "attention.unpad_k", "attention.unpad_v", "attention.pad"}
)
"""Operations that selective recomputation runs again: from queries, keys and values to the context."""


BORROWED = "attention.borrowed_"


def attention(build: Builder, x: Tensor, spec: Attention, hidden_size: Size) -> Tensor:
    """Adds the attention half of a block to the list; `x` is its (normed) input. Returns the output projection."""
    view = build.view
    tokens = view.tokens
    heads = shard(spec.num_attention_heads, view.tp, "num_attention_heads")
    kv_heads = spread(spec.num_key_value_heads, view.tp)
    query, key, value, gate = _project(build, x, spec, hidden_size, heads, kv_heads)
    masked = _given_mask(build, spec) and build.kernels.attention == "flash"
    arguments = [query, key, value]
    if build.kernels.repeat_kv and (spec.repeats_kv or (masked and not same(heads, kv_heads))):
        full = tokens * heads * spec.head_dim
        key, value = (
            build.elementwise(name := f"attention.repeat_{n}", (tensor,), Tensor(name, full, tensor.itemsize))
            for n, tensor in (("k", key), ("v", value))
        )
        arguments += [key, value]
    if build.view.lora is not None and value.itemsize != build.dtypes.activation:
        # Attention runs in 16 bits, and keeps these copies, of values without what they were a part of.
        value = Tensor(value.name, key.numel / spec.head_dim * _value_width(spec), value.itemsize)
        query, key, value = (
            build.cast(f"attention.cast_{n}", each, build.dtypes.activation)
            for n, each in (("q", query), ("k", key), ("v", value))
        )
    written = len(build.operations)
    context = core(build, spec, query, key, value, heads, kv_heads, spec.value_head_dim)
    if spec.borrowed:
        # The layer that made them keeps them.
        build.operations[written:] = [
            msgspec.structs.replace(
                each, keeps=tuple(kept for kept in each.keeps if not kept.name.startswith(BORROWED))
            )
            for each in build.operations[written:]
        ]
    if build.kernels.written_mask and build.operations[-1].gradients:
        # Arguments of the functions that write attention out, or call its kernel.
        last = build.operations[-1]
        repeated = tuple(kept.outputs[0] for kept in build.operations[written:] if kept.name == "attention.repeat_k")
        build.operations[-1] = msgspec.structs.replace(last, holds=(*arguments, query, key, value, *repeated))
    if gate is not None:
        opened, product = (Tensor(f"attention.{name}", gate.numel, gate.itemsize) for name in ("gate_sigmoid", "gated"))
        build.elementwise("attention.gate_sigmoid", (gate,), opened, keeps=(opened,))
        context = build.elementwise("attention.gated", (context, opened), product, keeps=(context, opened))
    forward, backward, workspace = build.leave(hidden_size)
    return build.linear(
        "attention.output",
        context,
        tokens,
        heads * _value_width(spec),
        hidden_size,
        bias=spec.output_bias,
        shards=view.tp,
        bias_shards=1,
        adapter="output",
        held=True,
        output=build.hidden("attention.output", hidden_size),
        forward_comm=forward,
        backward_comm=backward,
        workspace=workspace,
    )


def _value_width(spec: Attention) -> Size:
    return spec.head_dim if spec.value_head_dim is None else spec.value_head_dim


def _project(
    build: Builder, x: Tensor, spec: Attention, hidden_size: Size, heads: Size, kv_heads: Size
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and the gate of the output: their projections, norms and rotation."""
    view, tokens, width = build.view, build.view.tokens, spec.head_dim
    source, kept, reduced, workspace = build.enter("attention.gather", x, hidden_size)
    query_width, kv_width = heads * width, kv_heads * width
    joint_gate = spec.output_gate and not spec.gate_matrix
    doubled, gate = query_width * 2 if joint_gate else query_width, None
    held: Tensor | None = None
    in_one = view.lora is not None and view.lora.joint and bool(view.lora.targets & set(JOINT))
    if spec.fused_qkv:
        fused = build.linear(
            "attention.qkv",
            source,
            tokens,
            hidden_size,
            query_width + 2 * kv_width,
            bias=spec.qkv_bias,
            kept_input=kept,
            shards=view.tp,
            adapter="qkv",
            backward_comm=reduced,
            workspace=workspace,
        )
        if in_one:
            fused = joint_adapted(build, source, kept, {"qkv": fused}, hidden_size, view.tp)
        if spec.clip:
            fused = _clip(build, fused)
        query, key = (
            Tensor(f"attention.{n}", tokens * w, fused.itemsize) for n, w in (("q", query_width), ("k", kv_width))
        )
        pinned = view.kernels.views_pin_storage and view.kernels.attention == "flash" and spec.rotary
        value = fused if pinned else Tensor("attention.v", tokens * kv_width, fused.itemsize)
        pieces = (query, key) if pinned else (query, key, value)
        build.operations.append(Operation("attention.split", "view", (fused,), pieces))
        held = fused if view.kernels.views_pin_storage else None
    else:
        sizes = {"query": doubled, "key": kv_width, "value": kv_heads * _value_width(spec)}
        projected = {
            name: build.linear(
                f"attention.{name}",
                source,
                tokens,
                hidden_size,
                size,
                bias=spec.qkv_bias and (name != "key" or spec.key_bias),
                kept_input=kept,
                shards=view.tp,
                adapter=name,
                backward_comm=reduced if name == "query" else (),
                workspace=workspace,
            )
            for name, size in sizes.items()
            if not (spec.borrowed and name != "query") and not (spec.keys_are_values and name == "value")
        }
        query = projected["query"]
        key = projected.get("key") or build.tensor(f"{BORROWED}k", kv_width * tokens)
        value = projected.get("value") or (build.tensor(f"{BORROWED}v", kv_width * tokens) if spec.borrowed else key)
        if in_one:
            held = joint_adapted(build, source, kept, projected, hidden_size, view.tp)
            sides = (query, key, value)
            query, key, value = (Tensor(f"{side.name}.of_all", side.numel, side.itemsize) for side in sides)
            pieces = (query, key, value)
            if view.kernels.views_pin_storage and view.kernels.attention == "flash" and spec.rotary:
                pieces, value = (query, key), held
            build.operations.append(Operation("attention.split", "view", (held,), pieces))
        if spec.clip:
            query, key, value = (_clip(build, tensor) for tensor in (query, key, value))
    if spec.gate_matrix:
        gate = build.linear(
            "attention.gate",
            source,
            tokens,
            hidden_size,
            heads * _value_width(spec),
            kept_input=kept,
            shards=view.tp,
            workspace=workspace,
        )
    if joint_gate:
        joint = query
        query, gate = (Tensor(f"attention.{n}", tokens * query_width, joint.itemsize) for n in ("q", "gate"))
        build.operations.append(Operation("attention.split_gate", "view", (joint,), (query, gate)))
    if spec.qk_norm is not None:
        query = _head_norm(build, "attention.query_norm", query, spec, heads, joint if joint_gate else held)
        if not spec.borrowed:
            key = _head_norm(build, "attention.key_norm", key, spec, kv_heads, held)
    if spec.value_norm is not None and not spec.borrowed:
        value = build.norm("attention.value_norm", value, spec.value_norm, tokens * kv_heads, width)
    if spec.rotary:
        tables = _own_tables(build, spec)
        query, key = (
            build.elementwise(
                f"attention.rotary_{n}", (x,), Tensor(f"attention.rotary_{n}", x.numel, x.itemsize), tables
            )
            for n, x in (("q", query), ("k", key))
        )
        if spec.fused_qkv and not spec.causal and view.kernels.written_mask:
            # Of pictures it is written out in float32: both, a product, turned halves, theirs, and of the first its sum.
            inside = 24 * key.numel - query.nbytes - key.nbytes - (8 * key.numel if key.itemsize == 4 else 0)
            build.operations[-1] = msgspec.structs.replace(build.operations[-1], workspace=inside)
        if spec.borrowed:
            key = build.operations.pop().inputs[0]
    if spec.query_scale != "none":
        factor = Tensor("attention.query_scale", view.positions, 4 if spec.query_scale == "float32" else query.itemsize)
        scaled = build.tensor("attention.query_scaled", query.numel)
        query = build.elementwise("attention.query_scaled", (query,), scaled, keeps=(factor,))
    return query, key, value, gate


def _own_tables(build: Builder, spec: Attention) -> tuple[Tensor, ...]:
    """Return the copies of the rotation's tables that a layer keeps; none where all layers share them (`rotary_layer`)."""
    if not spec.own_tables or build.kernels.norm != "upcast":
        return ()
    width = spec.head_dim if spec.rotary_dim is None else spec.rotary_dim
    itemsize = 4 if spec.tables_float32 or build.wide_weights else build.dtypes.activation
    return (Tensor("attention.rotary_tables", spec.own_tables * build.view.positions * width, itemsize),)


def _clip(build: Builder, x: Tensor) -> Tensor:
    """Clamps a projection; its gradient needs what went in (in place, PyTorch keeps a copy of it)."""
    return build.elementwise(f"{x.name}_clip", (x,), build.tensor(f"{x.name}_clip", x.numel), keeps=(x,))


def _head_norm(
    build: Builder, name: str, x: Tensor, spec: Attention, heads: Size, held: Tensor | None = None
) -> Tensor:
    """The norm of queries or keys. One over all heads sums its statistic over the ranks: a value a token, not counted.

    `held`: what `x` is a view of.
    """
    assert spec.qk_norm is not None
    tokens, width, tp = build.view.tokens, spec.head_dim, build.view.tp
    if spec.qk_norm_over == "all":
        return build.norm(name, x, spec.qk_norm, tokens, heads * width, shards=tp, kept_input=held)
    own = spec.qk_norm_over == "own"
    gain, shards = (heads * width, tp) if own else (None, 1)
    return build.norm(name, x, spec.qk_norm, tokens * heads, width, gain=gain, shards=shards, kept_input=held)


def core(
    build: Builder,
    spec: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: Size,
    kv_heads: Size,
    value_width: Size | None = None,
    cache_width: Size | None = None,
) -> Tensor:
    """Adds what makes the context of queries, keys and values. `value_width`: where values are not as wide as keys;
    `cache_width`: elements of a cached token, where it is not keys and values."""
    wide = spec.head_dim if value_width is None else value_width
    if build.view.cached is not None:
        return _over_cache(build, spec, query, heads, kv_heads, wide, cache_width)
    if build.kernels.attention == "flash" and not _math(build, heads, kv_heads):
        return _flash(build, spec, query, key, value, heads, kv_heads, wide)
    return _eager(build, spec, query, key, value, heads, wide)


def _math(build: Builder, heads: Size, kv_heads: Size) -> bool:
    """Return whether PyTorch writes attention out where a fused kernel was asked for: in float32 none takes fewer key heads than
    heads. With a mask transformers repeats the keys, as for TRL's batches, and there is one (source: pytorch 2.13,
    `transformers/cuda/sdp_utils.cpp`; transformers 5.23, `integrations/sdpa_attention.py`)."""
    kernels = build.kernels
    grouped = kernels.writes_groups and not same(heads, kv_heads)
    return grouped and build.dtypes.activation == 4 and kernels.loss != "tiled"


def _sinks(build: Builder, spec: Attention, heads: Size) -> tuple[Weight, ...]:
    """One learned score a head, which takes part in the softmax and is then dropped (GPT-OSS)."""
    if not spec.sinks:
        return ()
    return (Weight("attention.sinks.weight", heads, build.view.tp, "vector", build.trains("attention.sinks")),)


def _flash(
    build: Builder,
    spec: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: Size,
    kv_heads: Size,
    value_width: Size,
) -> Tensor:
    """One fused kernel: two products forward, five backward, of which one makes the scores again (source: dao2022)."""
    view, tokens, width = build.view, build.view.tokens, spec.head_dim
    if spec.dropout and not view.kernels.flash_dropout:
        return _eager(build, spec, query, key, value, heads, value_width)
    if view.kernel_tokens is not None:
        tokens, share = view.kernel_tokens, view.kernel_tokens / view.tokens
        sizes = query.numel, key.numel, key.numel * value_width / width
        query, key, value = (
            build.elementwise(f"attention.unpad_{n}", (tensor,), build.tensor(f"attention.unpad_{n}", size * share))
            for n, tensor, size in zip("qkv", (query, key, value), sizes, strict=True)
        )
    context = build.tensor("attention.context", tokens * heads * value_width)
    statistic = Tensor("attention.lse", tokens * heads, build.dtypes.softmax_statistic, "statistic")
    pairs = view.pairs if spec.sliding_window is None else minimum(view.pairs, tokens * spec.sliding_window)
    products = (
        Gemm(view.positions, view.positions, width, heads * view.sequences),
        Gemm(view.positions, value_width, view.positions, heads * view.sequences),
    )
    scores, values = 2 * pairs * width * heads, 2 * pairs * value_width * heads
    # FlashAttention-2 sums the queries' gradient in float32 and expands grouped keys' and values' (source: dao2023).
    workspace = 4 * tokens * heads * (width + 1)
    if not same(kv_heads, heads):
        workspace = workspace + 2 * context.nbytes
    # Once for each group of its blocks, where sums must not depend on who is first (csrc/flash_attn/flash_api.cpp: `nsplits`).
    sums = ceil_div(view.kernels.sums_over, heads * view.sequences) if view.kernels.sums_over else 1
    between, masks = exchange(build, query, key, value, context), _masks(build, spec)
    build.operations.append(
        Operation(
            "attention.flash",
            "attention",
            (query, key, value),
            (context,),
            _sinks(build, spec, heads),
            keeps=(query, key, value, context, statistic, *masks),
            gemms=products,
            forward_flops=scores + values,
            input_gradient_flops=2 * (scores + values),
            rerun_flops=scores,
            forward_comm=between.forward,
            backward_comm=between.backward,
            workspace=workspace + between.workspace,
            backward_workspace=4 * tokens * heads * width * (sums - 1),
            computed_share=view.pairs / pairs if masks else _computed_share(build, spec),
        )
    )
    if view.cp_comm == "all_to_all" and not same(view.cp, 1):
        # The kernel keeps its output as it made it, heads apart; the last matrix keeps it token by token.
        context = build.elementwise(
            "attention.exchanged", (context,), build.tensor("attention.exchanged", context.numel)
        )
    if view.kernel_tokens is not None:
        padded = build.tensor("attention.pad", view.tokens * heads * value_width)
        context = build.elementwise("attention.pad", (context,), padded)
    elif spec.heads_first and view.kernels.views_pin_storage and not masks:
        # The kernel lays its output out as the queries are; the last matrix needs it token by token.
        context = build.elementwise("attention.by_token", (context,), build.tensor("attention.by_token", context.numel))
    return context


def _given_mask(build: Builder, spec: Attention) -> bool:
    """Return whether transformers gives PyTorch's fused kernel a mask: of the model's, or of a padded batch."""
    return build.kernels.masks or (spec.masked and build.kernels.written_mask)


def _masks(build: Builder, spec: Attention) -> tuple[Tensor, ...]:
    """The mask that PyTorch makes of one of booleans, turned round, in each call, as wide as queries; its kernel computes all pairs
    and keeps it (source: pytorch, `transformers/attention.cpp`, `convert_boolean_attn_mask`)."""
    if not _given_mask(build, spec):
        return ()
    mask = build.tensor("attention.mask", build.view.pairs)
    # Rows of a padded sound's are no multiple of 8, to which a copy fills them up.
    beside = build.view.pairs if spec.causal else mask.nbytes
    build.operations.append(Operation(mask.name, "elementwise", (), (mask,), workspace=beside))
    return (mask,)


def _over_cache(
    build: Builder, spec: Attention, query: Tensor, heads: Size, kv_heads: Size, wide: Size, cache_width: Size | None
) -> Tensor:
    """The kernel of generation: each new query meets the cached tokens, a window's at most. Forward only.

    Key-value heads that ranks cannot share are on each of them.
    """
    view, cached = build.view, build.view.cached
    assert cached is not None
    keys = cached.tokens if spec.sliding_window is None else minimum(cached.tokens, spec.sliding_window)
    each = maximum(kv_heads, 1) * (spec.head_dim + wide) if cache_width is None else cache_width
    cache = Tensor("attention.cache", view.sequences * keys * each, cached.itemsize)
    context = build.tensor("attention.context", view.tokens * heads * wide)
    products = (
        Gemm(view.positions, keys, spec.head_dim, heads * view.sequences),
        Gemm(view.positions, wide, keys, heads * view.sequences),
    )
    build.operations.append(
        Operation(
            "attention.flash",
            "attention",
            (query, cache),
            (context,),
            _sinks(build, spec, heads),
            gemms=products,
            forward_flops=sum(product.flops for product in products),
            gradients=False,
        )
    )
    return context


def _computed_share(build: Builder, spec: Attention) -> Size:
    """Of the counted pairs, those that are not masked: half of them, or W - W^2 / 2s of W for a window of W in s.

    >>> from loadgauge.core.layers.operations.rank_view import View
    >>> _computed_share(Builder(View.of(1024, 1)), Attention(num_attention_heads=1, num_key_value_heads=1, head_dim=8))
    0.5
    """
    if not spec.causal:
        return 1
    whole = build.view.positions * build.view.cp
    seen = whole if spec.sliding_window is None else minimum(spec.sliding_window, whole)
    return 1 - seen / (2 * whole)


def _eager(
    build: Builder, spec: Attention, query: Tensor, key: Tensor, value: Tensor, heads: Size, value_width: Size
) -> Tensor:
    """Scores, softmax, dropout and context as separate operations; the scores are written to memory."""
    view, kernels, width = build.view, build.kernels, spec.head_dim
    if not same(view.cp, 1):
        raise NotModelled("context parallelism of eager attention is not modelled; use flash attention")
    size = heads * view.pairs
    grouped = not same(spec.num_key_value_heads, spec.num_attention_heads) and not same(key.numel, query.numel)
    if kernels.repeat_kv and grouped:
        for_keys, for_values = (
            build.tensor(f"attention.repeat_{n}", view.tokens * heads * each)
            for n, each in (("k", width), ("v", value_width))
        )
        key = build.elementwise("attention.repeat_k", (key,), for_keys)
        value = build.elementwise("attention.repeat_v", (value,), for_values)

    def matmul(name: str, first: Tensor, second: Tensor, output: Tensor, n: Size, k: Size, each: Size) -> Tensor:
        product = Gemm(view.positions, n, k, heads * view.sequences)
        flops = 2 * view.pairs * each * heads
        build.operations.append(
            Operation(
                name,
                "gemm",
                (first, second),
                (output,),
                keeps=(first, second),
                gemms=(product,),
                forward_flops=flops,
                input_gradient_flops=2 * flops,
            )
        )
        return output

    keys, make = view.positions, build.tensor
    if spec.scores_float32 and kernels.softmax_float32 and build.dtypes.activation != 4:
        make = build.float32
        query, key = (
            build.elementwise(f"attention.{n}_float32", (tensor,), make(f"attention.{n}_float32", tensor.numel))
            for n, tensor in (("query", query), ("key", key))
        )
    scores = matmul("attention.scores", query, key, make("attention.scores", size), keys, width, width)
    if kernels.written_mask:
        # The scale is a product of its own.
        scores = build.elementwise("attention.scaled", (scores,), build.tensor("attention.scaled", size))
    if spec.softcap:
        capped = build.tensor("attention.softcap", size)
        scores = build.elementwise("attention.softcap", (scores,), capped, keeps=(capped,))
    if kernels.scores_mask:
        masked = build.tensor("attention.masked", size)
        scores = build.elementwise(
            "attention.masked", (scores,), masked, keeps=(build.mask("attention.scores_mask", size),)
        )
    if spec.scores_floored and kernels.norm == "upcast":
        floored, lowest = build.tensor("attention.floored", size), build.float32("attention.lowest", 1)
        scores = build.elementwise("attention.floored", (scores,), floored, keeps=(scores, lowest))
    behind: tuple[Tensor, ...] = ()
    if spec.sinks:
        # One column more; the largest score of each row is taken off in another copy, and its place kept.
        behind = (scores,)
        size = size + view.tokens * heads
        indices = Tensor("attention.sinks.place", view.tokens * heads, build.dtypes.index, "index")
        joined = build.tensor("attention.with_sinks", size)
        build.operations.append(
            Operation(
                "attention.with_sinks",
                "elementwise",
                (scores,),
                (joined,),
                _sinks(build, spec, heads),
                keeps=(indices,),
                workspace=joined.nbytes,
            )
        )
        scores = joined
    elif spec.scores_shifted:
        indices = Tensor("attention.largest", view.tokens * heads, build.dtypes.index, "index")
        scores = build.elementwise(
            "attention.shifted", (scores,), build.tensor("attention.shifted", size), keeps=(indices,)
        )
    probabilities = build.tensor("attention.softmax", size)
    # Autocast leaves a softmax alone that is told its dtype, as beside sinks (ATen, `fp32_set_opt_dtype`): theirs, if wider.
    narrow = spec.sinks and not build.wide_weights and (build.view.lora is None or build.view.lora.upcast != "all")
    upcast = (build.autocast and not narrow) or (kernels.softmax_float32 and spec.softmax_float32)
    if upcast and build.dtypes.activation != 4:
        exact, wide = (build.float32(f"attention.softmax_{n}", size) for n in ("float32", "upcast"))
        if make is build.float32:
            wide = scores
        else:
            build.elementwise("attention.softmax_upcast", (scores,), wide)
        # A mask as wide as the residual stream has made the scores float32 already.
        named = (scores,) if kernels.written_mask and not build.wide_weights else ()
        build.elementwise("attention.softmax", (wide,), exact, keeps=(exact,), holds=(*named, *behind))
        build.elementwise("attention.softmax_cast", (exact,), probabilities)
    else:
        build.elementwise("attention.softmax", (scores,), probabilities, keeps=(probabilities,), holds=behind)
    probabilities = build.dropout("attention.dropped", probabilities, spec.dropout)
    context = build.tensor("attention.context", view.tokens * heads * value_width)
    return matmul("attention.context", probabilities, value, context, value_width, keys, value_width)
