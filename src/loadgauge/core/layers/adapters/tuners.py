"""PEFT's methods beside LoRA, next to a frozen linear layer: what they multiply, make and keep, and their casts.

Legend: T rows, i and o the width of the matrix's input and output, r the rank, b the size of a block.

As LoRA's (`layers.adapters.adapters`), their weights are float32 beside 16-bit ones, and read a float32 copy of what goes in;
under autocast products make 16-bit copies of that. (Source: peft 0.21, `layer.py` in `tuners/ia3`, `vera`, `adalora`, `loha`,
`lokr` and `oft`.)
"""

from __future__ import annotations

from math import isqrt

from loadgauge.core.base.algebra import Size
from loadgauge.core.layers.adapters.adapters import AdapterShape
from loadgauge.core.layers.operations.operations import Gemm, Operation, Tensor, Weight
from loadgauge.core.layers.operations.writer import Writer

NEUMANN_TERMS = 5
"""Terms of the series that OFT takes for an inverse (`num_cayley_neumann_terms`)."""


def before(build: Writer, name: str, target: str, x: Tensor, shape: AdapterShape) -> Tensor:
    """Add what a method does to the input of a frozen matrix; returns what the matrix reads."""
    lora = build.adapter
    if target not in lora.targets:
        return x
    if lora.method == "oft":
        return _rotated(build, name, x, shape)
    if lora.method == "ia3" and target == "down":
        return _scaled(build, name, _own(build, f"{name}.ia3_cast", x), shape.i, x.itemsize)
    return x


def after(
    build: Writer, name: str, target: str, x: Tensor, base: Tensor, shape: AdapterShape, around: tuple[Tensor, ...]
) -> Tensor:
    """Add what a method does to the result of a frozen matrix; returns the result of both.

    x: what went into the matrix; around: what the module that calls it holds meanwhile
    """
    lora = build.adapter
    parts = {"vera": _vera, "adalora": _adalora, "loha": _loha, "lokr": _lokr}
    if lora.method == "ia3" and target != "down":
        base = _scaled(build, name, base, shape.o, base.itemsize)
    elif lora.method in parts:
        base = parts[lora.method](build, name, x, base, shape, (*around, x))
    # All but AdaLoRA return what is as wide as their input, which under autocast may be float32.
    same_width = lora.method == "adalora" or base.itemsize == x.itemsize
    return base if same_width else build.cast(f"{name}.as_input", base, x.itemsize)


def factors(width: int) -> tuple[int, int]:
    """Return the two factors of a width that are closest to each other, the smaller first (source: peft, `lokr/layer.py`).

    >>> factors(4096), factors(14336), factors(127)
    ((64, 64), (112, 128), (1, 127))
    """
    small = next(each for each in range(isqrt(width), 0, -1) if width % each == 0)
    return small, width // small


def block_size(width: int, wanted: int) -> int:
    """Return the size of OFT's blocks: the divisor of a width that is closest to what is asked, the smaller of two.

    >>> block_size(4096, 32), block_size(2304, 40), block_size(16, 32)
    (32, 36, 16)
    """
    if wanted >= width:
        return width
    below = next(each for each in range(wanted, 0, -1) if width % each == 0)
    above = next(each for each in range(wanted, width + 1) if width % each == 0)
    return below if wanted - below <= above - wanted else above


def vera_matrices(build: Writer) -> tuple[Weight, ...]:
    """Return the two random matrices that all layers read a part of: float32 and frozen, as large as the widest need."""
    lora = build.view.lora
    if lora is None or lora.method != "vera":
        return ()
    i, o = lora.widest
    sizes = (("vera_a", lora.rank * i, (lora.rank, i)), ("vera_b", o * lora.rank, (o, lora.rank)))
    return tuple(
        Weight(f"embedding.{name}.weight", numel, trainable=False, cast=False, wide=True, shape=shape)
        for name, numel, shape in sizes
    )


def _wide(build: Writer) -> bool:
    lora = build.adapter
    return bool(lora.held(build.dtypes.activation) == 4 and build.dtypes.activation != 4)


