"""A mixture of experts: router, dispatch, the experts' matrices, combination, and the experts that all tokens share.

Legend: T tokens on this rank, h hidden size, E experts, K experts a token goes to, f width of one expert, e
expert-parallel ranks, t_e tensor-parallel ranks of one expert.

A rank sends its T K copies of tokens to the experts of all e ranks and gets, balanced, as many back; the t_e ranks of
an expert gather theirs, so each computes t_e T K rows of f / t_e channels (source: megatron-lm, all-to-all dispatcher).
T is a share of the tokens under sequence parallelism; without it, tensor-parallel ranks route the same tokens, each for
itself (Megatron refuses that).

Not counted: the probabilities that travel with the tokens (one number a row), the counts of rows that the ranks tell
each other, and dispatchers that send a token once to several experts of one rank (DeepEP).
"""

from __future__ import annotations

from typing import Any

import msgspec

from loadgauge.core.base.algebra import Size, maximum, minimum, same, shard, where
from loadgauge.core.definitions.model.model import Moe
from loadgauge.core.layers.adapters.adapters import adapted_experts, grouped_adapter
from loadgauge.core.layers.feed_forward.mlp import activate, gated, mlp, multiplied
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Collective, Gemm, Operation, Tensor, Weight

LOOPS = "looped", "modules"
"""Forms in which experts run one after another (`Kernels.experts`)."""
OFFSET_BYTES = 4
"""Of the row at which an expert's rows end: a 32-bit number, neglected where indices are."""


class Rows:
    """Copies of tokens that a rank sends (`own`), its busiest peer receives (`received`) and computes (`computed`), so many of them
    `at_once`.

    With a capacity, an expert takes at most so many times its fair share, and the rest is dropped.
    """

    def __init__(self, build: Builder, spec: Moe) -> None:
        fair = build.local_tokens * spec.computed_per_tok
        view = build.view
        if spec.capacity_factor is None:
            self.own, self.received = fair, fair * view.imbalance
        else:
            self.own = fair * minimum(1, spec.capacity_factor)
            self.received = fair * minimum(view.imbalance, spec.capacity_factor)
        self.computed = view.etp * self.received
        self.at_once = self.computed / spec.num_experts if build.kernels.experts in LOOPS else self.computed


def moe(build: Builder, x: Tensor, spec: Moe, hidden_size: Size, scored: Tensor | None = None) -> Tensor:
    """Adds the mixture to the list; `x` is its (normed) input, `scored` what the router reads where it is not `x`.

    Returns the sum over experts and shared experts.

    Forward FLOPs of one layer on one rank, in the words of the legend:

    >>> from loadgauge.core.layers.operations.rank_view import View
    >>> T, h, E, K, f = 512, 256, 8, 2, 384
    >>> build = Builder(View.of(T, 1))
    >>> _ = moe(build, build.tensor("x", T * h), Moe(num_experts=E, num_experts_per_tok=K, moe_intermediate_size=f), h)
    >>> build.layer("moe").forward_flops == 2 * T * h * E + 6 * T * K * h * f
    True
    """
    # Megatron, and Qwen's modules, which are those with a gate, run the shared experts first and hold what they keep to the end;
    # Megatron's gate is in them.
    fused = build.kernels.experts == "fused"
    first = spec.shared is not None and (spec.shared_gate or fused)
    shared = _shared(build, x, spec, hidden_size) if first else None
    if shared is not None and fused:
        shared = _gated(build, x, shared, spec, hidden_size)
    rows = Rows(build, spec)
    if spec.everywhere and build.kernels.written_mask and same(build.view.ep, 1):
        routed, shared = _everywhere(build, x, spec, hidden_size, rows)
    elif spec.latent_size is None:
        routed = _experts(build, x, *_route(build, scored or x, spec, hidden_size, rows), spec, hidden_size, rows)
    else:
        weights, order = _route(build, scored or x, spec, hidden_size, rows)
        local, latent, bias = build.local_tokens, spec.latent_size, spec.shared is not None and spec.shared.bias
        narrow = build.linear("mlp.latent_down", x, local, hidden_size, latent, bias=bias)
        from_experts = _experts(build, narrow, weights, order, spec, latent, rows)
        if spec.latent_norm is not None:
            from_experts = build.norm("mlp.latent_norm", from_experts, spec.latent_norm, local, latent)
        routed = build.linear("mlp.latent_up", from_experts, local, latent, hidden_size, bias=bias)
    if spec.shared is None:
        return routed
    if shared is None:
        shared = _shared(build, x, spec, hidden_size)
    elif not fused:
        shared = _gated(build, x, shared, spec, hidden_size)
    total = Tensor("mlp.total", routed.numel, routed.itemsize)
    return build.elementwise("mlp.total", (routed, shared), total, shares_gradient=True)


