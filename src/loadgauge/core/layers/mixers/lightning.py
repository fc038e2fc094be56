"""Lightning attention (MiniMax-Text-01): linear attention whose states fade at a fixed rate, in blocks of tokens.

Legend: T tokens, b sequences, l tokens of a block, a heads, d head width; q, k, v after their activation.

Four products a block and head (source: qin2024): q k^T, its product with v, q times the state, and k^T v. A
multiply-add is 2 FLOPs; all l^2 pairs of a block count, causal or not.

Kept for backward (`Kernels.recurrence`):
fused, an assumption read off the source of lightning-attention (`LightningAttention2`): q, k and v, head by head.
reference: what autograd keeps of transformers' PyTorch code (5.23); tests/core/oracle/test_hybrids.py counts it.
Tensor parallelism shards heads; what the norm over all heads sums up between the ranks, 4 bytes a token, is not counted.
"""

from __future__ import annotations

from typing import Any

import msgspec

from loadgauge.core.base.algebra import Size, ceil_div, maximum, minimum, shard
from loadgauge.core.definitions.model.model import LightningAttention
from loadgauge.core.layers.feed_forward.mlp import activate
from loadgauge.core.layers.mixers.convolution import chunk_pairs, whole_mixer
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Gemm, Operation, Tensor


def lightning_attention(build: Builder, x: Tensor, spec: LightningAttention, hidden_size: Size) -> Tensor:
    """Adds the mixer to the list; `x` is its (normed) input. Returns the output projection."""
    whole_mixer(build, "lightning attention", "lightning", heads=False)
    tokens, ranks = build.view.tokens, build.view.tp
    spec = msgspec.structs.replace(
        spec, num_attention_heads=shard(spec.num_attention_heads, ranks, "num_attention_heads")
    )
    width = spec.num_attention_heads * spec.head_dim
    source, kept, reduced, workspace = build.enter("lightning.gather", x, hidden_size)
    into: dict[str, Any] = {"kept_input": kept, "shards": ranks, "workspace": workspace}
    joint = build.linear("lightning.qkv", source, tokens, hidden_size, 3 * width, backward_comm=reduced, **into)
    active = activate(build, "lightning.activation", joint, spec.hidden_act)
    if build.kernels.recurrence == "reference":
        context = _reference(build, spec, active)
    else:
        context = _fused(build, spec, active)
    normed = build.norm("lightning.norm", context, spec.norm, tokens, width, shards=ranks)
    gate = build.linear("lightning.gate", source, tokens, hidden_size, width, **into)
    opened = build.tensor("lightning.sigmoid", gate.numel)
    build.elementwise("lightning.sigmoid", (gate,), opened, keeps=(opened,))
    output = build.tensor("lightning.gated", gate.numel)
    build.elementwise("lightning.gated", (opened, normed), output, keeps=(opened, normed))
    forward, backward, workspace = build.leave(hidden_size)
    return build.linear(
        "lightning.output",
        output,
        tokens,
        width,
        hidden_size,
        shards=ranks,
        output=build.hidden("lightning.output", hidden_size),
        forward_comm=forward,
        backward_comm=backward,
        workspace=workspace,
    )


def _fused(build: Builder, spec: LightningAttention, active: Tensor) -> Tensor:
    view, width = build.view, spec.num_attention_heads * spec.head_dim
    heads = tuple(build.tensor(f"lightning.{name}", view.tokens * width) for name in ("query", "key", "value"))
    build.operations.append(Operation("lightning.heads", "elementwise", (active,), heads))
    output = build.tensor("lightning.scan", view.tokens * width)
    block, head, blocks = spec.block_size, spec.head_dim, view.sequences * ceil_div(view.positions, spec.block_size)
    inside = 2 * chunk_pairs(view, block) * width
    state = 2 * view.tokens * width * head
    many = blocks * spec.num_attention_heads
    build.operations.append(
        Operation(
            "lightning.scan",
            "scan",
            heads,
            (output,),
            keeps=heads,
            gemms=(Gemm(block, block, head, many), Gemm(block, head, block, many), Gemm(block, head, head, 2 * many)),
            forward_flops=2 * inside + 2 * state,
            input_gradient_flops=4 * inside + 4 * state,
            # The scores and the states are made again.
            rerun_flops=inside + state,
        )
    )
    return output


def _reference(build: Builder, spec: LightningAttention, active: Tensor) -> Tensor:
    """transformers' loop over the blocks of a sequence; each product keeps its operands, copied head by head."""
    view, heads, head, block = build.view, spec.num_attention_heads, spec.head_dim, spec.block_size
    tokens, width = view.tokens, heads * spec.head_dim
    blocks = ceil_div(view.positions, block)
    last = view.positions - (blocks - 1) * block
    pairs = view.sequences * ((blocks - 1) * block * block + last * last)
    later = view.sequences * (view.positions - minimum(block, view.positions))  # tokens after the first block
    earlier = view.sequences * (blocks - 1) * block  # tokens before the last block, whose state nobody reads
    batch = view.sequences * blocks * heads

    def product(
        name: str, inputs: tuple[Tensor, ...], output: Tensor, gemm: Gemm, flops: Size, *keeps: tuple[str, Size]
    ) -> Tensor:
        kept = tuple(build.tensor(f"lightning.{each}", size) for each, size in keeps)
        build.operations.append(
            Operation(
                f"lightning.{name}",
                "gemm",
                inputs,
                (output,),
                keeps=kept,
                gemms=(gemm,),
                forward_flops=flops,
                input_gradient_flops=2 * flops,
            )
        )
        return output

    scores = product(
        "scores",
        (active,),
        build.tensor("lightning.scores", pairs * heads),
        Gemm(block, block, head, batch),
        2 * pairs * width,
        ("query", tokens * width),
        ("key", tokens * width),
    )
    inside = product(
        "inside",
        (scores, active),
        build.tensor("lightning.inside", tokens * width),
        Gemm(block, head, block, batch),
        2 * pairs * width,
        ("faded_scores", pairs * heads),
        ("value", tokens * width),
    )
    state = product(
        "write",
        (active,),
        build.tensor("lightning.write", batch * head * head),
        Gemm(head, head, block, batch),
        2 * tokens * width * head,
        ("faded_key", earlier * width),
        ("value_written", earlier * width),
    )
    rates = build.tensor("lightning.block_decay", heads * maximum(blocks - 2, 0))
    carried = build.elementwise(
        "lightning.carry", (state,), build.tensor("lightning.states", state.numel), keeps=(rates,)
    )
    across = product(
        "read",
        (active, carried),
        build.tensor("lightning.read", tokens * width),
        Gemm(block, head, head, batch),
        2 * tokens * width * head,
        ("states", batch * head * head),
        ("faded_query", later * width),
    )
    return build.elementwise("lightning.sum", (inside, across), build.tensor("lightning.sum", tokens * width))
