"""Every claim of the five articles is answered by the command that docs/articles.md names, which runs here."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from article_claims import FIGURES
from command_line import typed

ROOT = Path(__file__).parents[3]
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 384.00 MiB. GPU 0 has a total capacity of 31.75 GiB of which"
    " 112.00 MiB is free. Including non-PyTorch memory, this process has 31.63 GiB memory in use. Of the allocated memory 30.90"
    " GiB is allocated by PyTorch, and 120.00 MiB is reserved by PyTorch but unallocated.\n"
)


@functools.cache
def generator() -> ModuleType:
    """docs/articles.py."""
    spec = importlib.util.spec_from_file_location("docs_articles", ROOT / "docs" / "articles.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def printed(command: tuple[str, ...]) -> str:
    """What a command prints, on one line; it must not fail."""
    found = typed(list(command))
    assert found.code in (0, 1), found.err
    assert not found.err, found.err
    return " ".join(found.out.split())


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The commands run in a folder of their own, which has the documentation and an error message."""
    place, before = tmp_path_factory.mktemp("articles"), Path.cwd()
    (place / "docs").symlink_to(ROOT / "docs")
    (place / "oom.txt").write_text(OUT_OF_MEMORY, encoding="utf-8")
    os.chdir(place)
    yield
    os.chdir(before)


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "articles.md").read_text(encoding="utf-8") == generator().page(), (
        "run python docs/articles.py"
    )


def test_there_are_119_claims_and_few_are_left_open() -> None:
    found = generator().items()
    assert len({item.number for item in found}) == len(found) == 119
    assert {item.verdict for item in found} <= {"works", "missing"}
    assert sum(item.verdict != "missing" for item in found) >= 115


@pytest.mark.parametrize("item", generator().items(), ids=lambda item: item.number)
def test_a_claim_is_answered(item: tuple[str, str, str, str, tuple[str, ...]]) -> None:
    claim = generator().Item(*item)
    if claim.page:
        text = (ROOT / "docs" / claim.page).read_text(encoding="utf-8")
    else:
        text = printed(tuple(claim.words))
    plain = text.replace("\N{BOX DRAWINGS LIGHT HORIZONTAL}", "")
    for said in claim.says:
        assert said in plain, f"loadgauge {claim.command}: {plain[:3000]}"
    for figure in FIGURES.get(claim.number, ()):
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", plain), f"{figure}: {plain[:3000]}"