def _shared(build: Builder, x: Tensor, spec: Moe, hidden_size: Size) -> Tensor:
    """The MLP that every token passes through, sharded as any other."""
    assert spec.shared is not None
    return mlp(build, x, spec.shared, hidden_size, prefix="mlp.shared", held=True)


def _gated(build: Builder, x: Tensor, shared: Tensor, spec: Moe, hidden_size: Size) -> Tensor:
    """The shared experts' output, weighted by a gate of each token where they have one."""
    if not spec.shared_gate:
        return shared
    local = build.local_tokens
    score = build.linear("mlp.shared_gate", x, local, hidden_size, 1, exact=True, adapter="shared_gate")
    gate = build.tensor("mlp.shared_sigmoid", local)
    build.elementwise("mlp.shared_sigmoid", (score,), gate, keeps=(gate,))
    weighted = build.tensor("mlp.shared_weighted", shared.numel)
    return build.elementwise("mlp.shared_weighted", (gate, shared), weighted, keeps=(gate, shared))


# -- the router --------------------------------------------------------------------------------------------------------


def _route(build: Builder, x: Tensor, spec: Moe, hidden_size: Size, rows: Rows) -> tuple[Tensor, Tensor]:
    """Scores of all experts, the choice among them, and the order of the copies: (weight of each copy, the order)."""
    fused = build.kernels.experts == "fused"
    logits = _logits(build, x, spec, hidden_size)
    local, chosen_count = build.local_tokens, build.local_tokens * spec.num_experts_per_tok
    every, index = local * (spec.num_experts + spec.zero_experts), build.dtypes.index
    choice = Tensor("mlp.router_choice", chosen_count, index, "index")
    of_chosen = spec.router_score == "softmax_of_chosen"
    if of_chosen or (fused and spec.router_score == "softmax" and spec.norm_topk_prob):
        # The softmax over the chosen ones alone is the normalised softmax over all.
        itemsize = 4 if fused or spec.scores_float32 else logits.itemsize
        best = Tensor("mlp.router_topk", chosen_count, logits.itemsize)
        build.elementwise("mlp.router_topk", (logits,), best, keeps=(choice,))
        weights = Tensor("mlp.router_scores", chosen_count, itemsize)
        build.elementwise("mlp.router_scores", (best,), weights, keeps=(weights,))
    else:
        # A product that was meant to be in float32 is taken as it comes, which under autocast is in 16 bits.
        as_made = not spec.scores_float32 or (spec.router_score == "sigmoid" and spec.router_float32)
        itemsize = logits.itemsize if as_made and not fused else 4
        scores = Tensor("mlp.router_scores", every, itemsize)
        roots = (logits,) if spec.router_score == "sqrtsoftplus" else ()
        build.elementwise("mlp.router_scores", (logits,), scores, keeps=(scores, *roots))
        weights = Tensor("mlp.router_topk", chosen_count, itemsize)
        build.elementwise("mlp.router_topk", (scores,), weights, keeps=(choice,))
        if spec.norm_topk_prob:
            best, weights = weights, Tensor("mlp.router_normalised", chosen_count, itemsize)
            total = Tensor("mlp.router_sum", local, itemsize, "statistic")
            build.elementwise("mlp.router_normalised", (best,), weights, keeps=(best, total))
    if spec.own_norms:
        # Each expert has a scale, which multiplies the weight of its rows.
        scale = Weight("mlp.router.expert_scale", spec.num_experts, 1, "vector", build.trains("mlp.router"))
        chosen = Tensor("mlp.router_scale", chosen_count, build.dtypes.activation)
        scaled = Tensor("mlp.router_scaled", chosen_count, weights.itemsize)
        build.operations.append(
            Operation("mlp.router_scaled", "elementwise", (weights,), (scaled,), (scale,), keeps=(weights, chosen))
        )
        weights = scaled
    if build.kernels.router_aux_loss:
        scores = Tensor("mlp.router_aux_loss.scores", every, 4 if fused else logits.itemsize)
        build.elementwise("mlp.router_aux_loss", (logits,), build.float32("mlp.router_aux_loss", 1), keeps=(scores,))
    # Where each copy goes, and which of the flat weights is its own.
    # Of a loop, both numbers of a place in the choice.
    places = {**dict.fromkeys(LOOPS, 2), "batched": 0}.get(build.kernels.experts, 1)
    order = Tensor("mlp.order", rows.own, places * index, "index")
    each = 4 if fused or (spec.weights_float32 and weights.itemsize == 4) else build.dtypes.activation
    flat = Tensor("mlp.order.weights", rows.own, each)
    # Megatron sorts all T E places, takes the first T K and so keeps them all.
    indices = Tensor("mlp.order.place", every if fused else rows.own, index, "index")
    sorts = build.kernels.experts not in (*LOOPS, "batched")
    build.operations.append(
        Operation("mlp.order", "elementwise", (weights,), (flat, order), keeps=(indices,) if sorts else ())
    )
    return flat, order


