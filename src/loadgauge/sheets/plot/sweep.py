"""A sweep of estimates as a figure: memory by part against one field, or a grid of two, with the cells that do not fit in red."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgauge.core.answers.figures.colours import EXPOSED, INK, MUTE, PARTS as COLOURS
from loadgauge.core.base import GIB, in_gib, refuse
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.sheets.plot.sheet import new_figure, write

Row = Mapping[str, Any]
GOOD, DEPENDS, TIGHT, BAD, NONE = "#d8efe0", "#e3dcf5", "#fbeecb", "#f6d5d2", "#eeeeee"
OUTCOMES = {"fits": GOOD, "depends": DEPENDS, "tight": TIGHT, "does not fit": BAD, "unknown": "#e4ecf5"}
"""Colour of a cell of the grid, by its verdict."""


def plot_sweep(rows: Sequence[Row], axes: Mapping[str, Sequence[Any]], file: Path, title: str) -> None:
    """Write the figure to an .svg, .png or .pdf file. title: the job, without what is swept

    Raises `ConfigError` for more than two swept fields, cells without one estimate, another ending or no matplotlib.
    """
    refuse(len(axes) > 2, "a figure is of one or two swept fields; --output writes them all", key="plot")
    refuse(
        all("memory_total" not in row for row in rows),
        "no cell of the sweep is a run, so there is nothing to draw",
        key="plot",
    )
    with new_figure(file, (11, 4.4)) as figure:
        figure.suptitle(title, x=0.012, ha="left", fontsize=9, color=MUTE)
        if len(axes) == 1:
            memory, activations = figure.subplots(1, 2)
            _bars(memory, rows, next(iter(axes)))
            _activations(activations, rows, next(iter(axes)))
        else:
            _grid(figure.subplots(), rows, axes)
        write(figure, file)


def _bars(axes: Any, rows: Sequence[Row], name: str) -> None:
    """Parts of the memory at the peak, one on the other, and the card's memory as a line."""
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for part in PARTS:
        values = [row.get(part, 0.0) / GIB for row in rows]
        if any(values):
            axes.bar(places, values, bottom=bottom, width=0.7, color=COLOURS[part], label=part)
            bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    capacity = next((row["memory_capacity"] for row in rows if row.get("memory_capacity")), None)
    if capacity is not None:
        axes.axhline(capacity / GIB, color=EXPOSED, linewidth=1.2)
        axes.text(len(rows) - 0.5, capacity / GIB, " the card", color=EXPOSED, va="bottom", ha="right")
    for x, row in zip(places, rows, strict=True):
        over = row["outcome"] == "does not fit"
        text = in_gib(row["memory_total"], 1) if "memory_total" in row else "cannot tell"
        axes.text(x, bottom[x], text, ha="center", va="bottom", fontsize=7, color=EXPOSED if over else INK)
    _ticks(axes, rows, name)
    axes.set_ylabel("GiB on the fullest rank at its peak")
    axes.legend(frameon=False, fontsize=7, loc="upper left")


def _activations(axes: Any, rows: Sequence[Row], name: str) -> None:
    """The largest activations of any moment."""
    values = [row.get("largest_activations", 0.0) for row in rows]
    axes.bar(range(len(rows)), [value / GIB for value in values], width=0.7, color=COLOURS["activations"])
    for x, value in enumerate(values):
        axes.text(x, value / GIB, f"{in_gib(value, 2)}\n{value / 1e9:,.2f} GB", ha="center", va="bottom", fontsize=7)
    _ticks(axes, rows, name)
    axes.margins(y=0.14)
    axes.set_ylabel("GiB of activations at most")


def _ticks(axes: Any, rows: Sequence[Row], name: str) -> None:
    axes.set_xticks(range(len(rows)), [str(row[name]) for row in rows])
    axes.set_xlabel(name.replace("_", " "))


def _grid(axes: Any, rows: Sequence[Row], fields: Mapping[str, Sequence[Any]]) -> None:
    """Memory by both fields, coloured by the verdict."""
    from matplotlib.patches import Rectangle

    (down, ups), (across, steps) = fields.items()
    cells = {(row[down], row[across]): row for row in rows}
    for high, up in enumerate(ups):
        for wide, step in enumerate(steps):
            row = cells[up, step]
            colour = OUTCOMES.get(row["outcome"], NONE)
            axes.add_patch(Rectangle((wide - 0.47, high - 0.44), 0.94, 0.88, color=colour))
            text = f"{in_gib(row['memory_total'], 1)} GiB" if "memory_total" in row else "cannot tell"
            axes.text(wide, high - 0.08, text, ha="center", va="center", fontsize=9, color=INK)
            axes.text(wide, high + 0.22, row["outcome"], ha="center", va="center", fontsize=7, color=MUTE)
    axes.set(xlim=(-0.5, len(steps) - 0.5), ylim=(len(ups) - 0.5, -0.5))
    axes.set_xticks(range(len(steps)), [f"{across.replace('_', ' ')} {step}" for step in steps])
    axes.set_yticks(range(len(ups)), [f"{down.replace('_', ' ')} {up}" for up in ups])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
