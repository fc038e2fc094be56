"""The pipeline schedule, stage by stage."""

from __future__ import annotations

from typing import Any

from loadgauge.core.answers.figures.colours import IDLE, KINDS
from loadgauge.core.answers.figures.schedule import COLUMNS, schedule
from loadgauge.core.base.by_key import lists
from loadgauge.core.estimate.result import Estimate


def draw(axes: Any, result: Estimate) -> None:
    """Draw forward, backward and weight gradients of each micro-batch over time; blank is the bubble."""
    figure = schedule(result)
    stages = figure["stages_shown"]
    rows = {stage: row for row, stage in enumerate(stages)}
    for row in rows.values():
        axes.barh(row, figure["seconds"], height=0.8, color=IDLE)
    events = [dict(zip(COLUMNS, cell, strict=True)) for cell in figure["cells"]]
    boxes = lists((one["kind"], (rows[one["stage"]], one["start"], one["end"] - one["start"])) for one in events)
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
    axes.set_xlim(0, figure["seconds"])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds" if figure["timed"] else "in units of one forward")
    some = f"; shown: {figure['shown']}" if figure["shown"] else ""
    axes.set_title(
        f"{figure['schedule']}, {figure['stages']} stages: blue forward, orange backward, yellow gradients of weights, grey"
        f" bubble ({figure['bubble']:.1%} of the part shown{some})",
        loc="left",
        fontsize=8,
        color="#5f6670",
    )