def _logits(build: Builder, x: Tensor, spec: Moe, hidden_size: Size) -> Tensor:
    """The router's product, in float32 where the module asks for it; Megatron's own keeps its input as it came."""
    how = build.kernels.experts
    wide = how == "scattered" or (spec.router_float32 and how != "fused" and not build.autocast)
    experts = spec.num_experts + spec.zero_experts
    output = None
    if wide:
        output = build.float32("mlp.router", build.local_tokens * experts)
        if build.dtypes.activation != 4:
            x = build.elementwise("mlp.router_cast", (x,), build.float32("mlp.router_cast", x.numel))
            matrix = build.float32("mlp.router_matrix", experts * hidden_size)
            build.elementwise("mlp.router_matrix", (), matrix, keeps=(matrix,))
    logits = build.linear(
        "mlp.router",
        x,
        build.local_tokens,
        hidden_size,
        experts,
        bias=spec.router_bias,
        output=output,
        exact=True,
        operation="router",
    )
    if build.view.lora is not None and "router" in build.view.lora.targets:
        matrix_of = Weight("mlp.router.weight", experts * hidden_size)
        adapted_experts(build, "mlp.router", matrix_of, hidden_size, experts, build.operations[-1].inputs[:1])
    if spec.correction_bias:
        # A frozen parameter, moved by the balance of the experts and not by a gradient.
        frozen = Weight("mlp.router.correction_bias", experts, 1, "vector", trainable=False)
        build.operations.append(Operation("mlp.router_correction", "view", (), (), (frozen,)))
    return logits


# -- the experts -------------------------------------------------------------------------------------------------------


