"""Embeddings, the head, and the loss.

Legend: T tokens, h hidden size, v vocabulary on this rank, t tensor-parallel ranks.
"""

from __future__ import annotations

import msgspec

from loadgauge.core.base import NotModelled, Size, ceil_div, minimum, next_power_of_two, same, shard, spread, where
from loadgauge.core.base.algebra import remembered
from loadgauge.core.definitions.model.lora import Lora
from loadgauge.core.definitions.model.model import (
    Attention,
    CompressedAttention,
    Head,
    LatentAttention,
    ModelSpec,
    Norm,
)
from loadgauge.core.layers.adapters.adapters import embedded, saved_copy
from loadgauge.core.layers.adapters.prompts import prompted
from loadgauge.core.layers.adapters.tuners import vera_matrices
from loadgauge.core.layers.feed_forward.gemma4 import per_layer_inputs
from loadgauge.core.layers.feed_forward.mlp import activate
from loadgauge.core.layers.logprobs import divergence, liger_logits, liger_logprobs, logprobs
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Collective, Gemm, Layer, Operation, Tensor, Weight
from loadgauge.core.layers.operations.rank_view import View, from_code
from loadgauge.core.layers.streams import banked, joined, split


def vocabulary(model: ModelSpec, view: View) -> Size:
    """Rows of the token table on one rank: padded to a multiple of `Kernels.vocabulary_multiple` x tp, then spread."""
    multiple = view.kernels.vocabulary_multiple
    if multiple == 1:
        return spread(model.vocab_size, view.tp)
    return ceil_div(model.vocab_size, multiple * view.tp) * multiple


@remembered(64)
def embedding_layer(model: ModelSpec, view: View) -> Layer:
    """The operations of the token, position and type embeddings, and of what follows them up to the first block."""
    if (captured := from_code(model, "embedding", view)) is not None:
        return captured  # type: ignore[no-any-return]
    build = Builder(view, trained=model.trained)
    hidden = model.hidden_size
    width = hidden if model.embedding_size is None else model.embedding_size
    indices = Tensor("input_ids", view.tokens, build.dtypes.index, "index")
    full = build.dtypes.activation * view.tokens * width
    summed = "reduce_scatter" if view.sequence_parallel else "all_reduce"
    trainable = build.trains("embedding.tokens")
    x = build.residual("embedding.tokens", width)
    whole = _table("embedding.tokens", vocabulary(model, view), width, view.tp, trainable)
    saved = saved_copy(view.lora, "embedding", whole)
    build.operations.append(
        Operation(
            "embedding.tokens",
            "lookup",
            (indices,),
            (x,),
            (whole, *saved, *_beside_table(view.lora, whole), *vera_matrices(build)),
            keeps=(indices,) if trainable or saved else (),
            forward_comm=(Collective(summed, "tp", full, view.tp),),
            backward_comm=(Collective("all_gather", "tp", full, view.tp),) if view.sequence_parallel else (),
        )
    )
    if view.lora is not None and "embedding" in view.lora.targets:
        x = embedded(build, x, vocabulary(model, view), width, indices)
    if view.lora is not None and view.lora.virtual:
        x = prompted(build, x, width)
    narrow = model.embedding_size is not None
    if narrow and not model.factorised_embedding:
        x, width = build.linear("embedding.project_in", x, build.local_tokens, width, hidden), hidden
    for name, rows, count in (
        ("positions", model.learned_positions, view.positions),
        ("types", model.token_types, view.tokens),
    ):
        if isinstance(rows, int) and not rows:
            continue
        chosen = Tensor(f"embedding.{name}.ids", count, build.dtypes.index, "index")
        table = build.residual(f"embedding.{name}", width)
        weight = _table(f"embedding.{name}", rows, width, 1, build.trains(f"embedding.{name}"))
        keeps = (chosen,) if weight.trainable else ()
        build.operations.append(Operation(f"embedding.{name}", "lookup", (chosen,), (table,), (weight,), keeps))
        x = build.add(f"embedding.{name}_sum", x, table)
    if model.embedding_norm is not None:
        x = build.norm("embedding.norm", x, model.embedding_norm, build.local_tokens, width)
    x = build.dropout("embedding.dropout", x, model.embedding_dropout)
    if not same(model.per_layer_vocab, 0):
        per_layer_inputs(build, x, model, indices)
    if narrow and model.factorised_embedding:
        build.linear("embedding.project_in", x, build.local_tokens, width, hidden, bias=True)
    if model.tower_layers:  # vectors of pictures and sounds take the place of some of its rows
        keeps = (x,) if view.input_gradients and not trainable else ()
        x = build.elementwise("embedding.placed", (x,), build.residual("embedding.placed", hidden), keeps)
    if not same(model.streams, 1):
        split(build, x, model)
    return build.layer("embedding")


