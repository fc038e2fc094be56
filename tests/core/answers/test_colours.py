"""The plots and the page paint the same things in the same colours, each from a file of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import loadgauge.page
from loadgauge.core.answers.figures.colours import COMPUTE, EXPOSED, HIDDEN, IDLE, KINDS, PARTS

CSS = Path(loadgauge.page.__file__).parent / "static" / "css" / "tokens.css"
LIGHT = dict(
    reversed(re.findall(r"--([\w-]+): (#\w{6});", CSS.read_text(encoding="utf-8")))
)  # the dark theme comes later
OTHERS = {
    "compute": COMPUTE, "exposed": EXPOSED, "hidden": HIDDEN, "idle": IDLE, "forward": KINDS["F"], "backward": KINDS["B"],
    "weight-pass": KINDS["W"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "colour"), [*PARTS.items(), *OTHERS.items()])
def test_a_colour_is_that_of_the_page(name: str, colour: str) -> None:
    assert LIGHT[name] == colour