def _experts(
    build: Builder, x: Tensor, weights: Tensor, order: Tensor, spec: Moe, hidden_size: Size, rows: Rows
) -> Tensor:
    """Dispatch, the experts' MLPs, and the way back."""
    if build.kernels.experts in (*LOOPS, "batched"):
        return _unsorted(build, x, weights, order, spec, hidden_size, rows)
    view, fused = build.view, build.kernels.experts == "fused"
    # transformers' grouped product is not on autocast's list: it runs in the dtype of its weights.
    itemsize = x.itemsize if build.autocast and not fused else build.dtypes.activation
    local = build.local_tokens
    width = shard(spec.moe_intermediate_size, view.etp, "moe_intermediate_size")
    sent = itemsize * rows.received * hidden_size
    gathered = itemsize * rows.computed * hidden_size
    copies, tokens = (1, 0) if build.kernels.dispatch == "all_to_all" else (spec.num_experts_per_tok, rows.received)
    exchange = Collective("all_to_all", "ep", sent, view.ep, copies, tokens, spec.groups)
    # Tokens, and the gradients of what comes back, are sent as they are read where that is 8 bits; sums are in 16.
    low = build.kernels.products if build.kernels.dispatch == "quantised" else None
    outward = exchange if low is None else msgspec.structs.replace(exchange, nbytes=low.element * sent / itemsize)
    # One more copy of the rows, before or after they are exchanged, where they leave the rank at all.
    buffer = where(view.ep * view.etp > 1, gathered, 0)
    source = Tensor("mlp.dispatch", rows.computed * hidden_size, itemsize)
    build.operations.append(
        Operation(
            "mlp.dispatch",
            "collective",
            (x, order),
            (source,),
            keeps=(order,),
            forward_comm=(outward, Collective("all_gather", "etp", gathered, view.etp)),
            backward_comm=(Collective("reduce_scatter", "etp", gathered, view.etp), exchange),
            workspace=buffer,
        )
    )
    held = _held(build, spec, rows, source) if fused else None
    inner = _inner(build, source, weights, spec, hidden_size, width, rows)
    returned = (Collective("reduce_scatter", "etp", gathered, view.etp), exchange)
    returning = (outward, Collective("all_gather", "etp", gathered, view.etp))
    output = Tensor("mlp.down", rows.own * hidden_size, itemsize)
    product = Tensor("mlp.product", rows.computed * hidden_size, itemsize) if fused else output
    _grouped(
        build,
        "mlp.down",
        inner,
        spec,
        rows,
        width,
        hidden_size,
        product,
        bias_shards=view.ep,
        forward_comm=() if fused else returned,
        backward_comm=() if fused else returning,
        workspace=0 if fused else buffer,
    )
    combined = output
    if held is not None:
        if spec.expert_bias:
            product = _biased(build, product)
        # Sorted back, and exchanged; rows that came from several ranks for several experts were sorted before as well.
        among = 1 if build.kernels.dispatch == "all_to_all" else where(view.ep > 1, 0, 1)
        sorts = where(spec.num_experts > view.ep, 2, 0) * among
        combined = Tensor("mlp.return", output.numel, itemsize)
        build.operations.append(
            Operation(
                combined.name,
                "elementwise",
                (product,),
                (combined,),
                forward_comm=returned,
                backward_comm=returning,
                moves=(2 * sorts * gathered, 2 * sorts * gathered),
            )
        )
    elif build.kernels.experts == "scattered":
        # In float32, of which a copy is kept, and cast back before they are added to zeros.
        held = Tensor("mlp.returned", where(view.ep > 1, 2, 1) * output.numel, itemsize)
        build.operations.append(Operation(held.name, "view", (output,), (held,)))
        wide, zeros = build.cast("mlp.down_float32", output, 4), itemsize * local * hidden_size
        product = build.float32("mlp.weighted", output.numel)
        build.elementwise(
            product.name, (wide, weights), product, keeps=(wide, weights), backward_workspace=2 * product.nbytes
        )
        combined = build.cast("mlp.weighted_cast", product, itemsize)
        build.operations[-1] = msgspec.structs.replace(build.operations[-1], workspace=zeros)
    else:
        wide = maximum(itemsize, weights.itemsize)
        combined = Tensor("mlp.weighted", output.numel, wide)
        # Beside the gradient that comes in stands the product of which the weights' gradient is the sum, and, where
        # weights are wider than outputs, the gradient of the outputs before it is cast.
        products = 2 + where(wide > itemsize, 1, 0)
        build.elementwise(
            "mlp.weighted",
            (output, weights),
            combined,
            keeps=(output, weights),
            backward_workspace=products * combined.nbytes,
        )
        back = Tensor("mlp.order_back", rows.own, build.dtypes.index, "index")
        restored = Tensor("mlp.restore", output.numel, wide)
        # The bias of each row is still at hand.
        biases = gathered if spec.expert_bias else 0
        build.operations.append(
            Operation("mlp.restore", "elementwise", (combined,), (restored,), keeps=(back,), workspace=biases)
        )
        combined = restored
    # Rows are added to their tokens, or, grouped, summed as they lie, which autocast does in float32.
    exact = held is None and build.autocast
    summed = Tensor("mlp.combine", local * hidden_size, 4 if exact else itemsize)
    # What was dispatched has a name until the function returns.
    kept: dict[str, Any] = {"holds": (source,)} if held is None else {"keeps": (order,), "holds": (held,)}
    build.operations.append(Operation("mlp.combine", "elementwise", (combined,), (summed,), **kept))
    return build.cast("mlp.combined", summed, itemsize, (combined,)) if exact and itemsize != 4 else summed


