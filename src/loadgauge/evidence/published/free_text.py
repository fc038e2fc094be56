"""`other_flags`, a source's own words: phrases between semicolons, some of them `key=value`."""

from __future__ import annotations

import re

import msgspec


def named(text: str, words: str) -> bool:
    """Return whether a text has these words as whole words, whatever the case; a hyphen joins words.

    >>> named("NeMo (24.07 container)", "nemo"), named("Megatron-DeepSpeed", "DeepSpeed"), named("ReTRLm", "TRL")
    (True, False, False)
    """
    return re.search(rf"(?<![\w-]){re.escape(words)}(?![\w-])", text, re.IGNORECASE) is not None


class Flags(msgspec.Struct, frozen=True):
    """The phrases of one row.

    >>> flags = Flags.of("no comm overlap; mtp-num-layers=1; torch.compile")
    >>> flags.says("comm overlap"), flags.value("mtp-num-layers"), flags.value("vocab-size")
    (True, '1', None)
    """

    phrases: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Flags:
        """Split at semicolons."""
        return cls(tuple(phrase for part in text.split(";") if (phrase := part.strip())))

    def says(self, words: str) -> bool:
        """Return whether a phrase has these words in it, whatever the case."""
        return any(words.lower() in phrase.lower() for phrase in self.phrases)

    def has(self, name: str) -> bool:
        """Return whether there is a switch or a key of exactly that name; dashes and underscores are the same."""
        return any(_key(phrase.partition("=")[0]) == _key(name) for phrase in self.phrases)

    def value(self, name: str) -> str | None:
        """Return what follows `name=`."""
        pairs = (phrase.partition("=") for phrase in self.phrases)
        return next((value.strip() for key, equals, value in pairs if equals and _key(key) == _key(name)), None)

    def number(self, name: str) -> int | None:
        """Return what follows `name=`, where it is a whole number."""
        value = self.value(name)
        return int(value) if value is not None and value.isdecimal() and len(value) < 9 else None

    def after(self, pattern: str) -> int | None:
        """The whole number in the first group of a pattern, in any phrase."""
        matches = (re.search(pattern, phrase) for phrase in self.phrases)
        return next((int(match[1]) for match in matches if match), None)


def _key(text: str) -> str:
    return text.strip().lstrip("-").replace("-", "_").lower()


def chunks_of(layout: str) -> tuple[tuple[int, bool], ...]:
    """Megatron-LM's pipeline layout, as layers of each chunk in order and whether it holds a multi-token prediction layer.

    E embedding, t transformer layer, m multi-token prediction layer, L loss, | end of a chunk, *n a repeat.

    >>> [layers for layers, _ in chunks_of("Et*4|(t*4|)*2tmL")]
    [4, 4, 4, 1]
    >>> chunks_of("Et|tmL")[-1]
    (1, True)
    """
    text = layout.replace(" ", "")
    while (group := re.search(r"\(([^()]*)\)\*(\d+)", text)) is not None:
        text = text[: group.start()] + group[1] * min(int(group[2]), 1000) + text[group.end() :]
    text = re.sub(r"([Etm|L])\*(\d+)", lambda match: match[1] * min(int(match[2]), 1000), text)
    return tuple((part.count("t"), "m" in part) for part in text.split("|"))
