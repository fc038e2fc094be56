"""Attention to a window and to compressed entries (DeepSeek-V4): one head of keys that are values too, for all queries.

Legend: T tokens, b sequences, a heads of d channels, m tokens of an entry, C entries of all sequences, q and r widths of the
latents of queries and output, g groups of the output.

In a compressor each token makes a value and a score of each channel (two of both where entries overlap); an entry is their
average by the softmax of the scores over its window. Kept for backward as in transformers' module (5.23), which writes attention
out over all tokens and all entries and masks what a query does not see: tests/core/oracle/test_streams.py counts it. A fused kernel
keeps what any flash kernel keeps; its pairs are those of the window and of the entries chosen.
Ranks that share a sequence gather its keys and entries, which are one head's; queries stay where their tokens are.
"""

from __future__ import annotations

import msgspec

from loadgauge.core.base import NotModelled, Size, minimum, same, several, shard
from loadgauge.core.definitions.model.model import CompressedAttention
from loadgauge.core.layers.attention.mla import scores_of, scoring
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Collective, Gemm, Operation, Tensor, Weight


def compressed_attention(build: Builder, x: Tensor, spec: CompressedAttention, hidden: Size) -> Tensor:
    """Adds the attention half of a block to the list; `x` is its (normed) input. Returns the output projection."""
    view, tokens, local = build.view, build.view.tokens, build.local_tokens
    heads = shard(spec.num_attention_heads, view.tp, "num_attention_heads")
    groups = shard(spec.o_groups, view.tp, "o_groups")
    width = heads * spec.head_dim
    down = build.linear("attention.query_down", x, local, hidden, spec.q_lora_rank, adapter="query_down")
    latent = build.norm("attention.query_norm", down, spec.norm, local, spec.q_lora_rank)
    source, kept, reduced, workspace = build.enter("attention.query_gather", latent, spec.q_lora_rank)
    query = build.linear(
        "attention.query_up",
        source,
        tokens,
        spec.q_lora_rank,
        width,
        kept_input=kept,
        shards=view.tp,
        adapter="query_up",
        backward_comm=reduced,
        workspace=workspace,
    )
    query = _head_norm(build, query, tokens * heads)
    query = _rotated(build, "attention.rotary_q", query, tokens * heads, spec)
    key = build.linear("attention.key_value", x, local, hidden, spec.head_dim, adapter="key_value")
    key = build.norm("attention.key_value_norm", key, spec.norm, local, spec.head_dim)
    key = _rotated(build, "attention.rotary_k", key, local, spec)
    if spec.compress_rate is not None:
        entries = _compressor(build, "attention.compress", x, spec, spec.head_dim, hidden, trained=True)
        if spec.indexer is not None:
            _index(build, x, latent, spec, hidden)
        whole = build.tensor("attention.keys", key.numel + entries.numel)
        key = build.elementwise("attention.keys", (key, entries), whole)
    key, _, summed, _ = build.enter("attention.keys_gather", key, key.numel / local)
    if view.cached is not None:
        context = _over_cache(build, spec, query, heads)
    elif build.kernels.attention == "flash":
        context = _flash(build, spec, query, key, heads, summed)
    else:
        context = _eager(build, spec, query, key, heads, summed)
    context = _rotated(build, "attention.rotary_o", context, tokens * heads, spec)
    rank = groups * spec.o_lora_rank
    share = Gemm(tokens, spec.o_lora_rank, width / groups, groups)
    trained = build.trains("attention.output_groups")
    matrix = Weight(
        "attention.output_groups.weight",
        width * spec.o_lora_rank,
        view.tp,
        trainable=trained,
        shape=(rank, width / groups),
        base=view.lora is not None,
    )
    grouped = build.tensor("attention.output_groups", tokens * rank)
    build.operations.append(
        Operation(
            "attention.output_groups",
            "gemm",
            (context,),
            (grouped,),
            (matrix,),
            keeps=(context,) if trained else (),
            gemms=(share,),
            forward_flops=share.flops,
            input_gradient_flops=share.flops,
            weight_gradient_flops=share.flops if trained else 0,
        )
    )
    narrow = build.elementwise(
        "attention.output_joined", (grouped,), build.tensor("attention.output_joined", grouped.numel)
    )
    forward, backward, workspace = build.leave(hidden)
    return build.linear(
        "attention.output",
        narrow,
        tokens,
        rank,
        hidden,
        shards=view.tp,
        adapter="output",
        output=build.hidden("attention.output", hidden),
        forward_comm=forward,
        backward_comm=backward,
        workspace=workspace,
    )