def _unsorted(
    build: Builder, x: Tensor, weights: Tensor, order: Tensor, spec: Moe, hidden_size: Size, rows: Rows
) -> Tensor:
    """Experts without a grouped product: one after another, or with a copy of an expert's matrices for each row.

    Of a loop, operations and what they keep are those of one expert; all others' are kept beside them, but those of the expert that
    backward comes to first, which are gone when gradients of the matrices, made whole for each expert, are added to what is there
    (source: transformers 5.23, `integrations/moe.py` and the experts' own `forward`).
    """
    how, itemsize, experts = build.kernels.experts, build.dtypes.activation, spec.num_experts
    looped, slices = how in LOOPS, how == "looped"
    tokens = itemsize * build.local_tokens * hidden_size
    width, start = shard(spec.moe_intermediate_size, build.view.etp, "moe_intermediate_size"), len(build.operations)
    source = Tensor("mlp.dispatch", rows.at_once * hidden_size, itemsize)
    build.operations.append(Operation("mlp.dispatch", "elementwise", (x, order), (source,), keeps=(order,)))
    mask = Tensor(
        "mlp.mask", build.local_tokens * spec.num_experts_per_tok * (experts + 1), build.dtypes.index, "index"
    )
    if looped:
        build.operations.append(Operation(mask.name, "view", (order,), (mask,)))
    inner = _inner(build, source, weights, spec, hidden_size, width, rows)
    output = Tensor("mlp.down", rows.at_once * hidden_size, itemsize)
    _grouped(build, output.name, inner, spec, rows, width, hidden_size, output)
    for index, operation in enumerate(build.operations):
        if index > start and operation.gemms:
            matrices = 2 * sum(weight.numel for weight in operation.weights if weight.trainable)
            copies = Tensor(f"{operation.name}.copies", rows.computed * matrices / (2 * experts), itemsize)
            # The gradient of the copies is there before that of the matrices, which is counted with them.
            changes: dict[str, Any] = {
                "backward_workspace": copies.nbytes - matrices,
                "keeps": (*operation.keeps, copies),
            }
            if looped:
                changes = {"backward_workspace": (matrices * (1 + 1 / experts) if slices else 0) + 2 * tokens}
            build.operations[index] = msgspec.structs.replace(operation, **changes)
    wide = maximum(itemsize, weights.itemsize)
    weighted = Tensor("mlp.weighted", output.numel, wide)
    build.elementwise(
        weighted.name, (output, weights), weighted, keeps=(output, weights), backward_workspace=2 * weighted.nbytes
    )
    added = weighted
    if looped and not same(wide, itemsize):
        added = build.cast("mlp.weighted_cast", weighted, itemsize)
    summed = Tensor("mlp.combine", build.local_tokens * hidden_size, itemsize)
    held: dict[str, Any] = {"keeps": (added,), "holds": (mask, weighted)} if looped else {}
    build.operations.append(Operation(summed.name, "elementwise", (added,), (summed,), **held))
    if looped:
        own = {tensor.name: tensor.nbytes for each in build.operations[start:] for tensor in each.keeps}
        expert = sum(own.values()) - order.nbytes - weights.nbytes
        matrices = sum(weight.numel for each in build.operations[start:] for weight in each.weights if weight.trainable)
        for at, many in ((start, experts - 2), (-1, 1)):
            others = Tensor(f"{build.operations[at].name}.others", many * expert, 1)
            # Rows are read and written; backward adds to all tokens' gradients, and writes zeros for all of a slice's matrices and
            # adds those.
            rows_moved = 2 * itemsize * rows.at_once * hidden_size
            back = rows_moved + 4 * tokens + (4 * 2 * matrices if slices and at == start else 0)
            changed = {"keeps": (*build.operations[at].keeps, others), "moves": (rows_moved, back)}
            build.operations[at] = msgspec.structs.replace(build.operations[at], **changed)
        build.operations[start:] = [
            each if each.gemms else msgspec.structs.replace(each, calls=experts) for each in build.operations[start:]
        ]
    return summed