def _own(build: Writer, name: str, x: Tensor) -> Tensor:
    """A tensor in the dtype of the adapters' weights."""
    lora = build.adapter
    own = lora.read(build.dtypes.activation)
    return x if x.itemsize == own else build.cast(name, x, own)


def _inner(build: Writer) -> Size:
    """Bytes of an element of what the products read."""
    lora, narrow = build.adapter, build.dtypes.activation
    return narrow if lora.casts else lora.read(narrow)


def _read(build: Writer, name: str, x: Tensor) -> Tensor:
    """A tensor as a product reads it: autocast copies what is wider."""
    inner = _inner(build)
    return x if x.itemsize <= inner else build.cast(name, x, inner)


def _vector(build: Writer, name: str, numel: Size, shards: Size = 1) -> Weight:
    return Weight(f"{name}.weight", numel, shards, "vector", wide=_wide(build))


def _matrix(build: Writer, name: str, rows: Size, columns: Size) -> Weight:
    return Weight(f"{name}.weight", rows * columns, wide=_wide(build), shape=(rows, columns), cast=False)


def _of_factors(product: Tensor, x: Tensor) -> Size:
    """Bytes alive in the backward of a product with a vector, beside the gradient of `x`: the gradient of the product, and
    those of both factors before the one is made narrow and the other summed."""
    return 3 * product.nbytes - x.nbytes


def _scaled(build: Writer, name: str, x: Tensor, width: Size, itemsize: Size) -> Tensor:
    """(IA)3: each column times a number; returned with elements of `itemsize` bytes."""
    lora = build.adapter
    own = lora.read(build.dtypes.activation)
    product = Tensor(f"{name}.ia3", x.numel, max(x.itemsize, own))
    scale = Tensor(f"{name}.ia3_scale", width, own)
    alone = _of_factors(product, x)
    build.operations.append(
        Operation(
            product.name,
            "elementwise",
            (x,),
            (product,),
            (_vector(build, product.name, width),),
            keeps=(x, scale),
            backward_workspace=alone,
        )
    )
    return product if product.itemsize == itemsize else build.cast(f"{name}.ia3_result", product, itemsize)


def _product(
    build: Writer,
    name: str,
    x: Tensor,
    o: Size,
    gemm: Gemm,
    *,
    weights: tuple[Weight, ...] = (),
    borrows: tuple[Weight, ...] = (),
    keeps: tuple[Tensor, ...] = (),
    trained: bool = True,
    holds: tuple[Tensor, ...] = (),
) -> Tensor:
    """The product of `x` with a small matrix, `o` columns wide."""
    out = Tensor(name, gemm.m * o, x.itemsize)
    build.operations.append(
        Operation(
            name,
            "gemm",
            (x,),
            (out,),
            weights,
            keeps=keeps,
            gemms=(gemm,),
            forward_flops=gemm.flops,
            input_gradient_flops=gemm.flops,
            weight_gradient_flops=gemm.flops if trained else 0,
            borrows=borrows,
            holds=holds,
        )
    )
    return out


def _sum(build: Writer, name: str, base: Tensor, term: Tensor, holds: tuple[Tensor, ...] = ()) -> Tensor:
    """The frozen layer's result and the method's, in the dtype of the former."""
    total = Tensor(f"{name}.adapted", base.numel, max(base.itemsize, term.itemsize))
    total = build.elementwise(total.name, (base, term), total, shares_gradient=True, holds=holds)
    return total if total.itemsize == base.itemsize else build.cast(f"{name}.narrowed", total, base.itemsize)


