"""The language of a terminal: English, or Chinese where it is asked for and somebody has the words."""

import os
from collections.abc import Sequence

from loadgauge.core.base.hooks import provider

ASKED = ("LOADGAUGE_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
"""Variables that say the language, the first one that is set."""
CHOSEN: list[str] = []
"""The language that `--lang` names on this command line."""


def choose(words: Sequence[str]) -> list[str]:
    """Return a command line without `--lang LANGUAGE`, which is kept in `CHOSEN`.

    >>> choose(["gpt2", "--lang", "en", "--brief"]), CHOSEN
    (['gpt2', '--brief'], ['en'])
    """
    flat = [part for word in words for part in (word.split("=", 1) if word.startswith("--lang=") else [word])]
    at = flat.index("--lang") if "--lang" in flat else len(flat)
    CHOSEN[:] = flat[at + 1 : at + 2]
    return [*flat[:at], *flat[at + 2 :]]


def said(text: str, name: str = "lines") -> str:
    """Return a text in the language that is asked for, line by line. name: `lines` of an answer, or `errors`

    >>> said("FITS")
    'FITS'
    """
    language = next(filter(None, (*CHOSEN, *map(os.environ.get, ASKED))), "")
    words = provider("WORDS") if language.lower().startswith("zh") else None
    return text if words is None else "\n".join(words.said(line, name) for line in text.split("\n"))
