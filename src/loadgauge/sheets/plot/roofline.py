"""The operations under the roofline of the GPU."""

from __future__ import annotations

from typing import Any

from loadgauge.core.answers.figures.colours import INK, LANES, MUTE
from loadgauge.core.answers.figures.roofline import roofline
from loadgauge.core.base.units import seconds
from loadgauge.core.estimate.result import Estimate

NAMED = 8
"""Points that are listed: those that take the most time."""


def draw(axes: Any, result: Estimate) -> None:
    """Draw each operation's forward: FLOP/s against FLOPs per byte, areas in proportion to its seconds of a step."""
    figure = roofline(result)
    assert figure is not None
    points = [point for point in figure["points"] if point["flops"] and point["bytes"]]
    most = max(point["step_seconds"] for point in points)
    reach = [point["intensity"] for point in points]
    low, high = min(*reach, figure["ridge"]) / 3, max(*reach, figure["ridge"]) * 3
    axes.plot(
        [low, figure["ridge"], high],
        [low * figure["bandwidth"] / 1e12, figure["peak"] / 1e12, figure["peak"] / 1e12],
        color=INK,
        linewidth=1.2,
    )
    for point in points:
        axes.scatter(
            point["intensity"],
            point["achieved"] / 1e12,
            s=12 + 160 * point["step_seconds"] / most,
            alpha=0.8,
            color=LANES[point["kind"]],
            edgecolor="white",
            linewidth=0.6,
        )
    listed = [
        f"{number}  {point['op']}, {seconds(point['step_seconds'])}" for number, point in enumerate(points[:NAMED], 1)
    ]
    for number, point in enumerate(points[:NAMED], 1):
        axes.annotate(
            str(number),
            (point["intensity"], point["achieved"] / 1e12),
            (8, -3),
            textcoords="offset points",
            fontsize=7.5,
        )
    axes.text(
        0.98,
        0.04,
        "\n".join(listed),
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        fontsize=7.5,
        color=MUTE,
        linespacing=1.5,
        multialignment="left",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_xlabel("FLOPs per byte of HBM")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(
        f"roof: {figure['peak'] / 1e12:,.0f} TFLOP/s, {figure['bandwidth'] / 1e12:,.2f} TB/s; area: seconds of a step",
        loc="left",
        fontsize=8,
        color=MUTE,
    )
