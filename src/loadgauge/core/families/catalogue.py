"""The models that come with loadgauge: published configs, in `data/models`, each with its source."""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from loadgauge.core.base import (
    ConfigError,
    closest,
    list_data,
    no_function,
    parse_count,
    read_data,
    read_start,
    read_table,
)
from loadgauge.core.base.files import place_of
from loadgauge.core.definitions.model.model import ModelSpec, Tower
from loadgauge.core.families.hf import LARGEST_FILE, decode, from_dict, from_hf
from loadgauge.core.families.hub import REPOSITORY, cached, fetch
from loadgauge.core.families.named import listed as names
from loadgauge.core.families.reader import shown
from loadgauge.core.families.shapes import how as describe_shape, is_shape, read as read_shape

if TYPE_CHECKING:
    from loadgauge.core.families.named.derived import Derived


_PART_OF = re.compile(
    r"(/(hf|llm|model|models|final|merged|release|converted|main|snapshots|[0-9a-f]{40}|(iter|step|checkpoint)[-_]?\d+))+$",
    re.IGNORECASE,
)
"""Folders of a model that are not called by its name."""
FILES = (".py", ".ipynb", ".yaml", ".yml", ".toml", ".json", ".sh", ".txt", ".csv")
"""Endings of files, which no model has."""
MANY = 8
"""Names that a message lists."""


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
    return msgspec.convert(read_table("models/SOURCES.toml"), dict[str, ModelSource])


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
    loadgauge.core.base.errors.ConfigError: no model is called 'llama2-7b'; did you mean llama-2-7b, llama-7b or llama-2-70b?
    """
    id = _catalogue_name(name)
    if id is None:
        if (listed := names.listed_name(name)) is not None:
            return _listed(listed)
        raise ConfigError(f"no model is called {shown(name)}{_hint(name, models())}")
    spec = from_dict(config(id), f"data/models/{id}.json", id)
    # The class defaults that a published config leaves out are what its publisher means; nothing of it is assumed.
    return msgspec.structs.replace(spec, defaults=(), source=str(_source(id)))


def _listed(name: str) -> ModelSpec:
    line = names.listed(name)
    spec = from_dict(config(name), f"data/{names.FILE}: {name}", name)
    towers = (
        (Tower("vision_config", line.tower or None),) if line.tower is not None and not line.beside else spec.towers
    )
    return msgspec.structs.replace(spec, defaults=(), towers=towers, source=line.source)


def config(name: str) -> dict[str, Any]:
    """The `config.json` of a model that is shipped or listed by its name.

    >>> config("llama-2-7b")["hidden_size"], config("yi-34b")["hidden_size"]
    (4096, 7168)
    """
    if name not in _names():
        line = names.listed(name)
        return names.around(line, names.changed(config(line.base) if line.base else {}, line.config))
    file = f"models/{name}.json"
    content: dict[str, Any] = decode(read_data(file).encode(), f"data/{file}")
    return content


class Found(msgspec.Struct, frozen=True):
    """A model that a name was read as. `how`: in words, empty where the name is its own; `stored`: how the copy that was named
    is quantised (the words of `derived.split_stored`), empty where it is not."""

    spec: ModelSpec
    how: str = ""
    stored: str = ""
    usual: tuple[tuple[str, str | int], ...] = ()
    """Fields of a job as its trainers have them, where they are not said."""


def find_model(text: str) -> ModelSpec:
    """The model that a user means, as `find` finds it without asking the hub."""
    return find(text).spec


def names_file(text: str) -> bool:
    """Return whether the name of a model is a path, if no model of the catalogue has it.

    >>> names_file("./gpt2"), names_file("gpt2")
    (True, False)
    """
    if _catalogue_name(text) is not None:
        return False
    return text.startswith((".", "/")) or text.endswith(".json") or os.path.exists(place_of(text)[0])


def is_named(text: str) -> bool:
    """Return whether a text names a model, as `find` takes it, or a file: without reading it, or looking for names like it.

    >>> [is_named(text) for text in ("gpt2", "Qwen/Qwen3-8B", "gpt2:layers=24", "llama:7B", "xyzzy")]
    [True, True, True, True, False]
    """
    if _RESIZED.search(text):
        return is_named(_RESIZED.split(text, 1)[0])
    local = os.path.isfile(os.path.join(text, "config.json")) or (text.endswith(".json") and os.path.isfile(text))
    return (
        local or _catalogue_name(text) is not None or is_shape(text) or _alike(text) is not None or bool(cached(text))
    )


def find(text: str, hub: bool = False) -> Found:
    """Find the model that a user means: a name in the catalogue, a path to a `config.json` or the folder that holds one, or
    a repository on the Hugging Face hub; or a family and sizes (`loadgauge.core.families.shapes`).

    A name in the catalogue comes first; write `./gpt2` for a folder of that name. A repository is looked for in the local
    cache, then among the names that stand for a shipped model (`derived`), then, where `hub` allows it, on the hub. Raises
    `ConfigError` with the closest names.

    >>> found = find("NousResearch/Hermes-3-Llama-3.1-8B")
    >>> found.spec.name, found.how
    ('llama-3.1-8b', 'NousResearch/Hermes-3-Llama-3.1-8B has its sizes, by its name')
    """
    if _catalogue_name(text) is not None:
        return Found(model(text))
    if is_shape(text):
        spec, shape = read_shape(text)
        return Found(spec, describe_shape(text, shape))
    if _RESIZED.search(text):
        return _resized(text)
    if text.lower().endswith(".gguf") and os.path.isfile(text):
        return _of_header(text)
    if names_file(text) and not _elsewhere(text) and not text.lower().endswith(".gguf"):
        return Found(from_hf(text))
    from loadgauge.core.families.named.derived import split_stored  # most models are named by the catalogue's own names

    stored = split_stored(text)[1]
    if (file := cached(text)) is not None:
        spec = from_hf(file, text.rpartition("/")[2].lower())
        return Found(spec, f"config.json of {text} in the local Hugging Face cache", _stored(config_of(file)) or stored)
    if (alike := _alike(text)) is not None:
        return _as(text, alike)
    if hub:
        content = decode(fetch(text), f"huggingface.co/{text}")
        spec = from_dict(content, f"huggingface.co/{text}", text.rpartition("/")[2].lower())
        return Found(spec, f"config.json of {text} on huggingface.co", _stored(content) or stored)
    raise _unknown(text)


def _of_header(file: str) -> Found:
    """The model of a GGUF file, by the sizes in its header, else by the name there or of the file."""
    from loadgauge.core.families.named.derived import split_stored
    from loadgauge.core.families.named.gguf import header

    head = header(file)
    stored = head.stored or split_stored(file)[1] or "gguf"
    if head.config:
        return Found(
            from_dict(head.config, file, head.name or os.path.basename(file)), "the header of the file", stored
        )
    alike = next((alike for name in (head.name.replace(" ", "-"), file) if name and (alike := _alike(name))), None)
    if alike is None:
        raise _unknown(file)
    return msgspec.structs.replace(_as(file, alike), stored=stored)


_RESIZED = re.compile(r":(?=[a-z_-]+=)")
_SIZED = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "kv-heads": ("num_key_value_heads",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "vocab": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top-k": ("num_experts_per_tok",),
}
"""Sizes of a model by the flags, and their keys in configs."""


def _resized(text: str) -> Found:
    """A model with some sizes of its config changed, such as one cut or made deeper. Lists of its layers are cut, or go round.

    >>> len(find("qwen3.5-27b:layers=72").spec.pattern)
    72
    """
    base, words = _RESIZED.split(text, 1)
    content = keys(base)
    text_config = content.get("text_config")
    own = text_config if isinstance(text_config, dict) else content
    changes: dict[str, Any] = {}
    for word in words.split(","):
        size, _, value = word.strip().partition("=")
        key = next((key for key in _SIZED.get(size.replace("_", "-"), ()) if key in own), None)
        if key is None:
            raise ConfigError(f"{base} has no {size[:40]!r} to change (known: {', '.join(_SIZED)})", key="model")
        number = int(parse_count(value, size))
        for name, each in own.items() if size == "layers" else ():
            if name.endswith("pattern") and isinstance(each, str):
                changes[name] = (each * (number // len(each) + 1))[:number]
            elif isinstance(each, list) and len(each) == own[key]:
                changes[name] = [each[layer % len(each)] for layer in range(number)]
        changes[key] = number
    spec = from_dict(names.changed(content, changes), text, text)
    return Found(msgspec.structs.replace(spec, defaults=(), source="sizes given"), f"{base} but for {words}")


def _elsewhere(text: str) -> bool:
    """Return whether a path is one of another machine, as scripts have them: absolute, or of several parts, and not there."""
    parts = [part for part in text.split("/") if part not in ("", ".", "..")]
    is_path = not text.endswith((".json", ".py")) and (text.startswith("/") or len(parts) > 1)
    return is_path and not os.path.exists(text) and _alike(text) is not None


def _alike(text: str) -> Derived | None:
    """The model whose sizes a name has, by the names that are listed, else by what the name says; None where it does not say."""
    from loadgauge.core.families.named.derived import Derived, derive, split_stored

    if (listed := names.listed_name(text)) is not None:
        return Derived(listed, {}, split_stored(text)[1])
    last = _PART_OF.sub("", text.rstrip("/"))
    return derive(last, repositories()) or _sole(last)


def _sole(text: str) -> Derived | None:
    """The one model whose name goes on from a text with a size, that of its experts for `qwen3.5-397b`."""
    from loadgauge.core.families.named.derived import Derived, goes_on, split_stored

    going = goes_on(text, repositories())
    sized = len(going) == 1 and re.search(r"-a?\d[\d.]*[bm]$", going[0])
    return Derived(going[0], {}, split_stored(text)[1]) if sized else None


@functools.cache
def _shipped() -> dict[str, str]:
    """The repository of each shipped model, empty where a paper has it, without parsing the file."""
    text = read_data("models/SOURCES.toml")
    return dict(re.findall(r'^\["([^"]+)"\]\n(?:repository = "([^"]+)")?', text, re.MULTILINE))


def repositories() -> dict[str, str]:
    """The repositories of each shipped and each listed model, with spaces between them.

    >>> repositories()["gpt2"], repositories()["falcon3-1b"]
    ('openai-community/gpt2', 'tiiuae/Falcon3-1B-Base')
    """
    return _shipped() | {name: " ".join(hub) for name, hub in names.repositories().items()}


def _as(text: str, alike: Derived) -> Found:
    """The model of a name that is read as `alike`, and how that is known."""
    from loadgauge.core.families.named.derived import split_stored

    line = None if alike.base in _names() else names.listed(alike.base)
    spec = model(alike.base)
    if alike.changes:
        content = names.changed(config(alike.base), alike.changes)
        own = from_dict(content, f"data/models/{alike.base}.json", alike.base)
        spec = msgspec.structs.replace(own, defaults=(), source=spec.source, name=split_stored(text)[0])
    if line is not None and line.certain and text.lower() in (alike.base, *(each.lower() for each in line.hub[:1])):
        return Found(spec, "", alike.stored)
    how = f"has the sizes of {alike.base} but for {', '.join(alike.changes)}" if alike.changes else "has its sizes"
    how += "" if names.listed_name(text) == alike.base else ", by its name"
    return Found(spec, f"{text} {how}{f'; {line.how}' if line else ''}", alike.stored)


def keys(text: str, whole: bool = False) -> dict[str, Any]:
    """The keys of a model's `config.json`, whether or not a family here reads them; it is looked for as `find` does, not on the
    hub. Raises `ConfigError` as `find` does.

    whole: with all that sees and hears, where the line of a name has the text model and its whole config too

    >>> keys("gpt2")["model_type"]
    'gpt2'
    """
    listed = _catalogue_name(text)
    if listed is not None:
        return config(listed)
    line = names.listed(name) if whole and (name := names.listed_name(text)) else None
    if line is not None and line.own:
        own = names.changed(config(line.base) if line.base else {}, line.config)
        return names.around(msgspec.structs.replace(line, around="whole", beside=line.own), own)
    if is_shape(text):
        return read_shape(text)[1].config()
    file = os.path.join(text, "config.json") if os.path.isdir(text) else text
    if not names_file(text) or _elsewhere(text):
        cached_file = cached(text)
        if cached_file is None:
            alike = _alike(text)
            if alike is None:
                raise _unknown(text)
            return names.changed(config(alike.base), alike.changes)
        file = str(cached_file)
    content = read_start(file, LARGEST_FILE)
    if file.endswith(".py"):
        raise no_function(file)
    decoded = decode(content, file)
    if not isinstance(decoded, dict):
        raise ConfigError("is no JSON object", file=file)
    return decoded


def _unknown(text: str) -> ConfigError:
    from loadgauge.core.families.named.derived import goes_on, of_size

    if text.lower().endswith(".gguf"):
        return ConfigError(
            f"{shown(text)} names no model: give the model's name, and the file's format as --weight-format q4_k_m"
        )
    if text.lower().endswith(FILES):
        return ConfigError("no such file", file=text)
    repository_of = repositories()
    going = goes_on(text, repository_of)
    if len(going) > 1:
        named = _or(going) if len(going) <= MANY else f"{', '.join(going[:MANY])} and {len(going) - MANY} more"
        return ConfigError(f"{shown(text)} is several models: {named}; say which with --model")
    ask = "; --hub asks huggingface.co" if REPOSITORY.fullmatch(text) else ""
    near = _hint(text, repository_of, 0.8)
    if "?" not in near:
        near = (
            f"; of its size are {_or(sized)}: --model takes one"
            if (sized := of_size(text, repository_of))
            else _hint(text, repository_of)
        )
    return ConfigError(f"{shown(text)} is neither a model in the catalogue nor a file{near}{ask}")


def config_of(file: str) -> Any:
    """The content of a `config.json` file."""
    with open(file, "rb") as stream:
        return decode(stream.read(), file)


def _stored(content: Any) -> str:
    """Quantisation of a checkpoint, by its `quantization_config`; empty where it is not, and for MXFP4, which is the model's
    own format. NVFP4 goes by its packing (compressed-tensors) or its algorithm (ModelOpt)."""
    quantization = content.get("quantization_config") if isinstance(content, dict) else None
    if not isinstance(quantization, dict):
        return ""
    method = str(quantization.get("quant_method", "")).lower()
    if method == "bitsandbytes":
        return "int8" if quantization.get("load_in_8bit") else "nf4"
    if "nvfp4" in f"{quantization.get('format')} {quantization.get('quant_algo')}".lower():
        return "nvfp4"
    return "" if method == "mxfp4" else method


def _catalogue_name(name: str) -> str | None:
    lowered = name.lower()
    if lowered in _names():
        return lowered
    for listed, repository in _shipped().items():
        if repository and repository.lower() == lowered:
            return listed
    return None


def _hint(name: str, names: Iterable[str], cutoff: float = 0.5) -> str:
    close = closest(name.lower().rpartition("/")[2], names, 3, cutoff=cutoff)
    if not close:
        return "; `loadgauge models` lists them"
    return f"; did you mean {_or(close)}?"


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])}{' or ' if words[1:] else ''}{words[-1]}"
