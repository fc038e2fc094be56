"""The design book names what is there, and every room and folder of the core has its place in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "loadgauge"
PAGES = sorted((ROOT / "docs" / "design").glob("*.md"))
PATH = re.compile(r"`((?:core|job_files|pytorch|page|fleets|sheets|train|evidence|data|docs|tests)/[\w/.-]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_are_there(page: Path) -> None:
    for path in PATH.findall(page.read_text(encoding="utf-8")):
        assert (PACKAGE / path).exists() or (ROOT / path).exists(), path


def test_forty_questions_have_a_place() -> None:
    rows = re.findall(
        r"^\| .*\? \| (.*) \|$", (ROOT / "docs/design/index.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) >= 40
    assert all(PATH.search(row) for row in rows)


def test_every_room_has_a_page_and_every_folder_of_the_core_a_row() -> None:
    rooms = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()}
    assert {page.stem.replace("-", "_") for page in PAGES} == rooms | {"index", "tried", "ways"}
    named = set(PATH.findall((ROOT / "docs/design/core.md").read_text(encoding="utf-8")))
    assert {
        f"core/{folder.name}" for folder in (PACKAGE / "core").iterdir() if folder.is_dir() and folder.name[0] != "_"
    } <= named
