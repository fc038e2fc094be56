"""Colours of the plots and of the notebook; the page has them in `web/static/css/tokens.css`, and a test keeps them equal."""

from collections.abc import Iterable

PARTS = {
    "weights": "#2b5788",
    "optimizer": "#4476ae",
    "gradients": "#8ab3dc",
    "activations": "#b05a24",
    "loss": "#8a4315",
    "gathered": "#a3a8b0",
    "transient": "#6c727b",
    "evaluation": "#3f7f8c",
    "outside": "#cbb65c",
}
"""Of the memory's parts, from the bottom up: states blue, activations orange, temporary grey, outside yellow."""
DARK = ("weights", "optimizer", "activations", "loss", "transient")
"""Parts that carry white letters."""
LANES = {
    "matmul": "#2b5788",
    "attention": "#4476ae",
    "memory-bound": "#8ab3dc",
    "optimizer": "#cbb65c",
    "host": "#a3a8b0",
    "fixed": "#a3a8b0",
}
"""Of what computes; communication is `EXPOSED` or `HIDDEN`."""
KINDS = {"F": "#3b6ea5", "B": "#c9763f", "BW": "#c9763f", "W": "#cbb65c"}
"""Of the pieces of work of a pipeline schedule."""
COMPUTE, EXPOSED, HIDDEN, IDLE = "#3b6ea5", "#c23b2e", "#dadbd6", "#e7e7e2"
INK, MUTE, LINE = "#16191e", "#5f6670", "#e5e5e0"


def paint(names: Iterable[str], *, named: bool = True) -> dict[str, str]:
    """Return a colour for each name: the one of its part or lane, where `named`, else another one in turn.

    >>> paint(["weights", "somewhere"])
    {'weights': '#2b5788', 'somewhere': '#4476ae'}
    """
    turns = tuple(PARTS.values())
    return {name: (named and (LANES | PARTS).get(name)) or turns[turn % len(turns)] for turn, name in enumerate(names)}
