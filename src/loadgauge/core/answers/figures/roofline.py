"""The operations of the slowest stage under the roofline of the GPU."""

from typing import Any

from loadgauge.core.answers.figure import Figure
from loadgauge.core.answers.figures.lanes import kind_of
from loadgauge.core.estimate.result import Estimate


@Figure(title="Roofline of the operations", form="scatter", order=6, plot="roofline", row=2, needs="time")
def roofline(result: Estimate) -> dict[str, Any] | None:
    """Return each operation's forward: FLOPs, bytes through HBM, seconds of one micro-batch; None where no time is known.

    intensity: FLOPs per byte, None without bytes; achieved: FLOP/s; bandwidth: byte/s moved; step_seconds: including its
    backward, of all layers and micro-batches of a step. Operations without FLOPs have an intensity of 0 and are judged by
    their bandwidth.
    """
    if result.time is None:
        return None
    workings = result.workings
    points: dict[tuple[str, str], dict[str, Any]] = {}
    for timed in workings.operations:
        operation, seconds = timed.operation, timed.seconds.forward
        if not seconds:
            continue
        flops, nbytes = operation.forward_flops * operation.computed_share, operation.hbm_bytes()
        step = timed.each * workings.passes
        key = timed.layer.removesuffix(" run again in backward"), operation.name
        if key in points:
            points[key]["step_seconds"] += step
            points[key]["layers"] += timed.times
        else:
            points[key] = {
                "op": operation.name,
                "layer": key[0],
                "layers": timed.times,
                "kind": kind_of(timed),
                "flops": flops,
                "bytes": nbytes,
                "intensity": flops / nbytes if nbytes else None,
                "achieved": flops / seconds,
                "bandwidth": nbytes / seconds,
                "seconds": seconds,
                "step_seconds": step,
            }
    machine = workings.step.machine
    return {
        "peak": machine.peak,
        "low_peak": machine.fp8_peak,
        "bandwidth": machine.bandwidth,
        "ridge": machine.peak / machine.bandwidth,
        "points": sorted(points.values(), key=lambda point: -point["step_seconds"]),
    }
