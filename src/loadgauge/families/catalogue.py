"""The models that come with loadgauge: published configs, in `data/models`, each with its source."""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Iterable
from typing import Any

import msgspec

from loadgauge.errors import ConfigError, closest
from loadgauge.families.hf import decode, from_dict, from_hf
from loadgauge.families.reader import shown
from loadgauge.package_data import list_data, read_data
from loadgauge.spec.model import ModelSpec


class ModelSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a shipped config comes from: a Hugging Face repository or a paper."""

    repository: str = ""
    paper: str = ""
    note: str = ""

    def __str__(self) -> str:
        origin = f"huggingface.co/{self.repository}" if self.repository else self.paper
        return f"{origin} ({self.note})" if self.note else origin


@functools.cache
def _names() -> frozenset[str]:
    return frozenset(list_data("models", ".json"))


@functools.cache
def models() -> tuple[str, ...]:
    """The names in the catalogue, sizes in order of size.

    >>> [name for name in models() if name.startswith("llama-2")]
    ['llama-2-7b', 'llama-2-13b', 'llama-2-70b']
    """
    return tuple(sorted(_names(), key=_natural))


def _natural(name: str) -> list[tuple[int, float, str]]:
    """Sorts "70m" before "1b", and "7b" before "13b"."""
    scale = {"m": 1e-3, "b": 1.0, "t": 1e3}
    return [
        (0, float(number) * scale.get(letter, 1.0), letter) if number else (1, 0.0, word)
        for number, letter, word in re.findall(r"(\d+(?:\.\d+)?)([mbt]?)(?![a-z])|([a-z]+|.)", name)
    ]


@functools.cache
def model_sources() -> dict[str, ModelSource]:
    """The source of each shipped config, by name.

    >>> str(model_sources()["llama-2-7b"])
    'huggingface.co/meta-llama/Llama-2-7b-hf'
    """
    return msgspec.convert(tomllib.loads(read_data("models/SOURCES.toml")), dict[str, ModelSource])


def _source(name: str) -> ModelSource:
    """One of `model_sources`; the others are not parsed."""
    entry = read_data("models/SOURCES.toml").partition(f'["{name}"]\n')[2].partition("\n[")[0]
    return msgspec.convert(tomllib.loads(entry), ModelSource)


@functools.cache
def model(name: str) -> ModelSpec:
    """A shipped model by its name, or by the Hugging Face repository it comes from; capitals do not matter.

    >>> model("meta-llama/Llama-2-7b-hf").name
    'llama-2-7b'
    >>> model("llama2-7b")
    Traceback (most recent call last):
    loadgauge.errors.ConfigError: no model is called 'llama2-7b'; did you mean llama-2-7b, llama-7b or llama-2-70b?
    """
    known = _known(name)
    if known is None:
        raise ConfigError(f"no model is called {shown(name)}{_hint(name, models())}")
    spec = from_dict(config(known), f"data/models/{known}.json", known)
    # The class defaults that a published config leaves out are what its publisher means; nothing of it is assumed.
    return msgspec.structs.replace(spec, defaults=(), source=str(_source(known)))


def config(name: str) -> dict[str, Any]:
    """The `config.json` of a shipped model.

    >>> config("llama-2-7b")["hidden_size"]
    4096
    """
    file = f"models/{name}.json"
    content: dict[str, Any] = decode(read_data(file).encode(), f"data/{file}")
    return content


def find_model(text: str) -> ModelSpec:
    """The model that a user means: a name in the catalogue, a path to a `config.json`, or the folder that holds one.

    A name in the catalogue comes first; write `./gpt2` for a folder of that name.
    """
    if _known(text) is not None:
        return model(text)
    if text.startswith((".", "/")) or text.endswith(".json") or os.path.exists(text):
        return from_hf(text)
    raise ConfigError(f"{shown(text)} is neither a model in the catalogue nor a file{_hint(text, models())}")


def _known(name: str) -> str | None:
    lowered = name.lower()
    if lowered in _names():
        return lowered
    for known, source in model_sources().items():
        if source.repository and source.repository.lower() == lowered:
            return known
    return None


def _hint(name: str, known: Iterable[str]) -> str:
    close = closest(name.lower().rpartition("/")[2], known, 3, cutoff=0.5)
    if not close:
        return "; `loadgauge models` lists them"
    return f"; did you mean {', '.join(close[:-1])}{' or ' if close[1:] else ''}{close[-1]}?"
