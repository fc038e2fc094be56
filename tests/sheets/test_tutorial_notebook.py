"""The tutorial that is a notebook: its cells run, one after another, and what it shows is small and as they print it."""

from __future__ import annotations

import contextlib
import io
import json
import re
from typing import Any

import pytest

from documented import ROOT

FILE = ROOT / "docs" / "tutorials" / "notebook.ipynb"


def numbers_apart(text: str) -> str:
    """A text without its numbers, which a better prediction moves."""
    return re.sub(r"\d[\d.,]*", "#", text)


@pytest.mark.long
def test_the_cells_run_and_print_what_is_shown() -> None:
    for needed in ("torch", "ipywidgets"):
        pytest.importorskip(needed)
    cells = json.loads(FILE.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec("".join(cell["source"]), names)  # the repository's own file
        shown = "".join("".join(output["text"]) for output in cell["outputs"])
        assert numbers_apart(out.getvalue()) == numbers_apart(shown)
        assert shown
    assert names["result"].memory.fits
    assert names["plan"].best.estimate.memory.fits
    assert FILE.stat().st_size < 20_000