def _table(name: str, rows: Size, width: Size, shards: Size, trainable: bool) -> Weight:
    return Weight(f"{name}.weight", rows * width, shards, "table", trainable, shape=(rows, width))


def _beside_table(lora: Lora | None, table: Weight) -> tuple[Weight, ...]:
    """Return the token table that was replaced, and the gradient of the new one, which stays, as frozen weights."""
    names = ("replaced", "gradient") if lora is not None and lora.replaced else ()
    return tuple(msgspec.structs.replace(table, name=f"{table.name}.{name}", trainable=False) for name in names)


def _rotated(mixer: object) -> Size | None:
    """Channels of each head that are rotated."""
    if isinstance(mixer, LatentAttention):
        return mixer.qk_rope_head_dim if mixer.rotary else None
    if isinstance(mixer, CompressedAttention):
        return mixer.rotary_dim / 2
    if not isinstance(mixer, Attention) or not mixer.rotary:
        return None
    return mixer.head_dim if mixer.rotary_dim is None else mixer.rotary_dim


def rotary_layer(model: ModelSpec, view: View) -> Layer:
    """Cosines and sines of every position: made once a forward on each stage, and kept by all its layers together."""
    build = Builder(view)
    own = [block.attention for block in model.blocks if block.tower is None]
    widths = [width for mixer in own if (width := _rotated(mixer)) is not None]
    if widths:
        size = model.rotary_tables * 2 * view.positions * widths[0]
        # transformers makes them in the dtype of the residual stream.
        tables = Tensor("rotary.tables", size, build.residual_itemsize)
        build.elementwise("rotary.tables", (), tables, keeps=(tables,))
    return build.layer("rotary")


def mask_bytes(model: ModelSpec, view: View) -> Size:
    """Bytes of the masks written out once a forward, which checkpointed layers hold (`Kernels.written_mask`): those that are added
    to scores, or of booleans for PyTorch's own kernel."""
    if (captured := from_code(model, "held", view)) is not None:
        return captured
    kernels, masked = view.kernels, Attention | LatentAttention | CompressedAttention
    eager = kernels.attention == "eager"
    seen = {
        (mixer.causal, mixer.sliding_window)
        for mixer in (block.attention for block in model.blocks if block.tower is None)
        if isinstance(mixer, masked) and (eager or kernels.masks or getattr(mixer, "masked", False))
    }
    itemsize = Builder(view).residual_itemsize if eager else 1
    pairs = len(seen - {(False, None)}) * view.pairs
    # That of a tower whose sounds are padded has a name until the model returns.
    towers = {block.tower.pairs for block in model.blocks if block.tower and getattr(block.attention, "masked", False)}
    return kernels.written_mask * itemsize * (pairs + view.sequences * sum(towers))


