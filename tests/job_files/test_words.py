"""Words that tools share: each is read as what it means in its own tool, by the list behind docs/words.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "docs" / "words.py"
SPEC = importlib.util.spec_from_file_location("shared_words", FILE)
assert SPEC is not None
assert SPEC.loader is not None
shared = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(shared)
WORDS = {f"{one.tool} {one.lines}": one for one in shared.words()}


@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS.keys())
def test_a_word_means_what_it_means_there(word):
    assert word.read() == (word.tool, word.value)


def test_the_page_has_them_all():
    text = (FILE.parent / "words.md").read_text(encoding="utf-8")
    assert text == shared.page()
    asked = {
        "selective",
        "chunked",
        "offload",
        "zero",
        "sharding degree",
        "micro-batch",
        "global batch",
        "max_length",
        "packing",
    }
    assert {one.word for one in WORDS.values()} >= asked
