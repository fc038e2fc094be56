"""Multi-head latent attention: queries, and keys with values, are made from narrow latents (source: deepseek2024v2).

Legend: T tokens, a heads on this rank, d_n, d_r and d_v a head's channels without and with rotary positions and of its
values, q and m the widths of the two latents.

Kept for backward, as in transformers' modules: what goes into and comes out of each latent's norm, and of the core what
any attention keeps. The tables of DeepSeek-V2's rotation are complex, which is not modelled.

Tensor parallelism is Megatron's (source: megatron-lm): the matrices into the latents, and the latents' norms, are whole
on every rank and see its share of the tokens under sequence parallelism; the matrices out of the latents are split by
heads and gather the latents, and the rotated part of the keys is gathered by itself. So q + m + d_r channels a token
are gathered and not the hidden size. Without sequence parallelism the gradients of those three are summed over ranks.
"""

from __future__ import annotations

import msgspec

from loadgauge.core.base.algebra import Size, minimum, same, shard
from loadgauge.core.definitions.model.kernels import MOST_SCORES
from loadgauge.core.definitions.model.model import Attention, Indexer, LatentAttention
from loadgauge.core.layers.attention.attention import core
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Collective, Gemm, Operation, OperationKind, Tensor, Weight


def latent_attention(build: Builder, x: Tensor, spec: LatentAttention, hidden_size: Size) -> Tensor:
    """Adds the attention half of a block to the list; `x` is its (normed) input. Returns the output projection.

    Bytes kept by the core, FlashAttention: queries, keys, values, the output and one float32 a token and head.

    >>> from loadgauge.core.layers.operations.rank_view import View
    >>> T, a, d_n, d_r, d_v = 512, 16, 128, 64, 96
    >>> spec = LatentAttention(num_attention_heads=a, q_lora_rank=256, kv_lora_rank=128, qk_nope_head_dim=d_n,
    ...                        qk_rope_head_dim=d_r, v_head_dim=d_v)
    >>> build = Builder(View.of(T, 1))
    >>> _ = latent_attention(build, build.tensor("x", T * 1024), spec, 1024)
    >>> flash = next(operation for operation in build.operations if operation.name == "attention.flash")
    >>> sum(tensor.nbytes for tensor in flash.keeps) == T * a * (2 * (2 * (d_n + d_r) + 2 * d_v) + 4)
    True
    """
    heads = shard(spec.num_attention_heads, build.view.tp, "num_attention_heads")
    query = _query(build, x, spec, hidden_size, heads)
    key, value = _key_and_value(build, x, spec, hidden_size, heads)
    if build.view.lora is not None and value.itemsize != build.dtypes.activation:
        # Attention runs in 16 bits, and keeps these copies.
        wide = Tensor(value.name, build.view.tokens * heads * spec.v_head_dim, value.itemsize)
        query, key, value = (
            build.cast(f"attention.cast_{n}", each, build.dtypes.activation)
            for n, each in (("q", query), ("k", key), ("v", wide))
        )
    if spec.indexer is not None:
        _index(build, x, query, spec.indexer, spec, hidden_size)
    plain = Attention(
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_attention_heads,
        head_dim=spec.qk_nope_head_dim + spec.qk_rope_head_dim,
        causal=spec.causal,
        # Joining the two parts of the queries leaves them head by head; the kernel for values of another width does not.
        sliding_window=spec.sliding_window,
        dropout=spec.dropout,
        heads_first=spec.rotary and same(spec.v_head_dim, spec.qk_nope_head_dim + spec.qk_rope_head_dim),
    )
    if spec.query_scale:
        factor = build.tensor("attention.query_scale", build.view.positions)
        scaled = build.tensor("attention.query_scaled", query.numel)
        query = build.elementwise("attention.query_scaled", (query,), scaled, keeps=(factor,))
    over_latents = build.view.cached is not None
    if spec.index_topk is not None and build.kernels.chooses == "fused":
        over_latents = True
    elif spec.index_topk is not None and not over_latents:
        # Of the pairs, those that no query chose are masked; all of them are computed.
        mask = build.tensor("attention.chosen", build.view.pairs)
        keeps = (mask,) if build.kernels.attention == "flash" else ()
        build.operations.append(Operation("attention.chosen", "elementwise", (), (mask,), keeps=keeps, gradients=False))
    if over_latents:
        context = _over_latents(build, plain, spec, query, key, value, heads)
    else:
        context = core(build, plain, query, key, value, heads, heads, spec.v_head_dim)
    if spec.head_gate or spec.channel_gate:
        context = _gated(build, x, context, hidden_size, heads * spec.v_head_dim if spec.channel_gate else heads)
    forward, backward, workspace = build.leave(hidden_size)
    return build.linear(
        "attention.output",
        context,
        build.view.tokens,
        heads * spec.v_head_dim,
        hidden_size,
        bias=spec.bias,
        shards=build.view.tp,
        bias_shards=1,
        adapter="output",
        held=True,
        output=build.hidden("attention.output", hidden_size),
        forward_comm=forward,
        backward_comm=backward,
        workspace=workspace,
    )


