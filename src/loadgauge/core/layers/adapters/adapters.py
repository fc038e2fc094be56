"""LoRA beside a frozen linear layer: the low-rank products, and the copies that the libraries make around them.

Legend: T rows, i and o the width of the matrix's input and output, r the rank.

PEFT's modules cast and copy (source: peft, `tuners/lora/layer.py` and `bnb.py`, 0.12 to 0.21): a float32 adapter beside a
16-bit matrix reads a float32 copy of its input, which under autocast becomes a 16-bit one again, the adapter's own; without
autocast it is kept as it is, 4 T i bytes a target. bitsandbytes' 4-bit layer keeps no input, casts it to the compute dtype
and its result back to the dtype the input had (`nn/modules.py`, 0.43 to 0.50), so that float32 goes in and out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from loadgauge.core.base.algebra import Size, maximum, minimum, shard
from loadgauge.core.definitions.model.lora import Lora
from loadgauge.core.layers.operations.operations import Gemm, Operation, Tensor, Weight
from loadgauge.core.layers.operations.writer import Writer


class AdapterShape(NamedTuple):
    """Sizes of an adapted matrix: rows T, input i, output o, and the ranks that its `shards` lie on; whether it has a bias."""

    rows: Size
    i: Size
    o: Size
    shards: Size
    bias: bool = False


def adapted(build: Writer, name: str, x: Tensor, kept: Tensor, base: Tensor, shape: AdapterShape) -> Tensor:
    """Add the two low-rank products in the dtype of the activations, and their sum with the frozen layer's result.

    kept: what stands for `x` from forward to backward (with sequence parallelism its shard)
    """
    lora = build.adapter
    source = x
    if lora.dropout:
        source = kept = build.dropout(f"{name}.lora_dropout", x, lora.dropout)
    itemsize = build.dtypes.activation
    # The head's logits may be there in pieces; of a split row each rank has a summand of the whole output before it is shared out.
    pieces = base.numel if name == "head.logits" else None
    high = _products(build, name, source, (kept,), itemsize, shape, numel=pieces)
    total = build.tensor(f"{name}.adapted", base.numel)
    return build.elementwise(f"{name}.adapted", (base, high), total, shares_gradient=True)


JOINT = ("query", "key", "value", "qkv")
"""Matrices that are one in LitGPT, with adapters of the parts that have one."""


def joint_adapted(build: Writer, x: Tensor, kept: Tensor, parts: dict[str, Tensor], i: Size, shards: Size) -> Tensor:
    """Add LitGPT's adapters of queries, keys and values, and their sum with the frozen results, one tensor of all three.

    The parts' rows are joined; where a part has no adapter they are copied into zeros, and what was copied is kept with its
    column numbers (source: litgpt, `lora.py`, `LoRAQKVLinear`).
    parts: the frozen matrices' results, of each part or of `qkv`, with what is adapted of them by `Lora.targets`
    """
    lora, name = build.adapter, "attention.qkv"
    some = {part: result.numel for part, result in parts.items() if part in lora.targets}
    base = Tensor(name, sum(result.numel for result in parts.values()), build.dtypes.activation)
    rows, source = build.view.tokens, x
    if lora.dropout:
        source = kept = build.dropout(f"{name}.lora_dropout", x, lora.dropout)
    shape = AdapterShape(rows, i, shard(sum(some.values()), rows), shards)
    high = _products(build, name, source, (kept,), base.itemsize, shape, len(some))
    if len(some) < len(parts):
        columns = Tensor(f"{name}.lora_columns", shape.o, 8, "index")
        padded = Tensor(f"{name}.lora_padded", base.numel, base.itemsize)
        high = build.elementwise(padded.name, (high,), padded, keeps=(high, columns))
    scaled = build.elementwise(f"{name}.lora_scaled", (high,), Tensor(f"{name}.lora_scaled", base.numel, base.itemsize))
    total = Tensor(f"{name}.adapted", base.numel, base.itemsize)
    return build.elementwise(total.name, (*parts.values(), scaled), total, shares_gradient=True)


def peft_adapted(
    build: Writer, name: str, x: Tensor, base: Tensor, shape: AdapterShape, around: tuple[Tensor, ...]
) -> Tensor:
    """Add PEFT's `lora_B(lora_A(dropout(x))) * scaling`, with its casts, and the sum with the frozen layer's result.

    around: tensors that the module around the layer holds until it returns
    """
    lora, narrow = build.adapter, build.dtypes.activation
    own = lora.read(narrow)
    source = x
    if x.itemsize != own and not (lora.casts and (lora.stored is not None or x.itemsize > own)):
        source = build.cast(f"{name}.lora_cast", x, own)
    read = (*around, x, source)
    if lora.dropout:
        source = build.dropout(f"{name}.lora_dropout", source, lora.dropout)
    inner = narrow if lora.casts else own
    adapter_input = source
    if lora.casts and source.itemsize != narrow:
        source = build.cast(f"{name}.lora_autocast", source, narrow)
    if lora.dora:
        scaled = _dora(
            build, name, adapter_input if lora.stored is None else x, source, base, shape, bool(lora.dropout)
        )
        return _summed(build, name, x, base, scaled, read)
    high = _products(build, name, source, (source,), inner, shape)
    scaled = Tensor(f"{name}.lora_scaled", high.numel, inner)
    build.elementwise(scaled.name, (high,), scaled, moves=(high.nbytes + scaled.nbytes,) * 2)
    if lora.stored is not None and not lora.casts and inner != base.itemsize:
        scaled = build.cast(f"{name}.lora_result", scaled, base.itemsize)
    return _summed(build, name, x, base, scaled, read)


def _summed(build: Writer, name: str, x: Tensor, base: Tensor, scaled: Tensor, held: tuple[Tensor, ...]) -> Tensor:
    """The sum of the frozen layer's result and the adapter's, in the dtype of the former; `held`: until it is there."""
    wider = max(scaled.itemsize, base.itemsize)
    total = Tensor(f"{name}.adapted", base.numel, wider)
    # Backward casts the gradient for the narrower term, and adds up what comes to `x` from the matrix and the adapter.
    narrowed = total.nbytes + minimum(scaled.nbytes, base.nbytes) if scaled.itemsize != base.itemsize else 0
    moves = (base.nbytes + scaled.nbytes + total.nbytes, narrowed + 3 * x.nbytes)
    total = build.elementwise(total.name, (base, scaled), total, shares_gradient=True, holds=held, moves=moves)
    return total if wider == base.itemsize else build.cast(f"{name}.narrowed", total, base.itemsize)


def embedded(build: Writer, x: Tensor, rows: Size, width: Size, indices: Tensor) -> Tensor:
    """Add the adapter of the token table: rows of one matrix, times another (source: peft, `Embedding` of `tuners/lora/layer.py`).

    rows: of the table; width: of its rows; indices: the tokens, which are kept
    """
    lora, narrow, name = build.adapter, build.dtypes.activation, "embedding.tokens"
    own, tokens = lora.held(narrow), build.local_tokens
    wide = own == 4 and narrow != 4
    low = Tensor(f"{name}.lora_a", tokens * lora.rank, own)
    table = Weight(f"{name}.lora_a.weight", rows * lora.rank, 1, "matrix", wide=wide, shape=(lora.rank, rows))
    build.operations.append(Operation(low.name, "lookup", (indices,), (low,), (table,), keeps=(indices,)))
    inner = narrow if lora.autocast else own
    source = low if inner == own else build.cast(f"{name}.lora_autocast", low, inner)
    second = Weight(f"{name}.lora_b.weight", lora.rank * width, 1, wide=wide, shape=(width, lora.rank))
    keeps = (source, Tensor(f"{second.name}.cast", second.numel, inner)) if inner != own else (source,)
    high, gemm = Tensor(f"{name}.lora_b", tokens * width, inner), Gemm(tokens, width, lora.rank)
    build.operations.append(
        Operation(
            high.name,
            "gemm",
            (source,),
            (high,),
            (second,),
            keeps=keeps,
            gemms=(gemm,),
            forward_flops=gemm.flops,
            input_gradient_flops=gemm.flops,
            weight_gradient_flops=gemm.flops,
        )
    )
    scaled = Tensor(f"{name}.lora_scaled", high.numel, inner)
    build.elementwise(scaled.name, (high,), scaled, moves=(2 * high.nbytes, 2 * high.nbytes))
    total = Tensor(f"{name}.adapted", x.numel, maximum(x.itemsize, inner))
    moves = (x.nbytes + scaled.nbytes + total.nbytes, 0)
    total = build.elementwise(total.name, (x, scaled), total, shares_gradient=True, moves=moves)
    return total if total.itemsize == x.itemsize else build.cast(f"{name}.narrowed", total, x.itemsize)


def adapted_experts(
    build: Writer, name: str, matrix: Weight, i: Size, o: Size, read: tuple[Tensor, ...] = ()
) -> Tensor:
    """Add what PEFT makes of the matrices of all experts, of `i` columns and `o` rows: a copy of all with the adapters' products
    added, which the grouped product reads and keeps (source: peft 0.21, `ParamWrapper` and its `baddbmm`).

    read: kept with the copy for the product of both, which is another operation's
    """
    lora, narrow = build.adapter, build.dtypes.activation
    experts, own = matrix.copies, lora.held(narrow)
    rank = lora.rank * (2 if lora.parts_in_one and name.endswith("gate_up") else 1)
    wide = own == 4 and narrow != 4
    # The sum is made outside autocast, in the dtype of the matrix.
    inner = 4 if lora.upcast == "all" and not matrix.base else narrow
    weights = tuple(
        Weight(
            f"{name}.{part}.weight", experts * rank * size, matrix.shards, wide=wide, expert=matrix.expert, shape=shape
        )
        for part, size, shape in (("lora_a", i, (experts * rank, i)), ("lora_b", o, (o, experts * rank)))
    )
    keeps = tuple(Tensor(f"{weight.name}.cast", weight.numel, inner) for weight in weights) if own != inner else ()
    whole = Tensor(f"{name}.adapted_weight", matrix.numel, inner)
    keeps = (*keeps, *read, whole) if read else keeps
    gemm = Gemm(o, i, rank, experts)
    build.operations.append(
        Operation(
            whole.name,
            "gemm",
            (),
            (whole,),
            weights,
            keeps=keeps,
            gemms=(gemm,),
            forward_flops=gemm.flops,
            weight_gradient_flops=2 * gemm.flops,
        )
    )
    return whole


def grouped_adapter(build: Writer, name: str, matrix: Weight, rows: Size, source: Tensor, i: Size, o: Size) -> Tensor:
    """Add the two grouped products of all experts' adapters as Unsloth runs them, without a copy of the experts' matrices
    (unsloth_zoo 2026.10: `temporary_patches/moe_utils.py`, `_apply_lora_grouped_mm`); returns what they add to the output."""
    lora, narrow, experts, into = build.adapter, build.dtypes.activation, matrix.copies, source
    wide = lora.held(narrow) == 4 and narrow != 4
    for part, n, k in (("lora_a", lora.rank, i), ("lora_b", o, lora.rank)):
        weight = Weight(
            f"{name}.{part}.weight",
            experts * n * k,
            matrix.shards,
            wide=wide,
            expert=matrix.expert,
            shape=(experts * n, k),
        )
        out, gemm = Tensor(f"{name}.{part}", rows * n, source.itemsize), Gemm(rows / experts, n, k, experts)
        cast = (Tensor(f"{weight.name}.cast", weight.numel, narrow),) if wide else ()
        build.operations.append(
            Operation(
                out.name,
                "gemm",
                (into,),
                (out,),
                (weight,),
                keeps=(into, *cast),
                gemms=(gemm,),
                forward_flops=gemm.flops,
                input_gradient_flops=gemm.flops,
                weight_gradient_flops=gemm.flops,
            )
        )
        into = out
    return into


def fused_adapter(build: Writer, name: str, x: Tensor, shape: AdapterShape, target: str) -> Tensor:
    """Add the two products as Unsloth's functions run them; returns what stands for their sum, which is added to the frozen
    layer's result in place and has no bytes of its own.

    Backward makes the first product again, and what goes into the MLP's last matrix (`kernels/fast_lora.py`, 2026.10).
    """
    lora = build.adapter
    rows, i, o, shards, _ = shape
    low, itemsize = Tensor(f"{name}.lora_a", rows * lora.rank, x.itemsize), build.dtypes.activation
    wide = lora.held(itemsize) == 4 and itemsize != 4
    kept = () if target == "down" else (x,)
    if lora.dropout:
        kept = (*kept, build.mask(f"{name}.lora_dropout.mask", x.numel))
    column, added = target not in ("output", "down"), Tensor(f"{name}.lora_b", 0, x.itemsize)
    for part, into, out, keeps, gemm, split in (
        ("lora_a", (x,), (low,), kept, Gemm(rows, lora.rank, i), 1 if column else shards),
        ("lora_b", (low,), (added,), (), Gemm(rows, o, lora.rank), shards if column else 1),
    ):
        weight = Weight(f"{name}.{part}.weight", gemm.n * gemm.k, split, wide=wide, shape=(gemm.n, gemm.k))
        build.operations.append(
            Operation(
                f"{name}.{part}",
                "gemm",
                into,
                out,
                (weight,),
                keeps=keeps,
                gemms=(gemm,),
                forward_flops=gemm.flops,
                input_gradient_flops=gemm.flops,
                weight_gradient_flops=gemm.flops,
                rerun_flops=gemm.flops if part == "lora_a" else 0,
            )
        )
    return added


def quantised_result(
    build: Writer, name: str, out: Tensor, adapter_input: Tensor, read: Tensor, *, copied: bool
) -> Tensor:
    """Return the result of a quantised layer in the dtype that its input had.

    given, read: its input, and the copy of it in the compute dtype; copied: PEFT clones the result before it adds the adapter's
    """
    if out.itemsize != adapter_input.itemsize:
        out = build.cast(f"{name}.as_input", out, adapter_input.itemsize, holds=(adapter_input, read))
    if copied:
        clone = Tensor(f"{name}.cloned", out.numel, out.itemsize)
        # Its gradient is handed on as it is.
        out = build.elementwise(clone.name, (out,), clone, shares_gradient=True, moves=(2 * out.nbytes, 0))
    return out


def saved_copy(lora: Lora | None, kind: str, weight: Weight) -> tuple[Weight, ...]:
    """Return the trained copy of an embedding or a head that PEFT's `modules_to_save` puts beside the frozen one.

    kind: `embedding` or `head`. The copy has the dtype of the original.
    """
    if lora is None or kind not in lora.saved:
        return ()
    name, wide = f"{weight.name}.trained", lora.upcast == "all"
    return (msgspec.structs.replace(weight, name=name, trainable=True, wide=wide),)


def as_stored(lora: Lora | None, operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Return the operations, those frozen weights marked that the preparation for training casts to float32.

    `all`: whatever is not quantised (PEFT's `prepare_model_for_kbit_training`); `norms`: vectors only.
    """
    if lora is None or lora.upcast == "none":
        return tuple(operations)

    def stored(weight: Weight) -> Weight:
        upcast = not (weight.trainable or weight.base) and (lora.upcast == "all" or weight.kind == "vector")
        return msgspec.structs.replace(weight, wide=True) if upcast else weight

    return tuple(
        msgspec.structs.replace(operation, weights=tuple(map(stored, operation.weights)))
        if operation.weights
        else operation
        for operation in operations
    )


