"""Traced and measured memory as dots on the timeline of a step, and how the two runs differ."""

from typing import Annotated, Any, Literal

import msgspec

from loadgauge.core.answers.figures.memory_phases import curve
from loadgauge.core.estimate.memory.phases import Moment, Phase
from loadgauge.core.estimate.result import Estimate

Stretch = Literal["forward", "backward", "forward and backward", "optimizer step"]
"""What a trace or a measurement tells apart in a step, as its document has it."""
FORWARD: Stretch = "forward"
BACKWARD: Stretch = "backward"
BOTH: Stretch = "forward and backward"
STEP: Stretch = "optimizer step"
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Count = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
Name = Annotated[str, msgspec.Meta(max_length=120)]
TOLERANCE = 0.01
"""By how much the weights of one and the same model may differ: a trace has some buffers with them."""


class Sizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The sizes of a traced run, by the fields of `loadgauge estimate`; None: not recorded."""

    framework: Name
    layers: Count | None = None
    seq_len: Count
    micro_batch: Count
    micro_batches: Count
    precision: Name
    optimizer: Name
    recompute: Name


class Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The highest bytes in tensors by phase of a trace. weights: bytes of them; gpus and sizes: None where not recorded."""

    source: Literal["traced", "measured"]
    target: Name
    phases: dict[Stretch, Bytes]
    weights: Bytes
    gpus: Count | None = None
    sizes: Sizes | None = None


def dots(result: Estimate, trace: Found, model: str) -> dict[str, Any]:
    """Return the dots of a trace, each at the estimate's highest moment of its phase.

    model: name of the page's model; bytes: in tensors, as traced; estimated: the same of the moment (None in forward, which
    in a trace includes the loss's, and in an estimate does not); height: plus what the estimate has outside tensors, which no
    trace sees
    """
    memory, drawn = result.memory, list(curve(result))
    placed = []
    for phase, nbytes in trace.phases.items():
        moments = [moment for moment in memory.moments if _within(phase, moment)]
        times = [(moment.total, seconds) for seconds, moment in drawn if _within(phase, moment)]
        if moments and times:
            highest, outside = max(moments, key=lambda moment: moment.total), memory.parts["outside"]
            at = max(times, key=lambda one: one[0])[1]
            estimated = None if phase == FORWARD else highest.total - highest.parts["outside"]
            placed.append(
                {
                    "phase": phase,
                    "moment": highest.name,
                    "t": at,
                    "bytes": nbytes,
                    "height": nbytes + outside,
                    "estimated": estimated,
                }
            )
    return {
        "source": trace.source,
        "target": trace.target,
        "dots": placed,
        "differs": differs(result, trace, model),
        "unsaid": trace.sizes is None,
    }


def differs(result: Estimate, trace: Found, model: str) -> list[dict[str, Any]]:
    """Return in what the two runs differ: the quantity, the trace's value and the estimate's."""
    sizes, layout, training = trace.sizes, result.layout, result.training
    rows: list[tuple[str, Any, Any]] = [("model", trace.target, model)]
    if trace.gpus is not None:
        rows.append(("gpus", trace.gpus, int(layout.gpus)))
    if sizes is not None:
        rows += [
            ("framework", sizes.framework, training.framework.name),
            ("layers", sizes.layers or result.model.num_hidden_layers, result.model.num_hidden_layers),
            ("seq-len", sizes.seq_len, layout.seq_len),
            ("micro-batch", sizes.micro_batch, layout.micro_batch),
            ("micro-batches", sizes.micro_batches, int(layout.num_microbatches)),
            ("precision", sizes.precision, training.precision.name),
            ("optimizer", sizes.optimizer, training.optimizer.name),
            ("recompute", sizes.recompute, layout.recompute.mode),
        ]
    unlike = [{"what": what, "there": there, "here": here} for what, there, here in rows if there != here]
    weights = result.memory.parts["weights"]
    if abs(trace.weights - weights) > TOLERANCE * weights:
        unlike.append({"what": "weights", "there": trace.weights, "here": weights})
    return unlike


def _within(stretch: Stretch, moment: Moment) -> bool:
    """Return whether a moment of the estimate is in a stretch; the loss is worked backward as soon as it is known."""
    if moment.phase is Phase.STEP:
        return stretch == STEP
    return stretch in (BOTH, FORWARD if moment.phase is Phase.FORWARD else BACKWARD)