@remembered(64)
def prediction_layer(model: ModelSpec, view: View, *, holds_table: bool = False) -> Layer:
    """Return the operations that a multi-token prediction module has before its block (source: deepseek2024v3, equation 21).

    The next token's embedding, from the model's own table, and the hidden state each pass a norm; a matrix of 2h x h
    makes one of the two. `holds_table`: count that table here too, as a stage does which does not have the embedding.
    """
    build = Builder(view)
    hidden, rows, trainable = model.hidden_size, build.local_tokens, build.trains("prediction.tokens")
    if not same(model.streams, 1):
        raise NotModelled("multi-token prediction with several residual streams is not modelled")
    if model.embedding_size is not None:
        raise NotModelled("multi-token prediction with an embedding of another width is not modelled")
    norm = model.final_norm or Norm("rmsnorm")
    indices = Tensor("prediction.ids", view.tokens, build.dtypes.index, "index")
    embedded = build.residual("prediction.tokens", hidden)
    table = _table("prediction.tokens", vocabulary(model, view), hidden, view.tp, trainable)
    keeps = (indices,) if trainable else ()
    weights = (table,) if holds_table else ()
    build.operations.append(Operation("prediction.tokens", "lookup", (indices,), (embedded,), weights, keeps))
    token = build.norm("prediction.token_norm", embedded, norm, rows, hidden)
    state = build.norm("prediction.hidden_norm", build.residual("input", hidden), norm, rows, hidden)
    joined = build.elementwise("prediction.joined", (token, state), build.hidden("prediction.joined", 2 * hidden))
    source, kept, reduced, workspace = build.enter("prediction.gather", joined, 2 * hidden)
    full = build.dtypes.activation * view.tokens * hidden
    build.linear(
        "prediction.project",
        source,
        view.tokens,
        2 * hidden,
        shard(hidden, view.tp, "hidden_size"),
        kept_input=kept,
        shards=view.tp,
        backward_comm=reduced,
        workspace=workspace,
        output=build.hidden("prediction.project", hidden),
        forward_comm=(Collective("all_gather", "tp", full, view.tp),),
    )
    return build.layer("prediction")


@remembered(64)
def head_layer(
    model: ModelSpec, view: View, *, loss: bool = True, holds_table: bool = False, shared: bool = False
) -> Layer:
    """The final norm, the head's matrices and the loss.

    `holds_table`: count a tied table here too, as the last pipeline stage does, which keeps a copy of it.
    `shared`: the matrix is another head's, as in multi-token prediction.
    """
    if (captured := from_code(model, "head", view)) is not None:
        return captured  # type: ignore[no-any-return]
    build = Builder(view, trained=model.trained)
    hidden, head, rows = model.hidden_size, model.head, build.local_tokens
    build.widen()
    x = build.residual("input", model.stream_size)
    if model.blocks and model.blocks[-1].residual_in_fp32:
        x = build.float32("input", rows * hidden)
    if not same(model.streams, 1):
        x = joined(build, x, model)
    if bank := max((block.residual_bank for block in model.blocks), default=0):
        x = banked(build, "head", x, bank, hidden)
    if model.final_norm is not None:
        x = build.norm("head.norm", x, model.final_norm, rows, hidden)
    if x.itemsize > build.residual_itemsize:
        x = build.elementwise("head.cast", (x,), build.hidden("head.cast", hidden))
    if head.kind == "lm" and head.transform:
        inner = model.embedding_size if model.factorised_embedding and model.embedding_size is not None else hidden
        x = _transform(build, x, head, rows, hidden, inner)
    width = hidden if model.embedding_size is None else model.embedding_size
    if model.embedding_size is not None and not model.factorised_embedding:
        x = build.linear("head.project_out", x, rows, hidden, width)
    if head.kind == "lm":
        owned = not shared and (holds_table or not model.tie_word_embeddings)
        _logits(build, x, model, width, loss, owned)
    elif head.kind in ("pooler", "classifier"):
        width = hidden if model.factorised_embedding else width
        rows = rows if head.per_token else view.sequences
        read = x if head.per_token else build.tensor("head.first_token", rows * width)
        if head.transform:
            read = _transform(build, read, head, rows, width, width)
        if head.kind == "classifier":
            build.linear("head.classifier", read, rows, width, head.num_labels, bias=head.bias)
    return build.layer("head", reached=model.reached or view.input_gradients)


def _transform(build: Builder, x: Tensor, head: Head, rows: Size, width: Size, inner: Size) -> Tensor:
    """The dense layer, activation and norm before the last matrix."""
    x = build.linear("head.transform", x, rows, width, inner, bias=head.transform_bias)
    x = activate(build, "head.activation", x, head.activation)
    if head.transform_norm is not None:
        x = build.norm("head.transform_norm", x, head.transform_norm, rows, inner)
    return x


