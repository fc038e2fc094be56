"""Where the time goes: compute, exposed communication, hidden communication; the exposed spans add up to the step."""

from typing import Any

from loadgauge.core.answers.figure import Figure
from loadgauge.core.answers.figures.treemap import apportion
from loadgauge.core.base.by_key import sums
from loadgauge.core.definitions.layout.axes import COMMUNICATION
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.workings import TimedOperation

COMPUTE = ("forward", "backward", "recompute", "loss")
"""Components of step time that are compute; the figure splits them by kind of operation."""
KINDS = ("matmul", "attention", "memory-bound")
REST = ("host", *COMMUNICATION, "bubble", "optimizer", "fixed")
"""The other components of step time, in the order of drawing."""
MEANING = {
    "forward": "forward of the layers",
    "backward": "backward of the layers",
    "recompute": "recomputation of activations",
    "loss": "embedding, logits and loss",
    "host": "waiting for the host that launches kernels",
    "tp": "tensor-parallel communication, exposed",
    "cp": "context-parallel communication, exposed",
    "ep": "dispatch of tokens to experts and back, exposed",
    "pp": "activations sent between stages, exposed",
    "zero": "weight gathers and gradient scatters (ZeRO-3), or transfers to and from the host, exposed",
    "bubble": "pipeline bubble: waiting for other stages",
    "dp": "gradient reduction, exposed",
    "optimizer": "optimizer update",
    "fixed": "fixed cost of a step",
}
"""Words for the lanes: what takes their seconds."""


def kind_of(timed: TimedOperation) -> str:
    """Return which of `KINDS` an operation is: a matrix product, attention, or memory-bound."""
    if timed.operation.kind == "attention":
        return "attention"
    return "matmul" if timed.operation.gemms else "memory-bound"


@Figure(
    title="Where the time goes",
    form="timeline",
    order=3,
    plot="time",
    row=2,
    needs="time",
    shown=("single", "notebook"),
)
def lanes(result: Estimate) -> list[dict[str, Any]] | None:
    """Return the components of a step on its slowest stage [s], or None where no time is known.

    `seconds` are on the critical path, `hidden_seconds` overlap with compute. Spans are laid end to end, not where they
    fall in the step: a step has thousands of each.
    """
    time = result.time
    if time is None:
        return None
    work = dict.fromkeys(KINDS, 0) | sums((kind_of(timed), timed.each) for timed in result.workings.operations)
    computing = sum(time.parts[lane] for lane in COMPUTE)
    seconds = dict(zip(KINDS, apportion(computing, list(work.values())), strict=True))
    seconds.update((lane, time.parts[lane]) for lane in REST)
    hidden = sums((row.lane, max(0.0, row.seconds - row.exposed_seconds)) for row in result.network)
    components, start = [], 0.0
    for lane, value in seconds.items():
        beside = hidden.get(lane, 0.0)
        if value or beside:
            spans = [{"start": 0.0, "end": beside, "hidden": True}] if beside else []
            spans += [{"start": start, "end": start + value, "hidden": False}] if value else []
            components.append({"lane": lane, "spans": spans, "seconds": value, "hidden_seconds": beside})
            start += value
    return components