def _gated(build: Builder, x: Tensor, context: Tensor, hidden_size: Size, gates: Size) -> Tensor:
    """The output of each head times the sigmoid of a number, made in float32, or of one for each channel."""
    view = build.view
    source, kept, reduced, workspace = build.enter("attention.gate_gather", x, hidden_size)
    score = build.linear(
        "attention.gate",
        source,
        view.tokens,
        hidden_size,
        gates,
        kept_input=kept,
        shards=view.tp,
        backward_comm=reduced,
        workspace=workspace,
    )
    tensor_of = build.tensor if same(gates * view.tokens, context.numel) else build.float32
    wide = tensor_of("attention.gate_sigmoid", score.numel)
    build.elementwise("attention.gate_sigmoid", (score,), wide, keeps=(wide,))
    copied = wide.itemsize != build.dtypes.activation
    opened = build.cast("attention.gate_cast", wide, build.dtypes.activation) if copied else wide
    product = build.tensor("attention.gated", context.numel)
    return build.elementwise("attention.gated", (context, opened), product, keeps=(context, opened))


def _over_latents(
    build: Builder, plain: Attention, spec: LatentAttention, query: Tensor, key: Tensor, value: Tensor, heads: Size
) -> Tensor:
    """Attention over a cache of latents, which all heads share: the matrix out of the latents is multiplied into queries and
    outputs (source: deepseek2024v2, section 2.1.2). That is as much work as `key_value_up` of the new tokens, which stands for it.
    """
    width = spec.kv_lora_rank + spec.qk_rope_head_dim
    absorbed = msgspec.structs.replace(plain, head_dim=width, num_key_value_heads=1)
    if spec.index_topk is not None:
        absorbed = msgspec.structs.replace(absorbed, sliding_window=spec.index_topk)
    return core(build, absorbed, query, key, value, heads, 1, spec.kv_lora_rank, width)


def _index(
    build: Builder, x: Tensor, query: Tensor, indexer: Indexer, spec: LatentAttention, hidden_size: Size
) -> None:
    """The scores by which tokens are chosen: relu(q k), weighted and summed over the indexer's heads (source: deepseek2025v32).

    Every rank makes all of them. Nothing of it has gradients, so its matrices have neither gradients nor optimizer states
    where PyTorch makes none for a parameter without them.
    """
    view, heads, width = build.view, indexer.num_heads, indexer.head_dim
    assert spec.q_lora_rank is not None
    pairs, keys = view.pairs, view.positions
    read: tuple[Tensor, ...] = ()
    if view.cached is not None:
        pairs, keys = view.tokens * view.cached.tokens, view.cached.tokens
        read = (Tensor("attention.index.cache", view.sequences * keys * width, view.cached.itemsize),)
    products = {
        "query": (spec.q_lora_rank, heads * width),
        "key": (hidden_size, width),
        "weights": (hidden_size, heads),
    }
    weights = [Weight(f"attention.index.{name}.weight", i * o, trainable=False) for name, (i, o) in products.items()]
    weights += [
        Weight(f"attention.index.norm.{name}", width, kind="vector", trainable=False) for name in ("weight", "bias")
    ]
    gemms = [Gemm(view.tokens, o, i) for i, o in products.values()]
    scores = scoring(build, keys, width, heads)
    scored, workspace = scores_of(build, pairs, heads)
    build.operations.append(
        Operation(
            "attention.index",
            "gemm",
            (x, query, *read),
            (scored,),
            tuple(weights),
            gemms=(*gemms, *scores),
            forward_flops=2 * pairs * heads * (width + 1) + sum(gemm.flops for gemm in gemms),
            workspace=workspace,
            gradients=False,
        )
    )


def scoring(build: Builder, keys: Size, width: Size, heads: Size) -> tuple[Gemm, ...]:
    """Return the products that score keys, which all heads share, for the queries of a view.

    >>> from loadgauge.core.definitions.model.kernels import Kernels
    >>> from loadgauge.core.layers.operations.rank_view import View
    >>> [sum(gemm.flops for gemm in scoring(Builder(View.of(4096, 1, kernels=Kernels(chooses=how))), 4096, 128, 64)) / 2**37
    ...  for how in ("written", "fused")]
    [2.015625, 1.0]
    """
    view = build.view
    if build.kernels.chooses == "written":
        return Gemm(view.positions, keys, width, heads * view.sequences), Gemm(1, keys, heads, view.tokens)
    # One kernel for all heads, which reads a key once and sums them as it goes, and leaves out what comes later.
    seen = 1 if view.cached is not None else 2
    return (Gemm(heads * view.positions / seen, keys, width, view.sequences),)