def _logits(build: Builder, x: Tensor, model: ModelSpec, width: Size, loss: bool, owned: bool) -> None:
    view, head = build.view, model.head
    columns = vocabulary(model, view)
    source, kept, reduced, workspace = build.enter("head.gather", x, width)
    chunked = loss and build.kernels.loss == "chunked"
    in_pieces = loss and build.kernels.loss in ("float32", "plain") and build.kernels.loss_pieces > 1
    parts = build.kernels.loss_chunks if chunked else build.kernels.loss_pieces if in_pieces else 1
    whole = view.tokens * columns
    if loss and build.kernels.loss == "tiled":
        if view.lora is not None and "head" in view.lora.targets:
            raise NotModelled("an adapter of the head under TRL's loss in tiles: --loss float32")
        _tiled(build, x, width, columns, owned, head.bias)
        return
    logits = build.tensor("head.logits", whole if parts == 1 else whole / parts)
    if loss and build.kernels.loss == "liger":
        chunked = True
        rows = next_power_of_two(ceil_div(view.tokens, ceil_div(columns, width)))
        some = liger_logits(build, columns) if build.kernels.logprobs else minimum(rows, view.tokens) * columns
        logits = build.tensor("head.logits", some)
    if view.lora is not None and "head" in view.lora.targets and chunked:
        raise NotModelled(f"an adapter of the head under the loss {build.kernels.loss}: its own is --loss float32")
    logits = build.linear(
        "head.logits",
        source,
        view.tokens,
        width,
        columns,
        bias=head.bias,
        kept_input=kept,
        shards=view.tp,
        kind="head",
        output=logits,
        weight=owned,
        backward_comm=reduced,
        workspace=workspace,
    )
    if build.kernels.gradient_placeholders and build.trains("head.logits") and not chunked:
        product = build.operations[-1]
        beside = build.dtypes.activation * width * columns + logits.nbytes
        build.operations[-1] = msgspec.structs.replace(product, backward_workspace=beside)
    if head.softcap:
        capped = build.tensor("head.softcap", logits.numel)
        logits = build.elementwise("head.softcap", (logits,), capped, keeps=() if chunked else (capped,))
    if loss:
        upcast = (head.loss_float32 or build.autocast) and build.kernels.loss != "plain"
        # Its softmax is told the dtype of the logits, and autocast makes a copy of that for the sum (ATen, `cross_entropy_loss`).
        copied = build.kernels.loss == "float32" and not head.loss_float32 and build.dtypes.activation != 4
        if copied and head.inner:
            name = "head.shifted"
            logits = build.elementwise(name, (logits,), build.tensor(name, logits.numel), holds=(logits,))
        if in_pieces:
            _sums_pieces(build, width * columns)
            _loss_in_pieces(build, logits, upcast)
            return
        if build.kernels.loss == "liger":
            read = (*build.operations[-1].weights, *build.operations[-1].borrows)
            trained = sum(weight.numel for weight in read if weight.trainable)
            if build.kernels.logprobs:
                liger_logprobs(build, logits, x, width, trained)
                return
            # Under autocast the gradient of the float32 matrix is float32, and that of the input as wide as it is.
            # Autocast copies it twice: it remembers copies of trained weights, and the logits read its transpose, which is none.
            wide = (4 + build.dtypes.activation) * trained if build.wide_weights else 0
            _liger_loss(build, logits, x, Tensor("head.input_gradient", view.tokens * width, x.itemsize), wide)
            return
        if build.kernels.diverges:
            divergence(build, logits, upcast)
            return
        if build.kernels.logprobs:
            logprobs(build, logits, upcast, Gemm(view.tokens, columns, width).flops)
            return
        _loss(build, logits, upcast and not copied, chunked, Gemm(view.tokens, columns, width).flops)
        if copied and build.autocast:
            last, wide = build.operations[-1], build.float32("head.log_softmax_float32", logits.numel)
            build.operations[-1:] = [
                Operation(wide.name, "elementwise", last.inputs[:1], (wide,)),
                msgspec.structs.replace(last, inputs=(wide, last.inputs[1]), keeps=(wide, *last.keeps)),
            ]


TILE_ROWS, TILE_COLUMNS = 4096, 32768