def _head_norm(build: Builder, query: Tensor, rows: Size) -> Tensor:
    """A norm of each head of the queries, without a gain: the root is made in float32, and the product is not."""
    wide = query if query.itemsize == 4 else build.float32("attention.query_float32", query.numel)
    root, cast = Tensor("attention.query_rstd", rows, 4, "statistic"), build.tensor("attention.query_rstd_cast", rows)
    keeps = (query, wide, root) if wide is query else (query, wide, root, cast)
    output = build.tensor("attention.head_norm", query.numel)
    build.operations.append(
        Operation(
            "attention.head_norm", "norm", (query,), (output,), keeps=keeps, backward_workspace=2 * wide.nbytes,
            moves=build.norm_moves(query, output, gain=False),
        )
    )  # fmt: skip
    return output


def _rotated(build: Builder, name: str, x: Tensor, heads: Size, spec: CompressedAttention) -> Tensor:
    """A part of each head is turned, in float32, by tables that each call repeats for itself; the parts are joined again."""
    tables = build.tensor(f"{name}.tables", 2 * build.view.positions * spec.rotary_dim)
    output = build.tensor(name, x.numel)
    build.operations.append(
        Operation(name, "elementwise", (x,), (output,), keeps=(tables,), workspace=12 * heads * spec.rotary_dim)
    )
    return output


