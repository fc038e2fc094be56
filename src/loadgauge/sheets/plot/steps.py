"""Figures of a step: where its time goes, memory through it, its schedule, and its operations under the roofline."""

from typing import Any

from loadgauge.core.answers.figures.colours import EXPOSED, HIDDEN, IDLE, INK, KINDS, LANES, MUTE, PARTS
from loadgauge.core.answers.figures.lanes import lanes
from loadgauge.core.answers.figures.memory_phases import moments
from loadgauge.core.answers.figures.roofline import roofline
from loadgauge.core.answers.figures.schedule import COLUMNS, schedule
from loadgauge.core.base import lists, seconds
from loadgauge.core.estimate.result import Estimate
from loadgauge.sheets.plot.forms import curves

NAMED = 8
"""Points of the roofline that are listed: those that take the most time."""
WORKED = {True: "seconds", False: "in units of one forward"}
"""Unit of the axis of a step, by whether its time is known."""


def draw_lanes(axes: Any, result: Estimate) -> None:
    """Draw the components of step time: exposed communication in red, what overlaps with compute pale."""
    components = lanes(result) or []
    step = result.timing.step
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
    axes.set(xlim=(0, step * 1.14), xlabel="seconds")
    axes.tick_params(axis="y", length=0)
    axes.set_title(
        f"{seconds(step)} on the slowest stage; red: exposed, pale: hidden under compute",
        loc="left",
        fontsize=8,
        color=MUTE,
    )


def draw_moments(axes: Any, result: Estimate) -> None:
    """Draw memory over the step as stacked areas [GiB], with a line at the GPU's capacity."""
    figure = moments(result)
    curve = figure["curve"]
    times, *columns = zip(*curve["rows"], strict=True)
    by_part = dict(zip(curve["columns"][1:], columns, strict=True))
    series = {part: by_part[part] for part in PARTS}
    along = WORKED[curve["timed"]]
    curves(axes, {"x": times, "along": along, "series": series, "unit": "byte", "limit": figure["capacity"]})
    drawn, whole = curve["microbatches_shown"], curve["microbatches"]
    some = f", {drawn} of {whole} micro-batches" if drawn < whole else ""
    axes.set_title(f"a rank of stage {figure['rank']['stage']}{some}", loc="left", fontsize=8, color=MUTE)


def draw_schedule(axes: Any, result: Estimate) -> None:
    """Draw forward, backward and weight gradients of each micro-batch over time; blank is the bubble."""
    figure = schedule(result)
    stages = figure["stages_shown"]
    rows = {stage: row for row, stage in enumerate(stages)}
    for row in rows.values():
        axes.barh(row, figure["seconds"], height=0.8, color=IDLE)
    events = [dict(zip(COLUMNS, cell, strict=True)) for cell in figure["cells"]]
    boxes = lists(
        (event["kind"], (rows[event["stage"]], event["start"], event["end"] - event["start"])) for event in events
    )
    for kind, spans in boxes.items():
        axes.barh(
            [row for row, _, _ in spans],
            [width for _, _, width in spans],
            left=[start for _, start, _ in spans],
            height=0.8,
            color=KINDS[kind],
            edgecolor="white",
            linewidth=0.4,
        )
    axes.set_yticks(range(len(stages)), [f"stage {stage}" for stage in stages])
    axes.invert_yaxis()
    axes.set(xlim=(0, figure["seconds"]), xlabel=WORKED[figure["timed"]])
    axes.tick_params(axis="y", length=0)
    some = f"; shown: {figure['shown']}" if figure["shown"] else ""
    axes.set_title(
        f"{figure['schedule']}, {figure['stages']} stages: blue forward, orange backward, yellow gradients of weights, grey"
        f" bubble ({figure['bubble']:.1%} of the part shown{some})",
        loc="left",
        fontsize=8,
        color=MUTE,
    )


def draw_roofline(axes: Any, result: Estimate) -> None:
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
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="FLOPs per byte of HBM", ylabel="TFLOP/s")
    axes.set_title(
        f"roof: {figure['peak'] / 1e12:,.0f} TFLOP/s, {figure['bandwidth'] / 1e12:,.2f} TB/s; area: seconds of a step",
        loc="left",
        fontsize=8,
        color=MUTE,
    )