def _vera(build: Writer, name: str, x: Tensor, base: Tensor, shape: AdapterShape, around: tuple[Tensor, ...]) -> Tensor:
    """VeRA: d times the product with A, and b times the product of that with B; A and B are random and all layers' own."""
    lora = build.adapter
    rank, (rows, i, o, *_) = lora.rank, shape
    adapter_input = source = _own(build, f"{name}.vera_cast", x)
    if lora.dropout:
        source = build.dropout(f"{name}.vera_dropout", source, lora.dropout)
    inner, own = _inner(build), lora.read(build.dtypes.activation)

    def product(part: str, x: Tensor, into: Size, out: Size) -> Tensor:
        weight = Weight(f"{name}.{part}.weight", into * out, trainable=False, cast=False, shape=(out, into))
        # Autocast copies the part of the matrix that is read; the gradient of what it is multiplied with needs it.
        keeps = (Tensor(f"{weight.name}.cast", weight.numel, inner),) if inner != own else ()
        return _product(
            build, f"{name}.{part}", x, out, Gemm(rows, out, into), borrows=(weight,), keeps=keeps, trained=False
        )

    def times(part: str, x: Tensor, width: Size) -> Tensor:
        out = Tensor(f"{name}.{part}", x.numel, max(x.itemsize, own))
        weight = _vector(build, out.name, width)
        alone = _of_factors(out, x)
        build.operations.append(
            Operation(out.name, "elementwise", (x,), (out,), (weight,), keeps=(x,), backward_workspace=alone)
        )
        return out

    low = times("vera_d", product("vera_a", _read(build, f"{name}.vera_autocast", source), i, rank), rank)
    high = times("vera_scaled", product("vera_b", _read(build, f"{name}.vera_low", low), rank, o), o)
    return _sum(build, name, base, high, holds=(*around, adapter_input))


def _adalora(
    build: Writer, name: str, x: Tensor, base: Tensor, shape: AdapterShape, around: tuple[Tensor, ...]
) -> Tensor:
    """AdaLoRA: LoRA with singular values between its matrices, and a penalty on what of them is not orthogonal.

    The rank before pruning is what is held throughout: PEFT masks singular values and keeps their rows.
    """
    lora = build.adapter
    rank, (rows, i, o, *_) = lora.rank, shape
    inner, own = _inner(build), lora.read(build.dtypes.activation)
    # Beside bitsandbytes' layers nothing is cast to float32 first under autocast, and the result is cast back without.
    four = lora.stored is not None
    adapter_input = source = x if four and lora.casts else _own(build, f"{name}.ada_cast", x)
    if lora.dropout:
        source = build.dropout(f"{name}.lora_dropout", source, lora.dropout)
    source = _read(build, f"{name}.ada_autocast", source)
    first, second = _matrix(build, f"{name}.lora_a", rank, i), _matrix(build, f"{name}.lora_b", o, rank)
    values = _vector(build, f"{name}.lora_e", rank)
    # The rows of A times their singular values are a tensor of their own; of B autocast reads a copy.
    scaled_rows = Tensor(f"{first.name}.cast", first.numel, inner)
    low = _product(
        build, f"{name}.lora_a", source, rank, Gemm(rows, rank, i), weights=(first, values), keeps=(source, scaled_rows)
    )
    copy = (Tensor(f"{second.name}.cast", second.numel, inner),) if inner != own else ()
    high = _product(
        build,
        f"{name}.lora_b",
        low,
        o,
        Gemm(rows, o, rank),
        weights=(second,),
        keeps=(low, *copy),
        holds=(adapter_input,),
    )
    if four and not lora.casts and high.itemsize != base.itemsize:
        high = build.cast(f"{name}.ada_result", high, base.itemsize)
    scaled = build.elementwise(f"{name}.ada_scaled", (high,), Tensor(f"{name}.ada_scaled", high.numel, high.itemsize))
    divided = Tensor(f"{name}.ada_divided", high.numel, own)
    # The number of the rank, by which all is divided, gets a gradient where PEFT casts it or moves it to where the model is.
    build.operations.append(
        Operation(
            divided.name,
            "elementwise",
            (scaled,),
            (divided,),
            (_vector(build, f"{name}.ranknum", 1),),
            keeps=(scaled,),
            backward_workspace=5 * divided.nbytes - scaled.nbytes,
        )
    )
    # The sum is made in place, in the dtype of the frozen layer's result.
    total = Tensor(f"{name}.adapted", base.numel, base.itemsize)
    return build.elementwise(
        total.name,
        (base, divided),
        total,
        shares_gradient=True,
        keeps=_penalty(build, name, first, second),
        holds=(*around, adapter_input),
    )


