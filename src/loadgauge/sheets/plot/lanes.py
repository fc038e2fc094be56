"""Where the time of a step goes."""

from __future__ import annotations

from typing import Any

from loadgauge.core.answers.figures.colours import EXPOSED, HIDDEN, IDLE, LANES
from loadgauge.core.answers.figures.lanes import lanes
from loadgauge.core.base.units import seconds
from loadgauge.core.estimate.result import Estimate


def draw(axes: Any, result: Estimate) -> None:
    """Draw the components of step time: exposed communication in red, what overlaps with compute pale."""
    components = lanes(result) or []
    assert result.time is not None
    step = result.time.step
    for row, lane in enumerate(components):
        for span in lane["spans"]:
            colour = (
                HIDDEN if span["hidden"] else IDLE if lane["lane"] == "bubble" else LANES.get(lane["lane"], EXPOSED)
            )
            axes.barh(row, span["end"] - span["start"], left=span["start"], height=0.62, color=colour)
        label = seconds(lane["seconds"]) if lane["seconds"] else f"{seconds(lane['hidden_seconds'])} hidden"
        end = max(span["end"] for span in lane["spans"])
        axes.text(min(end + step * 0.012, step * 1.02), row, label, va="center", fontsize=7.5, color="#3d434c")
    axes.set_yticks(range(len(components)), [lane["lane"] for lane in components])
    axes.invert_yaxis()
    axes.set_xlim(0, step * 1.14)
    axes.set_xlabel("seconds")
    axes.tick_params(axis="y", length=0)
    axes.set_title(
        f"{seconds(step)} on the slowest stage; red: exposed, pale: hidden under compute",
        loc="left",
        fontsize=8,
        color="#5f6670",
    )