def _tiled(build: Builder, x: Tensor, width: Size, columns: Size, owned: bool, bias: bool) -> None:
    """Head and loss of TRL: logits in tiles of one buffer, made again in backward, where all gradients are summed in float32.

    The buffer has all its columns, however small the vocabulary is. Source: trl, `kernels/chunked_logprob.py` (1.16).
    """
    view, act = build.view, build.dtypes.activation
    rows = view.tokens - view.sequences  # the last token of a sequence predicts nothing
    tall = minimum(rows, TILE_ROWS)
    build.linear(
        "head.logits",
        x,
        rows,
        width,
        columns,
        bias=bias,
        shards=view.tp,
        kind="head",
        weight=owned,
        output=build.tensor("head.logits", tall * TILE_COLUMNS),
    )
    product = build.operations.pop()
    if build.operations and build.operations[-1].name == "head.logits.cast":
        build.operations.pop()  # it casts tile by tile
    hidden = Tensor("head.hidden", rows * width, x.itemsize)
    read = [weight for weight in product.weights if weight.kind == "head"]
    # Where the residual stream is float32, so is the head's matrix, and its rows are cast tile by tile.
    wide = act != 4 and (build.wide_weights or any(weight.wide for weight in read))
    trained = build.trains("head.logits") or any(weight.trainable for weight in read)
    casts = wide * act * minimum(columns, TILE_COLUMNS) * width + (x.itemsize != act) * act * tall * width
    narrow = 4 * ((x.itemsize != 4) * rows + (trained and not wide and act != 4) * columns) * width
    build.operations.append(
        msgspec.structs.replace(
            product,
            inputs=(x,),
            keeps=(hidden,),
            workspace=product.workspace + casts,
            backward_workspace=product.outputs[0].nbytes + narrow,
        )
    )
    build.operations.append(
        Operation(
            "head.loss", "loss", product.outputs, (build.float32("head.loss", 1),), rerun_flops=product.forward_flops
        )
    )


def _liger_loss(build: Builder, logits: Tensor, x: Tensor, input_gradient: Tensor, workspace: Size) -> None:
    """Liger's fused linear cross-entropy; `logits`: of one chunk. Forward keeps the gradient of its input, and that of the
    head's matrix, which is counted where backward hands it on, a moment later (source: liger,
    `ops/fused_linear_cross_entropy.py`: chunks of the next power of two above T / ceil(v / h) tokens). The caller's variable
    names its input `x`, of which autocast copies a chunk."""
    view = build.view
    reduction = Collective("all_reduce", "tp", 4 * view.tokens, view.tp)
    build.operations.append(
        Operation(
            "head.loss",
            "loss",
            (logits,),
            (build.float32("head.loss", 1),),
            keeps=(input_gradient,),
            holds=(x,),
            forward_comm=(reduction, reduction, reduction),
            overwrites=True,
            workspace=workspace,
        )
    )


def _sums_pieces(build: Builder, numel: Size) -> None:
    """Adds what the head's product makes in the backward of pieces; numel: elements of its matrix.

    Autograd runs the pieces' losses backward first, so that the gradients of all logits are there when the product's turn comes
    (of the first piece they are gone when the second one's are read). Each piece has a gradient of the whole matrix, which is
    added to the sum of those before it.
    """
    index, product = next((i, each) for i, each in enumerate(build.operations) if each.name == "head.logits")
    trained = any(weight.trainable for weight in (*product.weights, *product.borrows))
    waiting = (build.kernels.loss_pieces - 1) * product.outputs[0].nbytes
    another = build.dtypes.activation * numel if trained else 0
    build.operations[index] = msgspec.structs.replace(
        product, backward_workspace=product.backward_workspace + waiting + another
    )