def _penalty(build: Writer, name: str, first: Weight, second: Weight) -> tuple[Tensor, ...]:
    """Return the tensors that the norms of A At - 1 and Bt B - 1 keep: autocast's two copies of a matrix, and the difference.

    Their backward is the first of all. It leaves the matrix's gradient, which without autocast takes the same bytes, and is
    counted from there on.
    """
    lora = build.adapter
    kept = []
    for weight in (first, second):
        kept.append(Tensor(f"{weight.name}.penalty", weight.numel, lora.read(build.dtypes.activation)))
        kept.append(Tensor(f"{weight.name}.difference", lora.rank**2, _inner(build)))
    return tuple(kept)


def _multiplied(
    build: Writer,
    name: str,
    x: Tensor,
    base: Tensor,
    shape: AdapterShape,
    delta: Tensor,
    around: tuple[Tensor, ...],
) -> Tensor:
    """The product of the input with a whole matrix that the adapter has made, and the sum with the frozen layer's result.

    delta: the matrix; the input is copied to its dtype before autocast copies both
    """
    rows, i, o, *_ = shape
    source = x if x.itemsize == delta.itemsize else build.cast(f"{name}.delta_input", x, delta.itemsize)
    held = (*around, source, delta)
    source = _read(build, f"{name}.delta_autocast", source)
    keeps = (source, delta)
    inner = _inner(build)
    if delta.itemsize > inner:
        keeps = (source, Tensor(f"{name}.delta.cast", delta.numel, inner))
    gemm = Gemm(rows, o, i)
    out = Tensor(f"{name}.delta_product", base.numel, inner)
    build.operations.append(
        Operation(
            out.name,
            "gemm",
            (source, delta),
            (out,),
            keeps=keeps,
            gemms=(gemm,),
            forward_flops=gemm.flops,
            input_gradient_flops=gemm.flops,
            weight_gradient_flops=gemm.flops,
            holds=held,
        )
    )
    return _sum(build, name, base, out, holds=around)


def _loha(build: Writer, name: str, x: Tensor, base: Tensor, shape: AdapterShape, around: tuple[Tensor, ...]) -> Tensor:
    """LoHa: the change of the matrix is a product, element by element, of two of rank r, and is made whole."""
    lora = build.adapter
    rank, i, o = lora.rank, shape.i, shape.o
    inner, own = _inner(build), lora.read(build.dtypes.activation)
    delta = Tensor(f"{name}.delta", i * o, inner)
    weights = tuple(
        _matrix(build, f"{name}.hada_w{which}_{side}", *sizes)
        for which in (1, 2)
        for side, sizes in (("a", (o, rank)), ("b", (rank, i)))
    )
    gemm = Gemm(o, i, rank, 2)
    # Its backward makes both products again, outside autocast, and goes through them one after the other.
    workspace = i * o * (inner + 2 * own)
    build.operations.append(
        Operation(
            delta.name,
            "gemm",
            (),
            (delta,),
            weights,
            gemms=(gemm,),
            forward_flops=gemm.flops,
            weight_gradient_flops=2 * gemm.flops,
            rerun_flops=gemm.flops,
            workspace=2 * delta.nbytes,
            backward_workspace=workspace,
        )
    )
    return _multiplied(build, name, x, base, shape, delta, around)