def scores_of(build: Builder, pairs: Size, heads: Size) -> tuple[Tensor, Size]:
    """Return the scores by which pairs are chosen, and the bytes beside them while they are made.

    >>> from loadgauge.core.definitions.model.kernels import Kernels
    >>> from loadgauge.core.layers.operations.rank_view import View
    >>> build = Builder(View.of(4096, 1))
    >>> scored, beside = scores_of(build, 4096 * 4096, 64)
    >>> scored.nbytes, beside
    (67108864, 8589934592)
    >>> served = Builder(View.of(4096, 1, kernels=Kernels(chooses="fused")))
    >>> scores_of(served, 4096 * 4096, 64)[1], scores_of(served, 10**12, 64)[0].nbytes
    (0, 536870912)
    """
    if build.kernels.chooses == "fused":
        return build.float32("attention.index", minimum(pairs, MOST_SCORES // 4)), 0
    # Of all heads at once, in float32: the scores, and what is left of them without the negative ones.
    return build.float32("attention.index", pairs), 2 * 4 * pairs * heads


def _query(build: Builder, x: Tensor, spec: LatentAttention, hidden_size: Size, heads: Size) -> Tensor:
    """Queries: through their latent where there is one, and the rotation of a part of each."""
    view, tokens = build.view, build.view.tokens
    width = heads * (spec.qk_nope_head_dim + spec.qk_rope_head_dim)
    rank = spec.q_lora_rank
    if rank is None:
        name, inner, latent = "attention.query", hidden_size, x
    else:
        name, inner, local = "attention.query_up", rank, build.local_tokens
        latent = build.linear("attention.query_down", x, local, hidden_size, rank, bias=spec.bias, adapter="query_down")
        latent = build.norm("attention.query_norm", latent, spec.norm, local, rank)
    source, kept, reduced, workspace = build.enter("attention.query_gather", latent, inner)
    query = build.linear(
        name,
        source,
        tokens,
        inner,
        width,
        kept_input=kept,
        shards=view.tp,
        adapter=name.rpartition(".")[2],
        backward_comm=reduced,
        workspace=workspace,
    )
    if not spec.rotary:
        return query
    rotated = Tensor("attention.rotary_q", tokens * heads * spec.qk_rope_head_dim, query.itemsize)
    build.elementwise("attention.rotary_q", (query,), rotated)
    joined = Tensor("attention.query_joined", tokens * width, query.itemsize)
    return build.elementwise("attention.query_joined", (query, rotated), joined)


def _key_and_value(
    build: Builder, x: Tensor, spec: LatentAttention, hidden_size: Size, heads: Size
) -> tuple[Tensor, Tensor]:
    """Keys and values from their latent; the rotated part of the keys comes beside it, one for all heads."""
    view, tokens, local, rank = build.view, build.view.tokens, build.local_tokens, spec.kv_lora_rank
    turning = spec.qk_rope_head_dim
    both = build.linear(
        "attention.key_value_down", x, local, hidden_size, rank + turning, bias=spec.bias, adapter="key_value_down"
    )
    latent, turned = (
        Tensor(f"attention.{name}", local * width, both.itemsize)
        for name, width in (("latent", rank), ("turned", turning))
    )
    build.operations.append(Operation("attention.latent", "view", (both,), (latent, turned)))
    pinned = view.kernels.views_pin_storage
    held = both if pinned or both.itemsize != build.dtypes.activation else None
    latent = build.norm("attention.key_value_norm", latent, spec.norm, local, rank, kept_input=held)
    source, kept, reduced, workspace = build.enter("attention.key_value_gather", latent, rank)
    up = build.linear(
        "attention.key_value_up",
        source,
        tokens,
        rank,
        heads * (spec.qk_nope_head_dim + spec.v_head_dim),
        kept_input=kept,
        shards=view.tp,
        adapter="key_value_up",
        backward_comm=reduced,
        workspace=workspace,
    )
    turned = _turn(build, turned, spec)
    key = Tensor("attention.key_joined", tokens * heads * (spec.qk_nope_head_dim + turning), up.itemsize)
    build.elementwise("attention.key_joined", (up, turned), key)
    if pinned and view.kernels.attention == "flash":
        # The values stay a view, and hold the part of the keys beside them.
        return key, up
    value = Tensor("attention.value", tokens * heads * spec.v_head_dim, up.itemsize)
    return key, build.elementwise("attention.value", (up,), value)


def _turn(build: Builder, turned: Tensor, spec: LatentAttention) -> Tensor:
    """The part of the keys that all heads share: gathered where ranks share the tokens, and rotated."""
    view = build.view
    numel = view.tokens * spec.qk_rope_head_dim
    full = build.dtypes.activation * numel
    backward: tuple[Collective, ...] = (Collective("all_reduce", "tp", full, view.tp),)
    if view.sequence_parallel:
        gathered = build.tensor("attention.turned_gather", numel)
        build.operations.append(
            Operation(
                "attention.turned_gather",
                "collective",
                (turned,),
                (gathered,),
                forward_comm=(Collective("all_gather", "tp", full, view.tp),),
                backward_comm=(Collective("reduce_scatter", "tp", full, view.tp),),
            )
        )
        turned, backward = gathered, ()
    # Without rotation this is a mere view, where the ranks' gradients still meet.
    kind: OperationKind = "elementwise" if spec.rotary else "view"
    output = build.tensor("attention.rotary_k", numel)
    build.operations.append(
        Operation(
            "attention.rotary_k", kind, (turned,), (output,), backward_comm=backward, shares_gradient=not spec.rotary
        )
    )
    return output
