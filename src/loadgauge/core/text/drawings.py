"""The page's main figures as SVG in a few lines of text, for a notebook: no script, no file, redrawn while a slider moves."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from html import escape
from itertools import accumulate
from typing import Any

from loadgauge.core.answers.figure import figures
from loadgauge.core.answers.figures.colours import EXPOSED, HIDDEN, INK, LANES, LINE, MUTE, PARTS, paint
from loadgauge.core.answers.figures.lanes import lanes as lanes_of
from loadgauge.core.answers.figures.memory_phases import moments as moments_of
from loadgauge.core.base.units import GIB, amount, gib, seconds
from loadgauge.core.estimate.result import Estimate

Span = tuple[float, float, str, str]
"""Start, end, colour, words."""
WIDTH, LEFT, ROW = 640, 110, 18
"""Of a drawing, of the names at its left, and of a row [px]."""


def memory(result: Estimate, height: int = 180) -> str:
    """Draw the memory of the worst rank through a step, part upon part, below the line of what the card has.

    >>> from loadgauge import Layout, estimate
    >>> drawn = memory(estimate("gpt2", Layout(seq_len=1024)))
    >>> drawn.startswith("<svg"), drawn.count("<polygon") > 3
    (True, True)
    """
    moments = moments_of(result)
    times, *columns = zip(*moments["curve"]["rows"], strict=True)
    series = dict(zip(moments["curve"]["columns"][1:], columns, strict=True))
    return curves(
        f"memory through a step, up to {gib(max(map(sum, zip(*columns, strict=True))), 1)}",
        {"x": times, "series": series, "unit": "byte", "limit": moments["capacity"]},
        height,
    )


def curves(title: str, data: dict[str, Any], height: int = 180, *, stacked: bool = True) -> str:
    """Draw series as areas upon one another, or as lines, below the line of what is usable.

    >>> drawn = curves("", {"x": [0, 1], "series": {"a": [1, 2], "b": [3, 4]}, "unit": "s", "limit": None}, stacked=False)
    >>> drawn.count("<polyline"), "b: 4 s" in drawn
    (2, True)
    """
    series, limit, end = data["series"], data["limit"], data["x"][-1] or 1.0
    colours, below = paint(series), [0.0] * len(data["x"])
    whole = map(sum, zip(*series.values(), strict=True)) if stacked else map(max, series.values())
    highest = max([*whole, limit or 0]) * 1.04 or 1.0

    def corners(values: Iterable[float]) -> list[str]:
        pairs = zip(data["x"], values, strict=True)
        return [f"{WIDTH * x / end:.1f},{height * (1 - value / highest):.1f}" for x, value in pairs]

    shapes = []
    for name, values in series.items():
        above = [base + value for base, value in zip(below, values, strict=True)]
        if any(values):
            points = " ".join([*corners(above), *(reversed(corners(below)) if stacked else ())])
            kind, fill = ("polygon", "fill") if stacked else ("polyline", "fill='none' stroke")
            label = f"{escape(name)}: {amount(max(values), data['unit'])}"
            shapes.append(f"<{kind} points='{points}' {fill}='{colours[name]}'><title>{label}</title></{kind}>")
        below = above if stacked else below
    if limit:
        y = height * (1 - limit / highest)
        shapes.append(
            f"<line x1='0' x2='{WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='{EXPOSED}' stroke-dasharray='4 3'/>"
            f"<text x='{WIDTH}' y='{y - 3:.1f}' text-anchor='end' fill='{EXPOSED}'>{amount(limit, data['unit'], 1)}</text>"
        )
    return _svg(title, height, shapes)


def time(result: Estimate) -> str:
    """Draw where the time of a step goes: a row for each lane, with what nothing hides in red; empty without a time.

    >>> from loadgauge import estimate
    >>> "matmul" in time(estimate("gpt2", gpu="h100-sxm5-80gb")), time(estimate("gpt2"))
    (True, '')
    """
    if result.time is None:
        return ""
    rows = {
        row["lane"]: [
            (
                span["start"],
                span["end"],
                HIDDEN if span["hidden"] else LANES.get(row["lane"], EXPOSED),
                f"{row['lane']}: {seconds(span['end'] - span['start'])}{', hidden' if span['hidden'] else ''}",
            )
            for span in row["spans"]
        ]
        for row in lanes_of(result) or []
    }
    return spans(f"a step of {seconds(result.time.step)}", rows, max(result.time.step, 1e-12))


def spans(title: str, rows: Mapping[str, Iterable[Span]], end: float) -> str:
    """Draw what reaches from where to where in each row; the width is `end`.

    >>> spans("", {"a": [(0, 1, "red", "one")]}, 2).count("<rect")
    2
    """
    wide = WIDTH - LEFT
    shapes = [
        f"<text x='{LEFT - 6}' y='{row * ROW + ROW - 5}' text-anchor='end' fill='{INK}'>{escape(name)}</text>"
        + "".join(
            f"<rect x='{LEFT + wide * start / end:.1f}' y='{row * ROW + 2}' height='{ROW - 4}'"
            f" width='{max(wide * (stop - start) / end, 0.5):.1f}' fill='{colour}'><title>{escape(words)}</title></rect>"
            for start, stop, colour, words in each
        )
        for row, (name, each) in enumerate(rows.items())
    ]
    return _svg(title, len(rows) * ROW, shapes)


def bars(title: str, data: dict[str, Any]) -> str:
    """Draw a bar for each row, a colour for each of its parts.

    >>> drawn = bars("", {"rows": {"a": {"b": 2, "c": 1}}, "unit": "tokens", "limit": None})
    >>> drawn.count("<rect"), "b: 2 tokens" in drawn
    (3, True)
    """
    colours = paint(dict.fromkeys(part for parts in data["rows"].values() for part in parts))
    rows = {
        name: [
            (end - value, end, colours[part], f"{part}: {amount(value, data['unit'])}")
            for (part, value), end in zip(parts.items(), accumulate(parts.values()), strict=True)
        ]
        for name, parts in data["rows"].items()
    }
    return spans(title, rows, max([*(each[-1][1] for each in rows.values() if each), data["limit"] or 0]) or 1.0)


def drawn(result: Estimate) -> str:
    """Draw the figures of the notebook, each by its own function here or by its form, with the colours of memory."""
    own = {"moments": lambda: f"{memory(result)}<div>{legend(result)} GiB</div>", "lanes": lambda: time(result)}
    forms: dict[str, Callable[[str, Any], str]] = {
        "bars": bars,
        "lines": partial(curves, stacked=False),
        "areas": curves,
    }
    return "".join(
        own[each.name]() if each.name in own else forms[each.form](each.title, data)
        for each in figures()
        if "notebook" in each.shown and (data := each.data(result)) is not None
    )


def legend(result: Estimate) -> str:
    """Name the colours of the parts that there are."""
    return " ".join(
        f"<span style='white-space:nowrap'><span style='color:{colour}'>■</span> {escape(part)}"
        f" {result.memory.parts[part] / GIB:,.2f}</span>"
        for part, colour in PARTS.items()
        if result.memory.parts.get(part)
    )


def _svg(title: str, height: int, shapes: list[str]) -> str:
    return (
        f"<svg viewBox='0 -14 {WIDTH} {height + 16}' width='100%' style='max-width:{WIDTH}px;font:11px sans-serif'"
        f" role='img' aria-label='{escape(title)}'><text x='0' y='-3' fill='{MUTE}'>{escape(title)}</text>"
        f"<rect width='{WIDTH}' height='{height}' fill='none' stroke='{LINE}'/>{''.join(shapes)}</svg>"
    )
