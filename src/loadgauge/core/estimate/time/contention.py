"""Collectives that use the network between nodes at the same time: what hides under a pass meets the layers' own.

Of a pass over a layer, or over many, four numbers say how its own collectives use the network: the seconds in which they do
and nothing is computed, and all seconds in which they do; of forward and of backward.
"""

from collections.abc import Iterator, Mapping, Sequence

from loadgauge.core.base.algebra import Size, maximum, minimum, same
from loadgauge.core.definitions.layout.axes import LANE_OF
from loadgauge.core.estimate.time.roofline import OperationTime
from loadgauge.core.layers.operations.operations import Collective, Layer

Links = tuple[Size, Size, Size, Size]
"""Seconds on the network between nodes: exposed and all, of forward; exposed and all, of backward."""
NOTHING: Links = (0, 0, 0, 0)
TINY = 1e-30
"""Seconds: nothing, and no divisor of 0."""


def beside(whole: Size, under: Size, exposed: Size, all_: Size) -> Size:
    """Return the seconds that communication adds to a pass under which it hides [s].

    whole: seconds of it alone; under: of the pass; exposed: those of the pass in which a collective of its own has the same
    link and nothing is computed; all_: those in which one has it at all. Two that send at the same time have half of the
    link each, their max-min fair shares (source: bertsekas1992), so that both take twice as long. Over layers that are
    alike, what hides meets the others as often as they come, which adds whole * exposed / under. What is left when the
    pass ends is what the link carries in all less the time in which it could.

    >>> beside(3.0, 10.0, 0, 0), beside(12.0, 10.0, 0, 0), beside(5.0, 10.0, 2.0, 2.0), beside(9.0, 10.0, 2.0, 2.0)
    (0, 2.0, 1.0, 1.8)
    """
    if same(all_, 0):
        return maximum(whole - under, 0)
    return maximum(whole * exposed / maximum(under, TINY), whole + minimum(all_, under) - under)


def added(first: Links, second: Links, times: Size = 1) -> Links:
    """Return the seconds of two passes together, the second `times` over.

    >>> added((1, 2, 3, 4), (1, 1, 1, 1), 2)
    (3, 4, 5, 6)
    """
    if second is NOTHING:
        return first
    ahead, all_ahead, back, all_back = (total + times * other for total, other in zip(first, second, strict=True))
    return ahead, all_ahead, back, all_back


def on_network(whole: Mapping[str, Size], lanes: Mapping[str, Size], crossing: Mapping[str, Size]) -> tuple[Size, Size]:
    """Return the seconds in which a layer's collectives use the network between nodes: exposed, and all.

    whole: seconds of the collectives, by axis; lanes: what is exposed of them, by component of time; crossing: 1 where the ranks of
    an axis are on several nodes, else 0. The ranks of one expert and those that share the experts have one component.

    >>> on_network({"tp": 2.0, "ep": 3.0, "etp": 1.0}, {"tp": 2.0, "ep": 2.0}, {"tp": 0, "ep": 1, "etp": 0})
    (1.5, 3.0)
    """
    exposed: Size = 0
    all_: Size = 0
    for axis, value in whole.items():
        of_lane = sum(whole[other] for other in whole if LANE_OF[other] == LANE_OF[axis])
        all_ = all_ + crossing[axis] * value
        exposed = exposed + crossing[axis] * lanes[LANE_OF[axis]] * value / maximum(of_lane, TINY)
    return exposed, all_


def beside_gradients(layer: Layer, times: Sequence[OperationTime]) -> Iterator[tuple[Collective, Size]]:
    """Yield what column-parallel matrices exchange in backward, and the seconds of the products that it runs beside.

    Inputs are gathered again beside the product of the inputs' gradient, which is summed or scattered beside that of the weights'
    (source: megatron-core, `LinearWithGradAccumulationAndAsyncCommunication.backward`). times: of the layer's operations
    """
    for operation in layer:
        entry = operation.kind == "collective"
        for collective in operation.backward_comm:
            if collective.axis != "tp" or not (entry or collective.kind == "all_reduce"):
                continue
            source = (operation.outputs if entry else operation.inputs)[0].name
            readers = [
                time for reader, time in zip(layer, times, strict=True)
                if reader.gemms and reader.inputs and reader.inputs[0].name == source
            ]  # fmt: skip
            gathers = collective.kind == "all_gather"
            yield collective, sum(reader.input_gradient if gathers else reader.weight_gradient for reader in readers)