def _everywhere(build: Builder, x: Tensor, spec: Moe, hidden_size: Size, rows: Rows) -> tuple[Tensor, Tensor | None]:
    """Every token times its score of every expert, zero for those that it did not choose, through all experts in one batched
    product, and what the shared expert makes before the sum (source: transformers 5.23, `Llama4TextMoe`). Model FLOPs are those
    of the chosen experts."""
    logits = _logits(build, x, spec, hidden_size)
    local, experts, itemsize = build.local_tokens, spec.num_experts, logits.itemsize
    choice = Tensor("mlp.router_choice", local * spec.num_experts_per_tok, build.dtypes.index, "index")
    names = "mlp.router_topk", "mlp.router_scattered", "mlp.repeated", "mlp.dispatch"
    best = build.elementwise(names[0], (logits,), Tensor(names[0], choice.numel, itemsize), keeps=(choice,))
    every = build.elementwise(names[1], (best,), Tensor(names[1], local * experts, itemsize))
    scores = build.float32("mlp.router_scores", every.numel)
    build.elementwise(scores.name, (every,), scores, keeps=(scores,))
    column = build.elementwise("mlp.order", (scores,), Tensor("mlp.order.weights", every.numel, x.itemsize))
    repeated = build.elementwise(names[2], (x,), Tensor(names[2], every.numel * hidden_size, x.itemsize))
    both = repeated, column
    source = build.elementwise(names[3], both, Tensor(names[3], repeated.numel, x.itemsize), keeps=both)
    wide = x.itemsize != build.dtypes.activation  # autocast makes a narrow copy for the products
    sent = build.cast("mlp.dispatch_cast", source, build.dtypes.activation) if wide else source
    rows.computed = rows.at_once = local * experts
    width, start = shard(spec.moe_intermediate_size, build.view.etp, "moe_intermediate_size"), len(build.operations)
    inner = _inner(build, sent, column, spec, hidden_size, width, rows, batched=True)
    output = build.tensor("mlp.down", source.numel)
    _grouped(build, output.name, inner, spec, rows, width, hidden_size, output, batched=True)
    share = spec.num_experts_per_tok / experts
    build.operations[start:] = [
        msgspec.structs.replace(
            each,
            forward_flops=each.forward_flops * share,
            input_gradient_flops=each.input_gradient_flops * share,
            weight_gradient_flops=each.weight_gradient_flops * share,
        )
        if each.gemms
        else each
        for each in build.operations[start:]
    ]
    shared = None if spec.shared is None else _shared(build, x, spec, hidden_size)
    summed = build.tensor("mlp.combine", local * hidden_size)
    return build.elementwise(summed.name, (output,), summed, holds=(source,)), shared