def _entries(build: Builder, spec: CompressedAttention) -> Size:
    """Entries of all sequences: windows that are full."""
    view = build.view
    assert spec.compress_rate is not None
    if view.cached is not None:
        return view.sequences / spec.compress_rate  # one token in so many closes a window
    if isinstance(view.positions, int) and isinstance(spec.compress_rate, int):
        return view.sequences * (view.positions // spec.compress_rate)
    return view.tokens / spec.compress_rate


def _compressor(
    build: Builder, name: str, x: Tensor, spec: CompressedAttention, width: Size, hidden: Size, *, trained: bool
) -> Tensor:
    """Entries of `width` channels, averages of what tokens make. `trained`: it has gradients at all."""
    tokens, doubled = build.local_tokens, (2 if spec.indexer is not None else 1) * width
    entries = _entries(build, spec) / build.view.token_shards if build.view.sequence_parallel else _entries(build, spec)
    assert spec.compress_rate is not None
    bias = Weight(
        f"{name}.position_bias",
        spec.compress_rate * doubled,
        1,
        "vector",
        trained and build.trains(name),
        shape=(spec.compress_rate, doubled),
    )
    output = build.tensor(f"{name}.sum", entries * width)
    if not trained:
        parts = {"values": hidden * doubled, "scores": hidden * doubled}
        weights = [Weight(f"{name}.{part}.weight", size, trainable=False) for part, size in parts.items()]
        weights += [bias, Weight(f"{name}.norm.weight", width, 1, "vector", trainable=False)]
        gemms = (Gemm(tokens, doubled, hidden),) * 2
        build.operations.append(
            Operation(
                name,
                "gemm",
                (x,),
                (output,),
                tuple(weights),
                gemms=gemms,
                forward_flops=sum(product.flops for product in gemms),
                workspace=12 * tokens * doubled,
                gradients=False,
            )
        )
        return output
    values, scores = (build.linear(f"{name}.{part}", x, tokens, hidden, doubled) for part in ("values", "scores"))
    numel = spec.compress_rate * entries * doubled
    biased = build.tensor(f"{name}.biased", numel)
    build.operations.append(Operation(f"{name}.biased", "elementwise", (scores,), (biased,), (bias,)))
    held = values
    if spec.indexer is not None:
        # Each entry's own window beside the one before it.
        held, biased = (
            build.elementwise(f"{name}.{n}_laid", (part,), build.tensor(f"{name}.{n}_laid", numel))
            for n, part in (("values", values), ("scores", biased))
        )
    exact = build.float32(f"{name}.softmax", numel)
    build.elementwise(f"{name}.softmax", (biased,), exact, keeps=(exact,))
    shares = exact if build.dtypes.activation == 4 else build.cast(f"{name}.shares", exact, build.dtypes.activation)
    build.operations.append(
        Operation(
            f"{name}.sum", "elementwise", (held, shares), (output,), keeps=(held, shares), workspace=shares.nbytes
        )
    )
    normed = build.norm(f"{name}.norm", output, spec.norm, entries, width)
    turned = build.tensor(f"{name}.rotary", normed.numel)
    tables = build.tensor(f"{name}.rotary.tables", 2 * spec.rotary_dim * entries)
    return build.elementwise(f"{name}.rotary", (normed,), turned, keeps=(tables,))


def _index(build: Builder, x: Tensor, latent: Tensor, spec: CompressedAttention, hidden: Size) -> None:
    """Scores of all entries by a small attention over entries of its own: relu(q k), weighted, summed over its heads. Nothing
    of it has gradients; each query looks at the best `index_topk`."""
    view, indexer = build.view, spec.indexer
    assert indexer is not None
    entries = _compressor(build, "attention.index.compress", x, spec, indexer.head_dim, hidden, trained=False)
    each = _seen(build, spec)
    pairs = view.tokens * each
    products = {
        "query": (spec.q_lora_rank, indexer.num_heads * indexer.head_dim),
        "weights": (hidden, indexer.num_heads),
    }
    weights = tuple(Weight(f"attention.index.{n}.weight", i * o, trainable=False) for n, (i, o) in products.items())
    gemms = [Gemm(view.tokens, o, i) for i, o in products.values()]
    scores = Gemm(view.positions, each, indexer.head_dim, indexer.num_heads * view.sequences)
    if build.kernels.chooses == "fused":
        (scores,) = scoring(build, each, indexer.head_dim, indexer.num_heads)
    scored, workspace = scores_of(build, pairs, indexer.num_heads)
    build.operations.append(
        Operation(
            "attention.index",
            "gemm",
            (x, latent, entries),
            (scored,),
            weights,
            gemms=(*gemms, scores),
            forward_flops=sum(gemm.flops for gemm in (*gemms, scores)),
            forward_comm=(Collective("all_gather", "cp", view.cp * entries.nbytes, view.cp),),
            workspace=workspace,
            gradients=False,
        )
    )


def _seen(build: Builder, spec: CompressedAttention) -> Size:
    """Entries of one sequence, those of other ranks too."""
    if spec.compress_rate is None:
        return 0
    if build.view.cached is not None:
        return build.view.cached.tokens / spec.compress_rate
    return build.view.cp * _entries(build, spec) / build.view.sequences


def _sinks(build: Builder, heads: Size) -> tuple[Weight, ...]:
    trained = build.trains("attention.sinks")
    return (Weight("attention.sinks.weight", heads, build.view.tp, "vector", trained),)


def _chosen(build: Builder, spec: CompressedAttention) -> Size:
    """Entries that a query looks at."""
    seen = _seen(build, spec)
    return seen if spec.index_topk is None else minimum(seen, spec.index_topk)


def _exchange(build: Builder, key: Tensor) -> tuple[Collective, Collective]:
    """Traffic of the ranks that share a sequence: all keys and entries of it, and the sum of their gradients."""
    ranks = build.view.cp
    collectives = ("all_gather", "reduce_scatter")
    gather, scatter = (Collective(kind, "cp", ranks * key.nbytes, ranks) for kind in collectives)
    return gather, scatter


def _over_cache(build: Builder, spec: CompressedAttention, query: Tensor, heads: Size) -> Tensor:
    view, cached = build.view, build.view.cached
    assert cached is not None
    keys = minimum(cached.tokens, spec.sliding_window) + _chosen(build, spec)
    cache = Tensor("attention.cache", view.sequences * keys * spec.head_dim, cached.itemsize)
    context = build.tensor("attention.context", query.numel)
    many = heads * view.sequences
    products = (Gemm(view.positions, keys, spec.head_dim, many), Gemm(view.positions, spec.head_dim, keys, many))
    build.operations.append(
        Operation(
            "attention.flash",
            "attention",
            (query, cache),
            (context,),
            _sinks(build, heads),
            gemms=products,
            forward_flops=sum(product.flops for product in products),
            gradients=False,
        )
    )
    return context


def _flash(
    build: Builder, spec: CompressedAttention, query: Tensor, key: Tensor, heads: Size, summed: tuple[Collective, ...]
) -> Tensor:
    """One fused kernel over the window and the chosen entries; `summed`: traffic of the gradients of keys."""
    view, width = build.view, spec.head_dim
    if spec.dropout:
        raise NotModelled("dropout of the probabilities of compressed attention under a fused kernel is not modelled")
    pairs = minimum(view.pairs, view.tokens * spec.sliding_window) + view.tokens * _chosen(build, spec)
    context = build.tensor("attention.context", query.numel)
    gather, scatter = _exchange(build, key)
    statistic = Tensor("attention.lse", view.tokens * heads, build.dtypes.softmax_statistic, "statistic")
    product = Gemm(view.tokens, pairs / view.tokens, width, heads)
    flops = 2 * pairs * width * heads
    build.operations.append(
        Operation(
            "attention.flash",
            "attention",
            (query, key),
            (context,),
            _sinks(build, heads),
            keeps=(query, key, context, statistic),
            gemms=(product, product),
            forward_flops=2 * flops,
            input_gradient_flops=4 * flops,
            rerun_flops=flops,
            forward_comm=(gather,),
            backward_comm=(gather, scatter, *summed),
            workspace=4 * view.tokens * heads * (width + 1) + several(view.cp) * gather.nbytes,
        )
    )
    return context


def _eager(
    build: Builder, spec: CompressedAttention, query: Tensor, key: Tensor, heads: Size, summed: tuple[Collective, ...]
) -> Tensor:
    """Scores of all tokens and entries, with a sink, written out: the one head of keys is repeated for each head of queries."""
    view, width = build.view, spec.head_dim
    if not (same(view.cp, 1) and same(view.tp, 1)):
        gather, scatter = _exchange(build, key)
        whole = build.tensor("attention.gathered_keys", view.cp * key.numel)
        back = (scatter, *summed)
        build.operations.append(
            Operation(whole.name, "collective", (key,), (whole,), forward_comm=(gather,), backward_comm=back)
        )
        key = whole
    keys = view.cp * view.positions + _seen(build, spec)
    pairs = view.pairs + view.tokens * _seen(build, spec)
    if build.kernels.repeat_kv:
        key = build.elementwise("attention.repeat_k", (key,), build.tensor("attention.repeat_k", key.numel * heads))
    grouped = build.kernels.repeat_kv

    def matmul(name: str, first: Tensor, second: Tensor, output: Tensor, n: Size, k: Size) -> Tensor:
        product, flops = Gemm(view.positions, n, k, heads * view.sequences), 2 * pairs * width * heads
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

    size = heads * pairs
    scores = matmul("attention.scores", query, key, build.tensor("attention.scores", size), keys, width)
    size = size + view.tokens * heads
    indices = Tensor("attention.sinks.place", view.tokens * heads, build.dtypes.index, "index")
    sunk = build.tensor("attention.with_sinks", size)
    build.operations.append(
        Operation("attention.with_sinks", "elementwise", (scores,), (sunk,), _sinks(build, heads), keeps=(indices,))
    )
    probabilities = build.tensor("attention.softmax", size)
    build.elementwise("attention.softmax", (sunk,), probabilities, keeps=(probabilities,))
    shares = build.dropout("attention.dropped", probabilities, spec.dropout)
    values = msgspec.structs.replace(key, name="attention.repeat_v") if grouped else key
    if grouped:
        build.elementwise("attention.repeat_v", (key,), values)
    context = build.tensor("attention.context", query.numel)
    return matmul("attention.context", shares, values, context, width, keys)
