"""A command line whose arguments are in a file that it names: `llamafactory-cli train FILE.yaml learning_rate=1e-5`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from loadgauge.core.base.errors import ConfigError
from loadgauge.job_files.ideas.table import MISSING, Document
from loadgauge.job_files.reading.argv import LAUNCHER, Argv

ENDINGS = (".yaml", ".yml")


class Configured:
    """The keys of a file, and those of the command line that names it, which go before them."""

    syntax = "argv"
    inner = "yaml"
    """The syntax of the file that is named."""

    def __init__(self, line: Argv, named: Document, path: str) -> None:
        self.line, self.named, self.path = line, named, path
        self.skipped = (*line.skipped, f"its arguments are in {path}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.line, name)

    def names(self) -> tuple[str, ...]:
        """Every key that has a value, those of the command line first."""
        return tuple(dict.fromkeys((*self.line.names(), *self.named.names())))

    def get(self, key: str) -> Any:
        """The value of a key on the command line, else in the file, or `MISSING`."""
        value = self.line.get(key)
        return self.named.get(key) if value is MISSING else value

    def put(self, key: str, value: Any) -> None:
        """Sets the value of a key on the command line."""
        self.line.put(key, value)

    def drop(self, key: str) -> None:
        """Removes a key of the command line if it is there."""
        self.line.drop(key)

    def shown(self, key: str) -> str:
        """The key as its file spells it."""
        return self.named.shown(key) if self.line.get(key) is MISSING else self.line.shown(key)

    def text(self) -> str:
        """The command line with all changes."""
        return self.line.text()


def configured(line: Argv, file: str, read: Callable[[Path], Document]) -> Document:
    """The command line with the file that it names, read by `read`; without one, the command line.

    Raises `ConfigError` where all arguments are in a file that is not there.
    """
    values = {word.start for options in line.options.values() for option in options for word in option.values}
    names = [word.text for word in line.words if word.text.endswith(ENDINGS) and word.start not in values]
    names = [name for name in names if not name.startswith("-") and "=" not in name]
    if not names or "$" in names[0]:
        return line
    places = [Path(names[0]), *(parent / names[0] for parent in (Path(file).parents if file else ()))]
    position = next((position for position in places if position.is_file()), None)
    if position is not None:
        return Configured(line, read(position), names[0])
    if set(line.names()) <= LAUNCHER:
        raise ConfigError(f"has its arguments in {names[0]}, which is not there; give that file")
    return line