def _held(build: Builder, spec: Moe, rows: Rows, source: Tensor) -> Tensor:
    """Rows that Megatron's layer refers to until it returns: as they were permuted, and, where they are sorted again, as they came
    from the other ranks (source: megatron-core 0.16, `MoELayer.forward` and its all-to-all dispatcher)."""
    sent = where(build.view.ep > 1, 1, 0) + where(spec.num_experts > build.view.ep, 1, 0)
    copies = sent if build.kernels.dispatch == "all_to_all" else 0
    held = Tensor("mlp.dispatched", copies * rows.received * (source.numel / rows.computed), source.itemsize)
    build.operations.append(Operation(held.name, "view", (source,), (held,)))
    return held


def _biased(build: Builder, product: Tensor) -> Tensor:
    """The bias of the last matrix, times the weight of each row, added expert by expert in the float32 of the weights and joined
    (source: megatron-lm, `TEGroupedMLP._apply_bias`)."""
    wide, narrow = 4 * product.numel, product.nbytes
    # Forward: the product, the sum, the sums joined, the cast. Backward: the cast, that of the gradient of each expert's rows
    # and their joining, and a product and its sum for the bias and for the weights.
    forward = wide + (narrow + 2 * wide) + 2 * wide + (wide + narrow)
    backward = (narrow + wide) + (wide + narrow) + 2 * narrow + 2 * 3 * wide
    output = Tensor("mlp.expert_bias", product.numel, product.itemsize)
    build.operations.append(
        Operation(
            output.name,
            "elementwise",
            (product,),
            (output,),
            workspace=2 * wide,
            backward_workspace=wide,
            moves=(forward, backward),
        )
    )
    return output


def _inner(
    build: Builder,
    source: Tensor,
    weights: Tensor,
    spec: Moe,
    hidden_size: Size,
    width: Size,
    rows: Rows,
    *,
    batched: bool = False,
) -> Tensor:
    """The first matrix of the experts (gate and up are one) and their activation."""
    numel, itemsize = rows.at_once * width, source.itemsize
    apart = spec.gated and not spec.activation.startswith("clamped") and build.view.lora is None
    if build.kernels.experts == "scattered" and apart:
        # Two products, the second after the activation of the first.
        gate, up = Tensor("mlp.gate", numel, itemsize), Tensor("mlp.up", numel, itemsize)
        _grouped(build, gate.name, source, spec, rows, hidden_size, width, gate)
        active = activate(build, "mlp.activation", gate, spec.activation)
        _grouped(build, up.name, source, spec, rows, hidden_size, width, up)
        return multiplied(build, active, up, "mlp")
    first = Tensor("mlp.gate_up", 2 * numel, itemsize) if spec.gated else Tensor("mlp.up", numel, itemsize)
    _grouped(
        build, first.name, source, spec, rows, hidden_size, 2 * width if spec.gated else width, first, batched=batched
    )
    if build.kernels.experts == "fused":
        # The activation multiplies by the weight of each row; it keeps its input and those weights only.
        held = build.float32("mlp.multiply.weights", rows.computed)
        output = Tensor("mlp.multiply", numel, itemsize)
        if not spec.gated:
            # There is no such kernel of a plain activation: PyTorch keeps what goes into either step.
            active = activate(build, "mlp.activation", first, spec.activation)
            return build.elementwise("mlp.multiply", (active, weights), output, keeps=(active, held))
        if spec.activation == "clamped_swiglu":
            # Halves are clamped apart and joined again before the kernel, which keeps what was joined.
            halves = [Tensor(f"mlp.{half}", numel, itemsize) for half in ("gate", "up")]
            build.operations.append(Operation("mlp.split", "view", (first,), tuple(halves)))
            limited = [Tensor(f"{half.name}_clamped", numel, itemsize) for half in halves]
            for half, clamped in zip(halves, limited, strict=True):
                build.elementwise(clamped.name, (half,), clamped, keeps=(half,))
            first = build.elementwise("mlp.clamped", tuple(limited), Tensor("mlp.clamped", first.numel, itemsize))
        return build.elementwise("mlp.multiply", (first, weights), output, keeps=(first, held))
    if not spec.gated:
        return activate(build, "mlp.activation", first, spec.activation)
    gate, up = Tensor("mlp.gate", numel, itemsize), Tensor("mlp.up", numel, itemsize)
    build.operations.append(Operation("mlp.split", "view", (first,), (gate, up)))
    return gated(build, gate, up, spec.activation)


