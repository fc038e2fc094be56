"""Reads the files of `data/`, which come with the package."""

import functools
import os
from typing import Any

# Not `importlib.resources`, whose import costs a tenth of a cold start.
FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "data")


def read_data(name: str) -> str:
    """Return the text of a file by its path below `data/`. Raises `FileNotFoundError`.

    >>> read_data("gpus/h100-sxm5-80gb.toml").splitlines()[0].partition(" = ")[0]
    'name'
    """
    with open(os.path.join(FOLDER, name), encoding="utf-8") as file:
        return file.read()


@functools.cache
def read_table(name: str) -> dict[str, Any]:
    """Return a TOML file by its path below `data/`, parsed once: it is not to be changed. Raises `FileNotFoundError`.

    >>> read_table("gpus/h100-sxm5-80gb.toml")["memory"]["label"]["value"]
    '80 GB'
    """
    import tomllib

    return tomllib.loads(read_data(name))


def read_bytes(name: str) -> bytes:
    """Return a file as it is, by its path below `data/`. Raises `FileNotFoundError`."""
    with open(os.path.join(FOLDER, name), "rb") as file:
        return file.read()


def list_data(folder: str, ending: str) -> list[str]:
    """Return the names of the files with that ending in a folder of `data/`, without the ending, in no order.

    >>> "h100-sxm5-80gb" in list_data("gpus", ".toml")
    True
    """
    return [name.removesuffix(ending) for name in os.listdir(os.path.join(FOLDER, folder)) if name.endswith(ending)]