def _lokr(build: Writer, name: str, x: Tensor, base: Tensor, shape: AdapterShape, around: tuple[Tensor, ...]) -> Tensor:
    """LoKr: the change of the matrix is the Kronecker product of a small matrix and one that may be of rank r."""
    lora = build.adapter
    rank, i, o = int(lora.rank), int(shape.i), int(shape.o)
    inner, own = _inner(build), lora.read(build.dtypes.activation)
    (o_small, o_large), (i_small, i_large) = factors(o), factors(i)
    whole = rank >= max(o_large, i_large) / 2
    weights = [_matrix(build, f"{name}.lokr_w1", o_small, i_small)]
    keeps: list[Tensor] = []
    gemms: tuple[Gemm, ...] = ()
    if whole:
        weights.append(_matrix(build, f"{name}.lokr_w2", o_large, i_large))
    else:
        gemms = (Gemm(o_large, i_large, rank),)
        sides = (_matrix(build, f"{name}.lokr_w2_a", o_large, rank), _matrix(build, f"{name}.lokr_w2_b", rank, i_large))
        weights += sides
        keeps = [Tensor(f"{weight.name}.cast", weight.numel, inner) for weight in sides] if inner != own else []
        keeps.append(Tensor(f"{name}.lokr_w2", o_large * i_large, inner))
    delta = Tensor(f"{name}.delta", i * o, own)
    flops = sum(gemm.flops for gemm in gemms)
    build.operations.append(
        Operation(
            delta.name,
            "gemm",
            (),
            (delta,),
            tuple(weights),
            keeps=tuple(keeps),
            gemms=gemms,
            forward_flops=flops,
            weight_gradient_flops=2 * flops,
            workspace=delta.nbytes,
            backward_workspace=2 * delta.nbytes,
        )
    )
    return _multiplied(build, name, x, base, shape, delta, around)


def _rotated(build: Writer, name: str, x: Tensor, shape: AdapterShape) -> Tensor:
    """OFT: each block of b columns of the input is turned by an orthogonal matrix, made from b (b - 1) / 2 numbers by a series."""
    lora = build.adapter
    inner, own, i = _inner(build), lora.read(build.dtypes.activation), int(shape.i)
    b = block_size(i, int(lora.rank))
    blocks, copied = i // b, inner != own
    numel = blocks * b * b

    def powers() -> tuple[Tensor, ...]:
        """Return the tensors that the series keeps: the powers, and under autocast another copy of the first for each."""
        # The first product has the matrix twice, each further one a power and the matrix.
        count = 2 + 2 * (NEUMANN_TERMS - 3) if copied else NEUMANN_TERMS - 2
        return tuple(Tensor(f"{name}.oft_power{exponent}", numel, inner) for exponent in range(count))

    rotation = Tensor(f"{name}.oft_rotation", numel, own)
    gemm = Gemm(b, b, b, blocks * (NEUMANN_TERMS - 2))
    weight = _matrix(build, f"{name}.oft_r", blocks, b * (b - 1) // 2)
    build.operations.append(
        Operation(
            rotation.name,
            "gemm",
            (),
            (rotation,),
            (weight,),
            keeps=powers(),
            gemms=(gemm,),
            forward_flops=gemm.flops,
            weight_gradient_flops=2 * gemm.flops,
            workspace=2 * rotation.nbytes,
            backward_workspace=4 * rotation.nbytes,
        )
    )
    adapter_input = _own(build, f"{name}.oft_cast", x)
    source, turned = _read(build, f"{name}.oft_autocast", adapter_input), rotation
    if copied:
        turned = Tensor(f"{rotation.name}.cast", numel, inner)
    gemm = Gemm(shape.rows, b, b, blocks)
    out = Tensor(f"{name}.oft_turned", source.numel, inner)
    build.operations.append(
        Operation(
            out.name,
            "gemm",
            (source, rotation),
            (out,),
            keeps=(source, turned),
            gemms=(gemm,),
            forward_flops=gemm.flops,
            input_gradient_flops=gemm.flops,
            weight_gradient_flops=gemm.flops,
            holds=(adapter_input,),
            backward_workspace=source.nbytes,  # the gradient by blocks, before it lies by tokens again
        )
    )
    out = build.elementwise(
        f"{name}.oft_folded",
        (out,),
        Tensor(f"{name}.oft_folded", out.numel, inner),
        shares_gradient=True,
        holds=(adapter_input, rotation),
    )
    if out.itemsize != own:
        out = build.cast(f"{name}.oft_result", out, own, holds=(adapter_input, rotation, x))
    return out if out.itemsize == x.itemsize else build.cast(f"{name}.oft_narrowed", out, x.itemsize, holds=(x,))