def _grouped(
    build: Builder,
    name: str,
    source: Tensor,
    spec: Moe,
    rows: Rows,
    i: Size,
    o: Size,
    output: Tensor,
    *,
    bias_shards: Size | None = None,
    forward_comm: tuple[Collective, ...] = (),
    backward_comm: tuple[Collective, ...] = (),
    workspace: Size = 0,
    batched: bool = False,
) -> None:
    """One matrix of every expert on this rank, times the rows that came to it; keeps its input where it is trained. batched: as
    many came to each."""
    view, trainable, low = build.view, build.trains(name), build.low
    experts = shard(spec.num_experts, view.ep, "num_experts")
    shards = view.ep * view.etp
    grouped = build.kernels.experts in ("grouped", "scattered") and not batched
    stays = view.lora is not None and view.lora.experts_stay
    weights = [
        Weight(
            f"{name}.weight",
            experts * i * o,
            shards,
            "matrix",
            trainable,
            base=view.lora is not None and not stays,
            expert=True,
            quantised=low is not None,
            cast=not (grouped and build.autocast),
            shape=(o, i),
            copies=experts,
        )
    ]
    keeps = (source,) if trainable else ()
    if low is not None:
        if trainable and low.keeps:
            keeps = (build.quantised(source),)
        taken, produced = rows.computed * i, rows.computed * o
        workspace = workspace + low.inside(taken, produced, experts * i * o, trained=trainable, kept=low.keeps)
    if view.lora is not None and view.lora.stored is not None and not stays:
        workspace = workspace + build.dtypes.activation * experts * i * o
    if grouped:
        keeps = (*keeps, Tensor("mlp.offsets", experts, OFFSET_BYTES if build.dtypes.index else 0, "index"))
    if spec.expert_bias:
        of_bias = shards if bias_shards is None else bias_shards
        weights.append(Weight(f"{name}.bias", experts * o, of_bias, "vector", trainable, expert=True))
        if trainable and grouped:
            keeps = (*keeps, Tensor("mlp.expert_of_row", rows.computed, build.dtypes.index, "index"))
    flops = Gemm(rows.computed, o, i).flops
    reads: tuple[Tensor, ...] = (source,)
    adapted = view.lora is not None and f"experts.{name.rpartition('.')[2]}" in view.lora.targets
    if adapted and build.adapter.grouped:
        reads = (source, grouped_adapter(build, name, weights[0], rows.computed, source, i, o))
    elif adapted:
        reads = (source, adapted_experts(build, name, weights[0], i, o))
        keeps = (*reads, *keeps)
    build.operations.append(
        Operation(
            name,
            "gemm",
            reads,
            (output,),
            tuple(weights),
            keeps=keeps,
            gemms=(Gemm(rows.computed / experts, o, i, experts),),
            forward_flops=flops,
            input_gradient_flops=flops,
            weight_gradient_flops=flops if trainable or adapted else 0,
            forward_comm=forward_comm,
            backward_comm=backward_comm,
            workspace=workspace,
        )
    )
