"""Hooks: what the rooms beside the core add to it. The core imports none of them; each says in its `room.py` what it has.

Seven hooks: `COMMANDS` (a command's name, its place in the list, what it answers and its module), and the addresses of modules
with the functions of `MODEL_SOURCES` (models that no family reads), `DIALECTS` (job files), `OBJECTIVES` (what a plan is ranked
by beside time and cost), `FIGURES` (plots and sheets), `HTML` (an estimate as one file) and `WORDS`
(texts in another language). A room that is taken out takes its
own with it.
"""

import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Literal

from loadgauge.core.base.errors import ConfigError

Hook = Literal["MODEL_SOURCES", "DIALECTS", "OBJECTIVES", "FIGURES", "HTML", "WORDS"]
PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
NEEDS: dict[Hook, str] = {
    "MODEL_SOURCES": "a model that no family reads is recorded from its code by loadgauge.pytorch",
    "DIALECTS": "job files are read by loadgauge.job_files",
    "OBJECTIVES": "runs on a fleet are simulated by loadgauge.fleets",
    "FIGURES": "plots and sheets are made by loadgauge.sheets",
    "HTML": "a page in one file is made by loadgauge.page",
    "WORDS": "other languages are spoken by loadgauge.page",
}


@cache
def rooms() -> tuple[Any, ...]:
    """Return the `room` modules of the rooms that are there, by name.

    >>> [room.__name__ for room in rooms()][:2]
    ['loadgauge.evidence.room', 'loadgauge.fleets.room']
    """
    names = sorted(name for name in os.listdir(PACKAGE) if os.path.isfile(os.path.join(PACKAGE, name, "room.py")))
    return tuple(import_module(f"loadgauge.{name}.room") for name in names)


def commands() -> dict[str, tuple[int, str, str]]:
    """Return the commands of all rooms: place in the list, what each answers, and the module it is in."""
    return {name: entry for room in rooms() for name, entry in getattr(room, "COMMANDS", {}).items()}


def provider(hook: Hook) -> Any:
    """Return the module that a room gives for a hook, imported now; None where no room that is there does.

    >>> provider("DIALECTS").is_job_file("./train.yaml")
    True
    """
    address = next((getattr(room, hook) for room in rooms() if hasattr(room, hook)), None)
    return None if address is None else import_module(address)


def need(hook: Hook) -> Any:
    """Return the same module. Raises `ConfigError` where no room gives one."""
    module = provider(hook)
    if module is None:
        raise ConfigError(f"{NEEDS[hook]}, which is not installed here")
    return module


def load(address: str) -> Any:
    """Return the object at `module:name`; the module is imported.

    >>> load("loadgauge.core.base.units:GIB")
    1073741824
    """
    module, _, name = address.partition(":")
    return getattr(import_module(module), name)


def lazily(addresses: Mapping[str, str], module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that imports each name from its address, written `module:name`, at its first use.

    >>> lazily({"Error": "loadgauge.core.base.errors:Error"}, "somewhere")("Error").__name__
    'Error'
    """

    def get(name: str) -> Any:
        if name not in addresses:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return load(addresses[name])

    return get


class Door:
    """The `door` of a room, imported at the first use of a name of it: a room may be taken out.

    >>> Door("fleets").FINDS[0]
    'checkpoint-interval'
    """

    def __init__(self, room: str) -> None:
        self._room = room

    def __getattr__(self, name: str) -> Any:
        try:
            module = import_module(f"loadgauge.{self._room}.door")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(f"loadgauge.{self._room}"):
                raise
            raise ConfigError(f"this is answered by loadgauge.{self._room}, which is not installed here") from None
        return getattr(module, name)
