"""Memory through one step: what the worst rank holds, part by part, while it works through its schedule."""

from __future__ import annotations

from typing import Any

from loadgauge.core.answers.figures.colours import EXPOSED, PARTS
from loadgauge.core.answers.figures.memory_phases import moments
from loadgauge.core.base.units import GIB, gib
from loadgauge.core.estimate.result import Estimate


def draw(axes: Any, result: Estimate) -> None:
    """Draw memory over the step as stacked areas [GiB], with a line at the GPU's capacity."""
    figure = moments(result)
    curve = figure["curve"]
    place = {name: index for index, name in enumerate(curve["columns"])}
    seconds = [row[0] for row in curve["rows"]]
    present = [part for part in PARTS if any(row[place[part]] for row in curve["rows"])]
    heights = [[row[place[part]] / GIB for row in curve["rows"]] for part in present]
    axes.stackplot(seconds, heights, colors=[PARTS[part] for part in present], labels=present, linewidth=0)
    if figure["capacity"] is not None:
        axes.axhline(figure["capacity"] / GIB, color=EXPOSED, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{gib(figure['capacity'], 1)} usable",
            (1, figure["capacity"] / GIB),
            (0, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            fontsize=7.5,
            color=EXPOSED,
        )
    axes.set_xlim(0, seconds[-1])
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.set_ylabel("GiB")
    axes.set_xlabel("seconds" if curve["timed"] else "in units of one forward")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(present), frameon=False, fontsize=7)
    drawn, whole = curve["microbatches_shown"], curve["microbatches"]
    some = f", {drawn} of {whole} micro-batches" if drawn < whole else ""
    axes.set_title(f"a rank of stage {figure['rank']['stage']}{some}", loc="left", fontsize=8, color="#5f6670")
