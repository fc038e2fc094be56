"""Saved tensors as text: the output of `loadgauge saved`."""

from loadgauge.core.answers.answer import Answer
from loadgauge.core.text.table import Column, Paper, draw, points

ATTENTION = {
    "ScaledDotProductFlash": "FlashAttention",
    "ScaledDotProductEfficient": "the memory-efficient kernel (FlashAttention takes 16 bits and heads of up to 256)",
    "ScaledDotProductCudnn": "cuDNN's attention",
}
"""The kernel that `scaled_dot_product_attention` has taken, by the beginning of its node's name."""


def write(answer: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write the tensors that are kept, their storages and bytes; brief: what they come to."""
    saved, torch_version, held, unit, why = answer.shown
    beside = [storage for storage in saved.storages if storage.owner in ("", "result")]
    several = f"{len(beside)} storage{'' if len(beside) == 1 else 's'}"
    points(target, [f"KEPT  {saved.total:,} bytes in {several}, beside inputs and parameters"], "")
    if held is not None:
        persistent, peak = held.extra
        share = f" ({persistent / unit:.4g} / {peak / unit:.4g} of x)" if unit else ""
        once = f"{persistent:,} bytes until backward, {peak:,} at once in forward{share}"
        points(target, [f"HELD  {once}, beside inputs and result"], "")
    if brief:
        return
    rows = [
        [
            f"{tensor.node}.{tensor.field}",
            ("x".join(map(str, tensor.shape)) or "scalar")
            + (f", strides {'x'.join(map(str, tensor.stride))}" if tensor.stride else ""),
            tensor.dtype,
            f"{tensor.nbytes:,}",
            f"{tensor.storage}: {tensor.owner or tensor.made_by}"
            if tensor.owner or tensor.made_by
            else f"{tensor.storage}",
        ]
        for tensor in saved.tensors
    ]
    columns = [
        Column("kept as"),
        Column("shape"),
        Column("dtype"),
        Column("bytes", "right"),
        Column("storage", wrap=True),
    ]
    if rows:
        target.print()
        draw(target, columns, rows)
    target.print()
    taken = {words for node, words in ATTENTION.items() for tensor in saved.tensors if tensor.node.startswith(node)}
    again = ", ".join(f"{node}.{field}" for node, field in saved.made_again)
    result = any(storage.owner == "result" for storage in beside)
    points(
        target,
        [
            *([f"no peak: {why}"] if why else []),
            *(f"attention ran in {words}" for words in sorted(taken)),
            *([f"without the result, which its reader holds anyway: {saved.beyond_result:,} bytes"] if result else []),
            *(
                [f"parameters and buffers that backward reads: {saved.of_parameters:,} bytes"]
                if saved.of_parameters
                else []
            ),
            *([f"not kept, recomputed in backward: {again}"] if again else []),
            f"names and sizes are those of PyTorch {torch_version}; its saved fields are private",
        ],
    )
