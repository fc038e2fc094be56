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

from loadgauge.algebra import Size, shard
from loadgauge.layers.attention import core
from loadgauge.layers.builder import Builder
from loadgauge.layers.operations import Collective, Operation, OperationKind, Tensor
from loadgauge.spec.model import Attention, LatentAttention


def latent_attention(build: Builder, x: Tensor, spec: LatentAttention, hidden_size: Size) -> Tensor:
    """Adds the attention half of a block to the list; `x` is its (normed) input. Returns the output projection.

    Bytes kept by the core, FlashAttention: queries, keys, values, the output and one float32 a token and head.

    >>> from loadgauge.layers.rank_view import View
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
    plain = Attention(
        num_attention_heads=spec.num_attention_heads, num_key_value_heads=spec.num_attention_heads,
        head_dim=spec.qk_nope_head_dim + spec.qk_rope_head_dim, causal=spec.causal,
        # Joining the two parts of the queries leaves them head by head.
        sliding_window=spec.sliding_window, dropout=spec.dropout, heads_first=spec.rotary,
    )  # fmt: skip
    if build.view.cached is not None:
        context = _over_latents(build, plain, spec, query, key, value, heads)
    else:
        context = core(build, plain, query, key, value, heads, heads, spec.v_head_dim)
    forward, backward, workspace = build.leave(hidden_size)
    return build.linear(
        "attention.output", context, build.view.tokens, heads * spec.v_head_dim, hidden_size,
        bias=spec.bias, shards=build.view.tp, bias_shards=1, adapter="output", held=True,
        output=build.hidden("attention.output", hidden_size),
        forward_comm=forward, backward_comm=backward, workspace=workspace,
    )  # fmt: skip


def _over_latents(
    build: Builder, plain: Attention, spec: LatentAttention, query: Tensor, key: Tensor, value: Tensor, heads: Size
) -> Tensor:
    """Generation over a cache of latents, which all heads share: the matrix out of the latents is multiplied into queries and
    outputs (source: deepseek2024v2, section 2.1.2). That is as much work as `key_value_up` of the new token, which stands for it.
    """
    width = spec.kv_lora_rank + spec.qk_rope_head_dim
    absorbed = msgspec.structs.replace(plain, head_dim=width, num_key_value_heads=1)
    return core(build, absorbed, query, key, value, heads, 1, spec.kv_lora_rank, width)


def _query(build: Builder, x: Tensor, spec: LatentAttention, hidden_size: Size, heads: Size) -> Tensor:
    """Queries: through their latent where there is one, and the rotation of a part of each."""
    view, tokens = build.view, build.view.tokens
    width = heads * (spec.qk_nope_head_dim + spec.qk_rope_head_dim)
    rank = spec.q_lora_rank
    if rank is None:
        name, inner, latent = "attention.query", hidden_size, x
    else:
        name, inner, local = "attention.query_up", rank, build.local_tokens
        latent = build.linear("attention.query_down", x, local, hidden_size, rank, bias=spec.bias, adapter="query")
        latent = build.norm("attention.query_norm", latent, spec.norm, local, rank)
    source, kept, reduced, workspace = build.enter("attention.query_gather", latent, inner)
    query = build.linear(
        name, source, tokens, inner, width, kept_input=kept, shards=view.tp, adapter="query",
        backward_comm=reduced, workspace=workspace,
    )  # fmt: skip
    if not spec.rotary:
        return query
    rotated = build.tensor("attention.rotary_q", tokens * heads * spec.qk_rope_head_dim)
    build.elementwise("attention.rotary_q", (query,), rotated)
    joined = build.tensor("attention.query_joined", tokens * width)
    return build.elementwise("attention.query_joined", (query, rotated), joined)


def _key_and_value(
    build: Builder, x: Tensor, spec: LatentAttention, hidden_size: Size, heads: Size
) -> tuple[Tensor, Tensor]:
    """Keys and values from their latent; the rotated part of the keys comes beside it, one for all heads."""
    view, tokens, local, rank = build.view, build.view.tokens, build.local_tokens, spec.kv_lora_rank
    turning = spec.qk_rope_head_dim
    both = build.linear(
        "attention.key_value_down", x, local, hidden_size, rank + turning, bias=spec.bias, adapter="key"
    )
    latent, turned = build.tensor("attention.latent", local * rank), build.tensor("attention.turned", local * turning)
    build.operations.append(Operation("attention.latent", "view", (both,), (latent, turned)))
    pinned = view.kernels.views_pin_storage
    latent = build.norm("attention.key_value_norm", latent, spec.norm, local, rank, kept_input=both if pinned else None)
    source, kept, reduced, workspace = build.enter("attention.key_value_gather", latent, rank)
    up = build.linear(
        "attention.key_value_up", source, tokens, rank, heads * (spec.qk_nope_head_dim + spec.v_head_dim),
        kept_input=kept, shards=view.tp, adapter="value", backward_comm=reduced, workspace=workspace,
    )  # fmt: skip
    turned = _turn(build, turned, spec)
    key = build.tensor("attention.key_joined", tokens * heads * (spec.qk_nope_head_dim + turning))
    build.elementwise("attention.key_joined", (up, turned), key)
    if pinned and view.kernels.attention == "flash":
        # The values stay a view, and hold the part of the keys beside them.
        return key, up
    value = build.tensor("attention.value", tokens * heads * spec.v_head_dim)
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
                "attention.turned_gather", "collective", (turned,), (gathered,),
                forward_comm=(Collective("all_gather", "tp", full, view.tp),),
                backward_comm=(Collective("reduce_scatter", "tp", full, view.tp),),
            )
        )  # fmt: skip
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
