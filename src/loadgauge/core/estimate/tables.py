"""Tables of an estimate, operation by operation: FLOPs, weights, and what is kept for backward.

All of them read the list of operations that memory, time and FLOPs are summed from. A row is one micro-batch on one rank
of the pipeline stage that needs the most memory; `times` is how often the stage has it.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

import msgspec

from loadgauge.core.base.algebra import Size
from loadgauge.core.estimate.workings import Workings
from loadgauge.core.layers.operations.operations import Layer, Operation, Recompute

TableName = Literal["operations", "weights", "flops", "activations"]
TABLES: tuple[str, ...] = get_args(TableName)

Row = dict[str, Any]


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Rows with the same keys. summed: the columns that are added up, each row as often as its `times`.

    of: the model and the rank it is about, in words; note: what the columns are
    """

    name: str
    of: str
    note: str
    summed: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def total(self) -> dict[str, Size]:
        """The sums of all columns that can be added up, over the whole stage."""
        return {name: sum(row["times"] * row[name] for row in self.rows) for name in self.summed}

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain values for JSON."""
        return {"name": self.name, "of": self.of, "note": self.note, "rows": list(self.rows), "total": self.total}


def table(workings: Workings, name: TableName) -> Table:
    """Return one of the tables (`TABLES`) of the rank that needs the most memory.

    >>> from loadgauge import Layout, estimate
    >>> result = estimate("gpt2", Layout(seq_len=1024))
    >>> weights = table(result.workings, "weights")
    >>> weights.total["elements"] == result.params
    True
    >>> flops = table(result.workings, "flops").total
    >>> flops["forward"] + flops["input_gradient"] + flops["weight_gradient"] == result.flops.model
    True
    """
    rows, summed, note = _READERS[name]
    stage = workings.worst.rank.stage
    layout = workings.layout
    of = f"{workings.model.name}: one micro-batch on one rank of stage {stage.index} of {layout.pp}"
    if workings.passes > 1:
        of += f", which has {workings.passes:,.0f} of them a step"
    listed = [row for where, layer, again, times in workings.layers(stage) for row in rows(where, layer, again, times)]
    return Table(name=name, of=of, note=note, summed=summed, rows=tuple(listed))


def _flops_of(operation: Operation, again: bool) -> dict[str, Size]:
    return {
        "forward": operation.forward_flops,
        "input_gradient": operation.input_gradient_flops,
        "weight_gradient": operation.weight_gradient_flops,
        "recomputed": operation.rerun_flops + (operation.forward_flops if again else 0),
    }


def _operations(where: str, layer: Layer, again: Recompute, times: Size) -> Iterator[Row]:
    """Each operation; a tensor that several keep stands with the first."""
    left = {tensor.name: tensor.nbytes for tensor in layer.kept(again)}
    for operation in layer:
        mine = (*operation.keeps, *(operation.inputs if operation.name in again else ()))
        kept = sum(left.pop(tensor.name, 0) for tensor in mine)
        flops = _flops_of(operation, operation.name in again)
        yield {
            "layer": where,
            "operation": operation.name,
            "kind": operation.kind,
            "times": times,
            "weights": operation.params,
            "forward": flops["forward"],
            "backward": operation.backward_flops,
            "recomputed": flops["recomputed"],
            "kept": kept,
            "moved": operation.hbm_bytes(),
            "sent": sum(collective.wire for collective in (*operation.forward_comm, *operation.backward_comm)),
        }


def _weights(where: str, layer: Layer, again: Recompute, times: Size) -> Iterator[Row]:
    for operation in layer:
        for weight in operation.weights:
            yield {
                "layer": where,
                "weight": weight.name,
                "kind": weight.kind,
                "times": times,
                "shape": "" if weight.shape is None else " x ".join(f"{size:,}" for size in _shape(weight)),
                "elements": weight.numel,
                "shards": weight.shards,
                "trainable": weight.trainable,
            }


def _shape(weight: Any) -> tuple[Size, ...]:
    """Matrices in the tensor (experts), rows and columns."""
    return weight.shape if weight.copies == 1 else (weight.copies, *weight.shape)


def _flops(where: str, layer: Layer, again: Recompute, times: Size) -> Iterator[Row]:
    for operation in layer:
        counted = _flops_of(operation, operation.name in again)
        if any(counted.values()):
            products = "; ".join(
                f"{'' if gemm.batch == 1 else f'{gemm.batch:,} x '}({gemm.m:,} x {gemm.k:,}) ({gemm.k:,} x {gemm.n:,})"
                for gemm in operation.gemms
            )
            yield {"layer": where, "operation": operation.name, "products": products, "times": times, **counted}


def _activations(where: str, layer: Layer, again: Recompute, times: Size) -> Iterator[Row]:
    for tensor in layer.kept(again):
        yield {
            "layer": where,
            "tensor": tensor.name,
            "role": tensor.dtype,
            "times": times,
            "elements": tensor.numel,
            "itemsize": tensor.itemsize,
            "kept": tensor.nbytes,
            "by": ", ".join(layer.keepers(tensor.name, again)),
        }


_Reader = Callable[[str, Layer, Recompute, Size], Iterable[Row]]
_READERS: dict[str, tuple[_Reader, tuple[str, ...], str]] = {
    "operations": (
        _operations,
        ("weights", "forward", "backward", "recomputed", "kept", "moved", "sent"),
        "weights: elements on the rank; forward, backward, recomputed: FLOPs; kept: bytes from forward to backward;"
        " moved: bytes its forward reads and writes, at 16 bits a weight; sent: bytes over links, forward and backward",
    ),
    "weights": (
        _weights,
        ("elements",),
        "elements on the rank before ZeRO shards them; shards: ranks that together hold one whole",
    ),
    "flops": (
        _flops,
        ("forward", "input_gradient", "weight_gradient", "recomputed"),
        "a multiply-add is 2 FLOPs; attention counts every query-key pair, causal or not",
    ),
    "activations": (
        _activations,
        ("kept",),
        "bytes held from forward to backward by one micro-batch; a tensor that several operations keep is kept once",
    ),
}
"""The rows of each table, the columns that are added up, and what the columns are."""
