"""One figure, or all of them on one sheet, written to a file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loadgauge.core.answers.figure import Figure, plotted
from loadgauge.core.answers.figures.colours import EXPOSED, INK, LINE, MUTE
from loadgauge.core.answers.figures.schedule import STAGES
from loadgauge.core.base import ConfigError, in_gib, lists, refuse, seconds
from loadgauge.core.definitions.layout.axes import RANK_AXES
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.resolve.setup import Setup
from loadgauge.core.text.estimate.setup import batch_words, unit
from loadgauge.sheets.plot import blocks, steps
from loadgauge.sheets.plot.forms import FORMS

OWN: dict[str, Callable[[Any, Estimate], None]] = {
    "treemap": blocks.draw,
    "moments": steps.draw_moments,
    "lanes": steps.draw_lanes,
    "roofline": steps.draw_roofline,
    "schedule": steps.draw_schedule,
}
"""Figures that more is drawn in than their form has; others are drawn by it (`forms`)."""
ENDINGS = (".svg", ".png", ".pdf")
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTE,
    "xtick.color": MUTE,
    "ytick.color": MUTE,
    "text.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "loadgauge",
}


def plot(setup: Setup, result: Estimate, file: Path, figure: str = "all") -> None:
    """Write one of the figures (`plotted`), or all that can be drawn, to an .svg, .png or .pdf file.

    Raises `ConfigError` for another ending, a figure that this estimate lacks, or a missing matplotlib.
    """
    choices = plotted()
    refuse(
        figure != "all" and choices[figure].needs == "time" and result.time is None,
        f"the figure '{figure}' needs a time: give --gpu, and links that are known",
    )
    with new_figure(file) as make:
        write(_sheet(make, result) if figure == "all" else _single(make, result, choices[figure]), file)


@contextmanager
def new_figure(file: Path, size: tuple[float, float] | None = None) -> Iterator[Any]:
    """Yield matplotlib's class of figures, or a figure of a size [inches], in the style of all of them.

    Raises `ConfigError` where the file has another ending than `ENDINGS`, or matplotlib is missing.
    """
    refuse(file.suffix.lower() not in ENDINGS, f"{file}: a figure is written as {', '.join(ENDINGS)}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'loadgauge[plot]'") from None
    with matplotlib.rc_context(STYLE):
        yield Figure if size is None else Figure(figsize=size, layout="constrained")


def write(figure: Any, file: Path) -> None:
    """Write a figure. Raises `ConfigError` where the file cannot be written."""
    try:
        # No date: the same run is the same file.
        figure.savefig(file, dpi=160, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None


def _draw(sheet: Any, result: Estimate, drawn: Figure, size: int) -> None:
    """Draw a figure with its heading into a sheet, or a part of one."""
    axes = sheet.subplots()
    if drawn.name in OWN:
        OWN[drawn.name](axes, result)
    elif (data := drawn.data(result)) is not None:
        FORMS[drawn.form](axes, data)
    sheet.suptitle(drawn.title, x=0.012, ha="left", fontsize=size, fontweight="bold")


def _single(figure_of: Any, result: Estimate, drawn: Figure) -> Any:
    height = 2 + 0.28 * min(STAGES, result.layout.pp) if drawn.needs == "stages" else 4.8
    figure = figure_of(figsize=(8, height), layout="constrained")
    _draw(figure, result, drawn, 12)
    return figure


def _sheet(figure_of: Any, result: Estimate) -> Any:
    by_row = lists((each.row, each) for each in plotted().values() if each.has(result))
    by_stage = 1.2 + 0.24 * min(STAGES, result.layout.pp)
    heights = [by_stage if row == 3 else 4.3 if row == 1 else 3.5 for row in by_row]
    figure = figure_of(figsize=(13, 1.1 + sum(heights)), layout="constrained")
    rows = figure.subfigures(1 + len(heights), 1, height_ratios=[1.1, *heights])
    _headline(rows[0], result)
    for row, drawn in zip(rows[1:], by_row.values(), strict=True):
        for cell, each in zip(row.subfigures(1, len(drawn), wspace=0.03, squeeze=False)[0], drawn, strict=True):
            _draw(cell, result, each, 11)
    return figure


def _headline(figure: Any, result: Estimate) -> None:
    """Model and layout; then the verdict, the step and what it reaches."""
    layout, memory, time = result.layout, result.memory, result.time
    degrees = " ".join(f"{name} {getattr(layout, name)}" for name in RANK_AXES if getattr(layout, name) > 1)
    machine = f"{layout.gpus:,} x {result.gpu}" if result.gpu else f"{layout.gpus:,} GPUs"
    figure.text(
        0.012,
        0.8,
        f"{result.model.name} · {machine} · {degrees or 'one rank'} · ZeRO {layout.zero} · recompute"
        f" {layout.recompute} · {batch_words(result.model, layout.global_batch, layout.seq_len)} a step",
        fontsize=10,
        color=MUTE,
        va="center",
    )
    has = "" if memory.capacity is None else f" of {in_gib(memory.capacity, 1)}"
    verdict = {
        "fits": "It fits",
        "depends": "It depends",
        "tight": "It may fit",
        "does not fit": "It does not fit",
    }.get(memory.verdict, "Memory")
    texts = [(f"{verdict}: {in_gib(memory.total, 1)}{has} GiB", EXPOSED if memory.fits is False else "#1f7045")]
    if time is not None:
        texts += [(f"Step {seconds(time.step)}", INK), (f"MFU {time.mfu:.1%}", INK)]
        texts += [(f"{time.tokens_per_second_per_gpu:,.0f} {unit(result.model)}/s/GPU", INK)]
    for (text, colour), x in zip(texts, (0.012, 0.34, 0.48, 0.62), strict=False):
        figure.text(x, 0.35, text, fontsize=15, fontweight="bold", color=colour, va="center")
