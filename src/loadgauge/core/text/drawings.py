"""The page's main figures as SVG in a few lines of text, for a notebook: no script, no file, redrawn while a slider moves."""

from __future__ import annotations

from html import escape

from loadgauge.core.answers.figures.colours import EXPOSED, HIDDEN, INK, LANES, LINE, MUTE, PARTS
from loadgauge.core.answers.figures.lanes import lanes as lanes_of
from loadgauge.core.answers.figures.memory_phases import moments as moments_of
from loadgauge.core.base.units import GIB, gib, seconds
from loadgauge.core.estimate.result import Estimate

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
    rows, columns = moments["curve"]["rows"], moments["curve"]["columns"][1:]
    capacity = moments["capacity"]
    highest = max([sum(row[1:]) for row in rows] + ([capacity] if capacity else [])) * 1.04
    end = rows[-1][0] or 1.0
    below = [0.0] * len(rows)
    shapes = []
    for column, part in enumerate(columns, 1):
        above = [base + row[column] for base, row in zip(below, rows, strict=True)]
        if any(row[column] for row in rows):
            outline = [(row[0], value) for row, value in zip(rows, above, strict=True)]
            outline += [(row[0], value) for row, value in zip(reversed(rows), reversed(below), strict=True)]
            corners = " ".join(f"{WIDTH * t / end:.1f},{height * (1 - value / highest):.1f}" for t, value in outline)
            largest = max(row[column] for row in rows)
            shapes.append(
                f"<polygon points='{corners}' fill='{PARTS[part]}'><title>{escape(part)}: {gib(largest)}</title></polygon>"
            )
        below = above
    if capacity:
        y = height * (1 - capacity / highest)
        shapes.append(
            f"<line x1='0' x2='{WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='{EXPOSED}' stroke-dasharray='4 3'/>"
            f"<text x='{WIDTH}' y='{y - 3:.1f}' text-anchor='end' fill='{EXPOSED}'>{gib(capacity, 1)}</text>"
        )
    return _svg(f"memory through a step, up to {gib(max(sum(row[1:]) for row in rows), 1)}", height, shapes)


def time(result: Estimate) -> str:
    """Draw where the time of a step goes: a row for each lane, with what nothing hides in red; empty without a time.

    >>> from loadgauge import estimate
    >>> "matmul" in time(estimate("gpt2", gpu="h100-sxm5-80gb")), time(estimate("gpt2"))
    (True, '')
    """
    if result.time is None:
        return ""
    shapes, end = [], max(result.time.step, 1e-12)
    rows = lanes_of(result) or []
    for index, row in enumerate(rows):
        y = index * ROW
        colour = LANES.get(row["lane"], EXPOSED)
        shapes.append(
            f"<text x='{LEFT - 6}' y='{y + ROW - 5}' text-anchor='end' fill='{INK}'>{escape(row['lane'])}</text>"
        )
        shapes += [
            f"<rect x='{LEFT + (WIDTH - LEFT) * span['start'] / end:.1f}' y='{y + 2}' height='{ROW - 4}'"
            f" width='{max((WIDTH - LEFT) * (span['end'] - span['start']) / end, 0.5):.1f}'"
            f" fill='{HIDDEN if span['hidden'] else colour}'>"
            f"<title>{escape(row['lane'])}: {seconds(span['end'] - span['start'])}{', hidden' if span['hidden'] else ''}</title>"
            "</rect>"
            for span in row["spans"]
        ]
    return _svg(f"a step of {seconds(result.time.step)}", len(rows) * ROW, shapes)


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