def _loss_in_pieces(build: Builder, logits: Tensor, upcast: bool) -> None:
    """Cross-entropy piece by piece; `logits`: of one piece. Those of all pieces are made first, and are alive until the
    last piece is through (source: torchtune, `CEWithChunkedOutputLoss`; litgpt, `chunked_cross_entropy`)."""
    view, pieces = build.view, build.kernels.loss_pieces
    reduction = Collective("all_reduce", "tp", 4 * view.tokens, view.tp)
    held = build.kernels.holds_logits
    make = build.float32 if upcast or held else build.tensor
    probabilities = make("head.log_softmax", logits.numel * pieces)
    labels = Tensor("head.labels", view.tokens, build.dtypes.index, "index")
    others = build.tensor("head.logits_of_other_pieces", logits.numel * (pieces - 1))
    piece = probabilities.nbytes / pieces
    if build.kernels.compiled:
        # Compiled, a piece keeps its logits as they are, and takes the gradient from them (torchtune, `compile_loss`).
        build.operations.append(
            Operation(
                "head.loss",
                "loss",
                (logits,),
                (build.float32("head.loss", 1),),
                keeps=(logits, others, labels),
                forward_comm=(reduction, reduction, reduction),
            )
        )
        return
    build.operations.append(
        Operation(
            "head.loss",
            "loss",
            (logits,),
            (build.float32("head.loss", 1),),
            keeps=(probabilities, labels),
            forward_comm=(reduction, reduction, reduction),
            workspace=others.nbytes + (piece if upcast else 0),
            backward_workspace=2 * piece,
            overwrites=held,  # piece by piece, a copy's gradient takes the place of what it was made from
        )
    )


def _loss(build: Builder, logits: Tensor, upcast: bool, chunked: bool, logits_flops: Size) -> None:
    """Cross-entropy. Over tensor-parallel ranks, maximum, target's logit and sum are reduced, 4 bytes each.

    The logits are dropped once they are read; a loop that holds the model's outputs through backward keeps them too.
    """
    view = build.view
    reduction = Collective("all_reduce", "tp", 4 * view.tokens, view.tp)
    reduced = (reduction, reduction, reduction)
    value = build.float32("head.loss", 1)
    labels = Tensor("head.labels", view.tokens, build.dtypes.index, "index")
    probabilities = build.float32("head.log_softmax", logits.numel)
    if build.kernels.loss in ("inplace", "jit"):
        # The float32 copy becomes the probabilities in place, and the gradient in place again; the fused form makes the
        # probabilities beside the copy.
        second = probabilities.nbytes if build.kernels.loss == "jit" else 0
        if logits.itemsize == 4 and not second:
            # There is no copy: the logits become the probabilities.
            build.operations.append(
                Operation(
                    "head.log_softmax",
                    "loss",
                    (logits,),
                    (value,),
                    keeps=(logits,),
                    forward_comm=reduced,
                    overwrites=True,
                )
            )
            return
        build.operations.append(
            Operation(
                "head.log_softmax",
                "loss",
                (logits,),
                (value,),
                keeps=(probabilities,),
                forward_comm=reduced,
                workspace=second,
            )
        )
        return
    if build.kernels.loss in ("fused", "compiled"):
        statistic = Tensor("head.lse", view.tokens, build.dtypes.softmax_statistic, "statistic")
        overwrites = build.kernels.loss == "fused"
        build.operations.append(
            Operation(
                "head.loss",
                "loss",
                (logits,),
                (value,),
                keeps=(logits,) if overwrites else (logits, statistic),
                forward_comm=reduced,
                overwrites=overwrites,
            )
        )
        return
    upcast = upcast and build.dtypes.activation != 4
    source = build.float32("head.float32", logits.numel) if upcast else logits
    if chunked:
        # Logits, loss and their gradients live for one chunk at a time, and are computed again for the gradient.
        build.operations.append(
            Operation(
                "head.loss",
                "loss",
                (logits,),
                (value,),
                forward_comm=reduced,
                rerun_flops=logits_flops,
                workspace=3 * probabilities.nbytes,
            )
        )
        return
    if upcast:
        build.elementwise("head.float32", (logits,), source, keeps=(logits,) if build.kernels.holds_logits else ())
    else:
        probabilities = build.tensor("head.log_softmax", logits.numel)
    # Over tensor-parallel ranks both passes make one more copy: shifted logits and their exponentials, and in backward the
    # exponentials, the gradient and their sum (pytorch, distributed/tensor/parallel/loss.py).
    more = where(view.tp > 1, probabilities.nbytes, 0)
    build.operations.append(
        Operation(
            "head.log_softmax",
            "loss",
            (source,),
            (probabilities,),
            keeps=(probabilities,),
            forward_comm=reduced,
            workspace=more,
            backward_workspace=more,
        )
    )
    build.operations.append(Operation("head.loss", "loss", (probabilities, labels), (value,), keeps=(labels,)))
