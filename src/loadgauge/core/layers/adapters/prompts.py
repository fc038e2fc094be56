"""Virtual tokens: rows that are trained and put in front of each sequence's embeddings (prompt tuning, p-tuning).

Legend: v virtual tokens, B sequences, h hidden size, e width of p-tuning's encoder.
(Source: peft 0.21, `tuners/prompt_tuning/model.py`, `tuners/p_tuning/model.py` and `peft_model.py`.)
"""

from __future__ import annotations

from loadgauge.core.base.algebra import Size
from loadgauge.core.layers.operations.operations import Gemm, Operation, Tensor, Weight
from loadgauge.core.layers.operations.writer import Writer


def prompted(build: Writer, x: Tensor, width: Size) -> Tensor:
    """Add the virtual tokens' embeddings, a cast to the text's dtype, and the copy of both in one tensor.

    x: the embeddings of all positions, the virtual ones included; width: of an embedding
    """
    lora, view = build.adapter, build.view
    rows, wide = lora.virtual, build.dtypes.activation != 4
    chosen = Tensor("embedding.prompt.ids", rows, build.dtypes.index, "index")
    prompt = Tensor("embedding.prompt", rows * width, 4)
    table = Weight("embedding.prompt.weight", lora.virtual * width, 1, "table", wide=wide, shape=(lora.virtual, width))
    build.operations.append(Operation(prompt.name, "lookup", (chosen,), (prompt,), (table,), keeps=(chosen,)))
    if lora.method == "p-tuning":
        encoder = lora.rank or width
        for step, (into, out) in enumerate(((width, encoder), (encoder, encoder), (encoder, width))):
            prompt = _encoded(build, f"embedding.encoder{step}", prompt, rows, into, out, last=step == 2)
    # They are made once, and repeated for the sequences of a micro-batch.
    repeated = Tensor("embedding.prompt_repeated", prompt.numel * view.sequences, prompt.itemsize)
    prompt = build.elementwise(repeated.name, (prompt,), repeated)
    if prompt.itemsize != x.itemsize:
        prompt = build.cast("embedding.prompt_cast", prompt, x.itemsize)
    both = Tensor("embedding.prompted", x.numel, x.itemsize)
    # A gradient of the text's embeddings, asked for where layers run again, holds them.
    text = Tensor("embedding.text", x.numel - prompt.numel, x.itemsize)
    keeps = (text,) if view.input_gradients else ()
    return build.elementwise(both.name, (prompt, x), both, keeps=keeps, moves=(2 * x.nbytes, 0))


def _encoded(build: Writer, name: str, x: Tensor, rows: Size, into: Size, out: Size, *, last: bool) -> Tensor:
    """A layer of p-tuning's encoder, and its ReLU where it is not the last."""
    lora, narrow = build.adapter, build.dtypes.activation
    inner = narrow if lora.autocast else 4
    source = x if x.itemsize == inner else build.cast(f"{name}.autocast", x, inner)
    wide = narrow != 4
    weights = (
        Weight(f"{name}.weight", into * out, wide=wide, shape=(out, into), cast=False),
        Weight(f"{name}.bias", out, kind="vector", wide=wide),
    )
    copy = (Tensor(f"{name}.weight.cast", into * out, inner),) if inner != 4 else ()
    gemm, product = Gemm(rows, out, into), Tensor(name, rows * out, inner)
    build.operations.append(
        Operation(
            name,
            "gemm",
            (source,),
            (product,),
            weights,
            keeps=(source, *copy),
            gemms=(gemm,),
            forward_flops=gemm.flops,
            input_gradient_flops=gemm.flops,
            weight_gradient_flops=gemm.flops,
        )
    )
    if last:
        return product
    output = Tensor(f"{name}.relu", product.numel, inner)
    return build.elementwise(output.name, (product,), output, keeps=(output,))
