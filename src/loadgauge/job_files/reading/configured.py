"""A command line whose arguments are in a file that it names: `llamafactory-cli train FILE.yaml learning_rate=1e-5`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loadgauge.core.base.errors import ConfigError
from loadgauge.job_files.ideas.table import MISSING, Document, Keys
from loadgauge.job_files.reading.argv import LAUNCHER, Argv

ENDINGS = (".yaml", ".yml", ".toml")
OPTIONS = frozenset({"config", "config_file", "config_path", "config_name", "cfg"})
"""Options that name such a file."""


LAUNCHED_AS = {
    **{name: name for name in ("mixed_precision", "use_fsdp", "use_deepspeed")},
    **{
        name: f"deepspeed_config.{name}"
        for name in ("zero_stage", "offload_optimizer_device", "offload_param_device", "deepspeed_config_file")
    },
}
"""Options of `accelerate launch`, and the keys of its configuration that they are."""


class Configured:
    """The keys of a file, and those of the command line that names it, which go before them."""

    syntax = "argv"

    def __init__(self, line: Argv, named: Document, path: str) -> None:
        self.line, self.named, self.path = line, named, path
        self.inner = named.syntax
        for name in self.names() if hasattr(named, "layers") else ():
            if line.get(name) is not MISSING:
                named.put(name, line.get(name))  # where other values of the file refer to it
        self.skipped = (*line.skipped, f"its arguments are in {path}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.line, name)

    def names(self) -> tuple[str, ...]:
        """Every key that has a value, those of the command line first."""
        own = [name for name in self.line.names() if name not in OPTIONS]
        return tuple(dict.fromkeys((*own, *self.named.names())))

    def get(self, key: str) -> Any:
        """The value of a key on the command line, else in the file, or `MISSING`."""
        value = self.line.get(key)
        return self.named.get(key) if value is MISSING else value

    def shown(self, key: str) -> str:
        """The key as its file spells it."""
        return self.named.shown(key) if self.line.get(key) is MISSING else self.line.shown(key)


def configured(line: Argv, file: str, read: Callable[[Path], Document]) -> Document:
    """The command line with the file that it names, by itself or as `--config`, read by `read`; without one, the command line.

    Raises `ConfigError` where all arguments are in a file that is not there.
    """
    values = {word.start for options in line.options.values() for option in options for word in option.values}
    names = [word.text for word in line.words if word.start not in values]
    launched = "accelerate" in line.program  # which has a file of its own
    options = [key for key in OPTIONS & line.options.keys() if not (launched and key == "config_file")]
    for words in (line.options[key][-1].values for key in sorted(options)):
        names += [f"{word.text}{end}" for word in words[:1] for end in ("", ".yaml")]  # Hydra's names have no ending
    names = [name for name in names if name.endswith(ENDINGS) and not re.search(r"^-|[=$\s]", name)]
    if not names:
        return line
    places = [Path(names[0]), *(parent / names[0] for parent in (Path(file).parents if file else ()))]
    position = next((position for position in places if os.path.isfile(position)), None)
    if position is not None:
        return Configured(line, read(position), names[0])
    if set(line.names()) <= LAUNCHER | OPTIONS:
        raise ConfigError(f"has its arguments in {names[0]}, which is not there; give that file")
    return line


class Over:
    """A document over what a recipe that it names says by itself (`beneath`): keys that it leaves out are looked up there."""

    def __init__(self, own: Document, beneath: Mapping[str, Any]) -> None:
        self.own, self.beneath = own, beneath

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def get(self, key: str) -> Any:
        """The value of a key here, else beneath."""
        value = self.own.get(key)
        return self.beneath.get(key, MISSING) if value is MISSING else value


def launch_options(keys: Keys, owned: Callable[[str], bool]) -> dict[str, Any]:
    """Return the options of `accelerate launch` as keys of its configuration, without those that the tool has itself (`owned`)."""
    names = keys.document.names() if keys.document.syntax == "argv" else ()
    places = {name: f"fsdp_config.{name}" if name.startswith("fsdp_") else LAUNCHED_AS.get(name) for name in names}
    values: dict[str, Any] = {
        field: keys.plain(name) for name, field in places.items() if field is not None and not owned(name)
    }
    for switch, kind in (("use_fsdp", "FSDP"), ("use_deepspeed", "DEEPSPEED")):
        if values.pop(switch, None):
            values["distributed_type"] = kind
    return values
