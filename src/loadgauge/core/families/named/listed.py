"""Models beside the catalogue's configs, by the names that others give them: `data/models/NAMES.toml`, one line a model.

The file is searched for the line of a name, and only that line is parsed.
"""

import functools
import re
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from loadgauge.core.base.package_data import read_data, read_table

FILE, PARTS = "models/NAMES.toml", "models/TOWERS.toml"
_LINE = re.compile(r'^"([^"]+)" = \{hub = \[([^\]]*)\].*\}$', re.MULTILINE)
_TIMES = re.compile(r"(\w+)\*(\d+)")
_HOW = {
    "config": "as {} states its config.json",
    "class": "as its class in {} has them",
    "card": "as its publisher describes them; not compared with its config.json",
}


class Listed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the file, whose head says what its keys are."""

    hub: tuple[str, ...]
    date: str
    known: Literal["config", "class", "card"]
    base: str = ""
    config: dict[str, Any] = {}
    around: str = ""
    tower: int | None = None
    beside: dict[str, Any] = {}
    own: dict[str, Any] = {}
    seen: str = ""
    note: str = ""

    @property
    def how(self) -> str:
        """Source of its sizes, in words."""
        return _HOW[self.known].format(self.seen) + (f"; {self.note}" if self.note else "")

    @property
    def certain(self) -> bool:
        """Return whether its sizes are those of its config.json, and nothing of it is left out."""
        return self.known == "config" and not self.note

    @property
    def source(self) -> str:
        """Its first repository, the month it came out, and how its sizes are known."""
        where = f"huggingface.co/{self.hub[0]}" if self.hub else "in no repository"
        return f"{where} ({self.date}; sizes {self.how})"


@functools.cache
def _lines() -> dict[str, tuple[str, tuple[str, ...]]]:
    """The line of each name, and its repositories."""
    return {line[1]: (line[0], tuple(re.findall(r'"([^"]+)"', line[2]))) for line in _LINE.finditer(read_data(FILE))}


def repositories() -> dict[str, tuple[str, ...]]:
    """The repositories of each name.

    >>> repositories()["open-llama-3b"]
    ('openlm-research/open_llama_3b', 'openlm-research/open_llama_3b_v2')
    """
    return {name: hub for name, (_, hub) in _lines().items()}


@functools.cache
def _by_repository() -> dict[str, str]:
    return {hub.lower(): name for name, (_, hubs) in _lines().items() for hub in hubs}


def listed_name(text: str) -> str | None:
    """Return the name in the file that a text is, or is a repository of; capitals do not matter.

    >>> listed_name("01-ai/Yi-34B"), listed_name("yi-34b"), listed_name("gpt2")
    ('yi-34b', 'yi-34b', None)
    """
    lowered = text.lower()
    return lowered if lowered in _lines() else _by_repository().get(lowered)


def listed(name: str) -> Listed:
    """Return the line of a name; a `KeyError` where there is none.

    >>> listed("yi-34b").config["num_hidden_layers"], listed("falcon3-10b").base
    (60, 'falcon3-7b')
    """
    return msgspec.convert(_whole(tomllib.loads(_lines()[name][0])[name]), Listed)


def _whole(value: Any) -> Any:
    """A value with the parts that several models have in place of their names."""
    if not isinstance(value, dict):
        return value
    own = {key: _whole(each) for key, each in value.items()}
    return read_table(PARTS)[own.pop("as")] | own if "as" in own else own


def changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with other values for some keys, in its text model where it has one.

    >>> changed({"text_config": {"vocab_size": 8}}, {"vocab_size": 9})
    {'text_config': {'vocab_size': 9}}
    """
    inner = base.get("text_config")
    if isinstance(inner, dict):
        return {**base, "text_config": changed(inner, changes)}
    return {**base, **{key: _value(value) for key, value in changes.items()}}


def around(line: Listed, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a line from that of its text model."""
    if not line.around:
        return {**text, **line.beside}
    own = {key: value for key, value in text.items() if key != "architectures"}
    return {
        "model_type": line.around,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings", text.get("tie_embedding", False))),
        **line.beside,
        "text_config": own | line.beside.get("text_config", {}),
    }


def _value(value: Any) -> Any:
    """A value as the file writes it: TOML has no null, and lists of one entry are long."""
    if value == "null":
        return None
    times = _TIMES.fullmatch(value) if isinstance(value, str) else None
    return [times[1]] * int(times[2]) if times else value