def passed_by(build: Writer, name: str, written: int) -> None:
    """Leave of an adapter's operations, from the `written`th on, the weights, which nothing runs: only a penalty (AdaLoRA's) makes
    gradients of them.
    """
    own = build.operations[written:]
    del build.operations[written:]
    of_penalty = tuple(t for operation in own for t in operation.keeps if t.name.endswith((".penalty", ".difference")))
    weights = tuple(
        msgspec.structs.replace(weight, cast=False, unread=not of_penalty)
        for operation in own
        for weight in operation.weights
    )
    build.operations.append(Operation(f"{name}.lora_a", "view", (), (), weights, keeps=of_penalty))


def _products(
    build: Writer,
    name: str,
    source: Tensor,
    kept: tuple[Tensor, ...],
    itemsize: Size,
    shape: AdapterShape,
    groups: int = 1,
    numel: Size | None = None,
) -> Tensor:
    """The two products; autocast keeps its 16-bit copy of each float32 matrix for the gradient of what went in.

    groups: how many adapters lie in one, of which each has a part of the output
    numel: elements of the result that are there at a time, where it is in pieces
    """
    lora = build.adapter
    rank, (rows, i, o, shards, _) = lora.rank * groups, shape
    low, high = (
        Tensor(f"{name}.lora_a", rows * rank, itemsize),
        Tensor(f"{name}.lora_b", rows * o if numel is None else numel, itemsize),
    )
    # Of the two, the one on the sharded side of the base is sharded with it.
    column = name.rsplit(".", 1)[-1] not in ("output", "down")
    wide = lora.held(build.dtypes.activation) == 4 and build.dtypes.activation != 4
    for part, inputs, output, keeps, gemm, split in (
        ("lora_a", source, low, kept, Gemm(rows, rank, i), 1 if column else shards),
        ("lora_b", low, high, (low,), Gemm(rows, o, lora.rank), shards if column else 1),
    ):
        copied = wide and lora.casts
        weight = Weight(
            f"{name}.{part}.weight", gemm.n * gemm.k, split, wide=wide, shape=(gemm.n, gemm.k), cast=not copied
        )
        if copied:
            keeps = (*keeps, build.tensor(f"{weight.name}.cast", weight.numel))
        build.operations.append(
            Operation(
                f"{name}.{part}",
                "gemm",
                (inputs,),
                (output,),
                (weight,),
                keeps=keeps,
                gemms=(gemm,),
                forward_flops=gemm.flops,
                input_gradient_flops=gemm.flops,
                weight_gradient_flops=gemm.flops,
            )
        )
    return high


