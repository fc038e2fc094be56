"""Where every byte goes: blocks whose areas are bytes."""

from collections.abc import Iterator, Sequence
from typing import Any

from loadgauge.core.answers.figures.colours import DARK, PARTS
from loadgauge.core.answers.figures.treemap import treemap
from loadgauge.core.base.units import gib
from loadgauge.core.estimate.result import Estimate

Box = tuple[float, float, float, float]
"""Left, bottom, width, height."""
HEIGHT = 0.6
"""Of the whole, for a width of 1."""


def squares(sizes: Sequence[float], box: Box) -> list[Box]:
    """Divide a box into one for each size, the largest first, areas in proportion, as square as possible.

    Squarified treemap (Bruls, Huizing, van Wijk 2000): a row along the shorter side grows while its worst box gets no
    longer.

    >>> squares([2.0, 1.0, 1.0], (0.0, 0.0, 2.0, 2.0))
    [(0.0, 0.0, 1.0, 2.0), (1.0, 0.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)]
    """
    rest, (left, bottom, width, height) = list(sizes), box
    if not rest:
        return []
    scale = width * height / sum(rest)
    rest = [size * scale for size in rest]
    boxes: list[Box] = []
    while rest:
        side = min(width, height)

        count = 1
        while count < len(rest) and worst(rest[: count + 1], side) <= worst(rest[:count], side):
            count += 1
        areas = rest[:count]
        thick, offset = sum(areas) / side, 0.0
        for area in areas:
            length = area / thick
            upright = width >= height
            boxes.append((left, bottom + offset, thick, length) if upright else (left + offset, bottom, length, thick))
            offset += length
        if width >= height:
            left, width = left + thick, width - thick
        else:
            bottom, height = bottom + thick, height - thick
        rest = rest[count:]
    return boxes


def worst(areas: Sequence[float], side: float) -> float:
    """Return the largest aspect ratio of boxes of these areas along a side of length `side`.

    >>> worst([2.0, 2.0], 2.0), worst([1.0, 3.0], 2.0)
    (2.0, 4.0)
    """
    thick = sum(areas) / side
    return max(max(thick * thick / area, area / (thick * thick)) for area in areas)


def leaves(node: dict[str, Any], box: Box, depth: int) -> Iterator[tuple[dict[str, Any], Box]]:
    """Yield the blocks to draw with their boxes: children down to a depth."""
    children = sorted(node["children"], key=lambda child: -child["bytes"])
    if depth == 0 or len(children) < 2:
        yield (leaves_of(node), box)
    else:
        for child, inner in zip(children, squares([child["bytes"] for child in children], box), strict=True):
            yield from leaves(child, inner, depth - 1)


def leaves_of(node: dict[str, Any]) -> dict[str, Any]:
    """Return a block under the name of its only child, where it has one."""
    while len(node["children"]) == 1:
        node = node["children"][0]
    return node


def draw(axes: Any, result: Estimate) -> None:
    """Draw the treemap of the worst rank's memory at its peak, down to the operations that keep something."""
    parts = sorted(treemap(result), key=lambda part: -part["bytes"])
    for part, box in zip(parts, squares([part["bytes"] for part in parts], (0.0, 0.0, 1.0, HEIGHT)), strict=True):
        name = part["part"]
        letters = "white" if name in DARK else "#16191e"
        for node, (left, bottom, width, height) in leaves(part, box, 2):
            axes.add_patch(_box(left, bottom, width, height, PARTS[name]))
            label = node["label"] if node is not part else name
            if width > 0.09 and height > 0.05:
                axes.text(
                    left + width / 2,
                    bottom + height / 2,
                    f"{_short(label, width)}\n{gib(node['bytes'])}",
                    ha="center",
                    va="center",
                    color=letters,
                    fontsize=7.5,
                    linespacing=1.35,
                )
        left, bottom, width, height = box
        axes.add_patch(_box(left, bottom, width, height, "none", 1.6))
    axes.set(xlim=(0, 1), ylim=(0, HEIGHT))
    axes.set_axis_off()
    memory = result.memory
    axes.set_title(
        f"{gib(memory.total, 1)} on a rank of stage {memory.rank.stage}, at its peak: {memory.moment}",
        loc="left",
        fontsize=8,
        color="#5f6670",
    )


def _box(left: float, bottom: float, width: float, height: float, colour: str, line: float = 0.5) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((left, bottom), width, height, facecolor=colour, edgecolor="white", linewidth=line)


def _short(label: str, width: float) -> str:
    """A label that stays within its block."""
    room = max(6, int(width * 82))
    return label if len(label) <= room else label[: room - 1] + "…"
