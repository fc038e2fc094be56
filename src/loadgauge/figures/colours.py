"""Colours of the figures: the four groups of memory look the same here and on the page."""

from __future__ import annotations

PARTS = {
    "weights": "#2b5788",
    "optimizer": "#4476ae",
    "gradients": "#8ab3dc",
    "activations": "#b9632b",
    "loss": "#8a4315",
    "gathered": "#a3a8b0",
    "transient": "#6c727b",
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
    "fixed": "#a3a8b0",
}
"""Of what computes; communication is `EXPOSED` or `HIDDEN`."""
KINDS = {"F": "#3b6ea5", "B": "#c9763f", "BW": "#c9763f", "W": "#cbb65c"}
"""Of the pieces of work of a pipeline schedule."""
COMPUTE, EXPOSED, HIDDEN, IDLE = "#3b6ea5", "#c23b2e", "#dadbd6", "#e7e7e2"
INK, MUTE, LINE = "#16191e", "#5f6670", "#e5e5e0"