def _dora(
    build: Writer, name: str, x: Tensor, source: Tensor, base: Tensor, shape: AdapterShape, dropped: bool
) -> Tensor:
    """DoRA's `(m - 1) * base + m * high`, m the trained magnitude over the norm of W + BA (source: liu2024dora).

    The norm is made from the whole matrices: the product of the adapter with the identity and the frozen matrix in the dtype
    of the input, which are there until all is done, the scaled product, and their sum. Behind dropout the frozen matrix is
    multiplied once more, with what was dropped; else a bias is taken off its result, in a tensor of its own (source: peft,
    `tuners/lora/dora.py` and `variants.py`, 0.21).
    x, source: what goes into the adapter, and its copy for the products; base: the frozen layer's result
    """
    lora = build.adapter
    narrow = build.dtypes.activation
    held = lora.read(narrow)
    matrix = shape.i * shape.o
    wide = max(x.itemsize, held) if lora.stored is None else x.itemsize
    copied = lora.stored is not None or wide != narrow
    product, copy = Tensor(f"{name}.dora_product", matrix, wide), Tensor(f"{name}.dora_weight", matrix * copied, wide)
    # The product's graph holds the identity that it was made from.
    identity = Tensor(f"{name}.dora_identity", shape.i**2, narrow if lora.casts else held)
    scratch = 2 * matrix * wide  # the scaled product and the sum
    magnitude = Weight(
        f"{name}.magnitude.weight", shape.o, shape.shards, "vector", wide=lora.held(narrow) == 4 and narrow != 4
    )
    scale = Tensor(f"{name}.dora_scale", shape.o, held)
    flops = 2 * lora.rank * matrix
    written = build.operations
    written.append(
        Operation(
            f"{name}.dora_norm",
            "elementwise",
            (),
            (product, copy, identity, scale),
            (magnitude,),
            keeps=tuple(Tensor(f"{name}.dora_{part}", shape.o, held) for part in ("length", "scale", "less_one")),
            workspace=scratch,
            gemms=(Gemm(shape.i, shape.o, lora.rank),),
            forward_flops=flops,
        )
    )
    high = _products(build, name, source, (source,), narrow if lora.casts else held, shape)
    if dropped:
        read = build.cast(f"{name}.dora_cast", x, narrow) if lora.casts and x.itemsize != narrow else x
        kept = (Tensor(f"{name}.dora_weight.cast", matrix, narrow),) if lora.casts and wide != narrow else (copy,)
        gemm = Gemm(shape.rows, shape.o, shape.i)
        base = Tensor(f"{name}.dora_base", base.numel, narrow if lora.casts else x.itemsize)
        written.append(
            Operation(
                base.name,
                "gemm",
                (read,),
                (base,),
                keeps=kept if copied else (),
                gemms=(gemm,),
                forward_flops=gemm.flops,
                input_gradient_flops=gemm.flops,
            )
        )
    elif shape.bias:
        itemsize = 4 if build.wide_weights or lora.upcast == "all" else base.itemsize
        base = build.elementwise(
            f"{name}.dora_unbiased",
            (base,),
            Tensor(f"{name}.dora_unbiased", base.numel, itemsize),
            shares_gradient=True,
        )
    each = {role: Tensor(f"{name}.dora_{role}", base.numel, held) for role in ("frozen", "raw", "scaled", "sum")}
    whole = each["sum"].nbytes

    def workspace(term: Tensor) -> Size:
        """The gradient of the result, and both terms' before they are summed to the magnitude's shape or made narrow."""
        return 2 * whole + (whole - term.nbytes if term.itemsize != held else 0)

    build.elementwise(
        each["frozen"].name, (base, scale), each["frozen"], keeps=(base,), backward_workspace=workspace(base)
    )
    build.elementwise(each["raw"].name, (high, scale), each["raw"], keeps=(high,), backward_workspace=workspace(high))
    build.elementwise(each["scaled"].name, (each["raw"],), each["scaled"])
    terms = each["frozen"], each["scaled"]
    return build.elementwise(
        each["sum"].name, terms, each["sum"], shares_gradient=True, holds=(product, copy, identity)
    )
