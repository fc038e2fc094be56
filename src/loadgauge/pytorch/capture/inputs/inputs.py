"""Inputs of transformers' models beside tokens, from `data/capture/inputs.toml`: pictures, sounds, grids, masks."""

import inspect
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch

from loadgauge.core.base import ConfigError, read_table
from loadgauge.pytorch.capture.symbols.values import known, whole

SOUNDS = ("input_features", "input_values", "audio_input_features", "audio_input_ids")
"""Arguments of transformers' models that stand for a sound."""
_SIGNS = {"*": operator.mul, "//": operator.floordiv, "+": operator.add, "-": operator.sub}
_TYPES = {"long": torch.long, "int": torch.int, "bool": torch.bool, "byte": torch.uint8, "float": torch.float}


def beside_tokens(config: Any, taken: Mapping[str, Any], kind: str = "") -> dict[str, Any]:
    """Return the rows of the table for a model: name of the argument, and how it is made (see `made`).

    kind: the model's type, where the config is that of a part of it
    taken: parameters of the model's `forward`; one that the default names and it lacks is left out
    """
    table = read_table("capture/inputs.toml")
    own = table.get(kind or config.model_type, {})
    of_kind = "grid" if "image_grid_thw" in taken else "default"
    rows = {**table[of_kind], **table.get(own.get("as", ""), {}), **own}
    return {
        name: row
        for name, row in rows.items()
        if isinstance(row, dict)
        and name in taken
        and (name not in table[of_kind] or name in own or _there(row, config))
    }


def special_tokens(config: Any, kind: str, sizes: Mapping[str, Any]) -> tuple[tuple[int, Any], ...]:
    """Return the tokens that stand beside a picture's in a sequence and that the model looks for: (id, how many in all sequences).

    sizes: b, and pictures of a sequence
    """
    found: list[tuple[int, Any]] = []
    for key, each in read_table("capture/inputs.toml").get(kind or config.model_type, {}).get("tokens", {}).items():
        ids = getattr(config, key)
        several = ids if isinstance(ids, list | tuple) else [ids]
        counts = each if isinstance(each, list) else [each] * len(several)
        found += [(one, number(count, config, sizes) * sizes["b"]) for one, count in zip(several, counts, strict=True)]
    return tuple(found)


def unheard(module: Any, given: Mapping[str, Any]) -> str:
    """Return the argument by which a model takes a sound, where it is called without any; "" else. given: its arguments by name

    >>> class Listens:
    ...     def forward(self, input_ids, input_features=None): ...
    >>> unheard(Listens(), {"input_ids": 0}), unheard(Listens(), {"input_features": 0})
    ('input_features', '')
    """
    taken = [name for name in SOUNDS if name in inspect.signature(module.forward).parameters]
    return taken[0] if taken and not any(name in given for name in taken) else ""


def dtype_of(module: Any) -> torch.dtype:
    """The dtype of a module's floats: that of its first parameter that is not packed.

    >>> dtype_of(torch.nn.Linear(2, 2))
    torch.float32
    """
    found: torch.dtype = next(one.dtype for one in module.parameters() if one.is_floating_point())
    return found


def usual_picture(config: Any) -> tuple[int, int] | None:
    """Width and height of the picture that a model is given unless others are named; None: the rows of the table have one."""
    found = read_table("capture/inputs.toml").get(config.model_type, {}).get("picture")
    return None if found is None else (found[0], found[1])


def made(
    row: Mapping[str, Any], config: Any, device: str, dtype: torch.dtype, sizes: Mapping[str, Any]
) -> torch.Tensor:
    """Make an input.

    row: `shape`, a list of products such as "b*vision_config.image_size//2", of which `dtype` is the model's unless stated; or
        `each`, the integers that every sequence has, whose values the code reads;
        `ones`, where it asks whether there is padding in it; `no_padding`, where the code looks for pictures that are all 0
    """
    if "each" in row:
        each = row["each"]
        own = [number(one, config, sizes) for one in each] if isinstance(each, list) else each
        return known([own] * int(sizes["b"]), device)
    plain = {**sizes, "b": int(sizes["b"])} if "no_padding" in row else sizes
    shape = [number(one, config, plain) for one in row["shape"]]
    fill = torch.ones if "ones" in row else torch.empty
    tensor = fill(shape, dtype=_TYPES.get(row.get("dtype", ""), dtype), device=device)
    return whole(tensor) if "no_padding" in row else tensor


def tree(
    row: Mapping[str, Any], config: Any, device: str, dtype: torch.dtype, sizes: Mapping[str, Any], name: str = ""
) -> Any:
    """Make an input of rows (see `made`): a tensor, what is `plain`, a dictionary of them, or with `list` a list of as many.

    name: the model's; a row whose `names` it does not match is left out, as one whose `when`, a key of the config, is not set.
    An empty dictionary is None.
    """
    if "list" in row:
        alone = {key: value for key, value in row.items() if key != "list"}
        return [tree(alone, config, device, dtype, sizes, name) for _ in range(int(number(row["list"], config, sizes)))]
    if "plain" in row:
        plain = row["plain"]
        return (
            tuple(number(one, config, sizes) for one in plain)
            if isinstance(plain, list)
            else number(plain, config, sizes)
        )
    if "shape" in row or "each" in row:
        return made(row, config, device, dtype, sizes)
    there = {
        key: one
        for key, one in row.items()
        if ("when" not in one or config.get(one["when"])) and re.search(one.get("names", ""), name)
    }
    return {key: tree(one, config, device, dtype, sizes, name) for key, one in there.items()} or None


def number(text: int | str, config: Any, sizes: Mapping[str, Any]) -> Any:
    """Return what a product of sizes, numbers and keys of a config comes to, from left to right.

    Raises ConfigError for a key that the config lacks.

    >>> number("b*4//2", None, {"b": 3})
    6
    """
    if isinstance(text, int):
        return text
    found: Any = None
    for sign, word in re.findall(r"(^|\*|//|\+|-)([^*/+-]+)", text):
        value = int(word) if word.isdigit() else sizes[word] if word in sizes else _key(config, word)
        found = value if not sign else _SIGNS[sign](found, value)
    return found


def _key(config: Any, word: str) -> int:
    """The first key of several, with `|` between, that a config has; a number is what there is without."""
    for path in word.split("|"):
        found = int(path) if path.isdigit() else config
        for name in path.split(".") if not path.isdigit() else ():
            found = found.get(name) if isinstance(found, dict) else getattr(found, name, None)
            if isinstance(found, list | tuple) and found:
                found = found[0]
        if isinstance(found, int):
            return found
    raise ConfigError(f"{getattr(config, 'model_type', 'model')}: the config has no number {word}")


def _there(row: Mapping[str, Any], config: Any) -> bool:
    try:
        for one in row.get("shape", ()):
            number(one, config, {"b": 2, "s": 2, "t": 2, "pictures": 1})
    except ConfigError:
        return False
    return True
