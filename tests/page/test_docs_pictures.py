"""The pictures in the docs show the page as it is: taken anew, they say what the docs' own say."""

from __future__ import annotations

import importlib
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="the page is driven with playwright, which is missing")
pytest.importorskip("starlette", reason="the page needs the extra `web`")

from driving import NEEDS_CHROMIUM, document

DOCS = Path(__file__).parents[2] / "docs"
sys.path.append(str(DOCS))
pictures: Any = importlib.import_module("pictures")

NUMBER = re.compile(r"\d[\d,.]*")
COMMAND = re.sub(r"(?:^|&)([a-z-]+)=([^&]*)", r" --\1 \2", pictures.RUN).replace(
    " --sequence-parallel true", " --sequence-parallel"
)


def size(picture: bytes) -> tuple[int, int]:
    """Width and height of a PNG."""
    width, height = struct.unpack(">II", picture[16:24])
    return width, height


def shown(words: str) -> list[float]:
    """The numbers that a text shows."""
    return [float(each.replace(",", "").rstrip(".")) for each in NUMBER.findall(words)]


@pytest.mark.long
@NEEDS_CHROMIUM
@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_in_the_docs_shows_the_page_as_it_is(name: str, browser: Any, address: str) -> None:
    """If it is red: `make pictures`."""
    kept, taken = (DOCS / f"page-{name}.png").read_bytes(), pictures.take(browser, address, name)
    assert size(kept) == size(taken) == (pictures.WIDTH, pictures.HEIGHT)
    assert min(len(kept), len(taken)) > 50_000  # a blank one has a few thousand bytes
    before, now = pictures.said(kept), pictures.said(taken)
    assert NUMBER.sub("", before) == NUMBER.sub("", now)
    assert shown(before) == pytest.approx(shown(now), rel=0.02)
    memory = document(f"estimate{COMMAND.replace(' --model', '', 1)}")["memory"]
    assert shown(now.split("\n", 2)[2])[0] == pytest.approx(memory["total"] / 2**30, rel=0.01)
    assert (re.search("[一-鿿]", now) is not None) == (name == "zh")
    assert name == "zh" or {"Where every byte goes", "Memory through one step"} <= {
        *now.splitlines()
    }  # as the docs say


def test_every_picture_of_the_docs_is_taken_by_them_and_is_shown() -> None:
    assert {path.name for path in DOCS.rglob("*.png")} == {f"page-{name}.png" for name in pictures.PICTURES}
    text = "".join(path.read_text(encoding="utf-8") for path in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"])
    assert set(re.findall(r"!\[[^\]]*\]\([^)]*?(page-\w+\.png)\)", text)) <= {
        f"page-{name}.png" for name in pictures.PICTURES
    }
