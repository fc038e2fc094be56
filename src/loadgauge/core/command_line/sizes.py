"""The flags that describe a model by its sizes, in place of MODEL: `--size 10B --family gpt`."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.families.shapes import FAMILIES, KEYS, written

Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT = "llama"
HELP = {
    "size": "Parameters of a model that is not in the catalogue (10B); sizes that are not given are chosen, and listed.",
    "layers": "Its layers; with --hidden instead of --size, or beside it.",
    "hidden": "Its width.",
    "heads": "Its attention heads.",
    "kv-heads": "Its key-value heads.",
    "ffn": "Width of its feed-forward, of one expert in a moe.",
    "vocab": "Its vocabulary (50k).",
    "positions": "The longest sequence it is made for.",
    "experts": "Experts of a moe.",
    "top-k": "Experts that a token is sent to in a moe.",
}
"""The flags, and their help."""


def size_options(command: Command) -> Command:
    """Add the flags of sizes to a command whose MODEL need not be given."""
    family = click.option(
        "--family", type=click.Choice(tuple(FAMILIES)), help=f"Kind of model that the sizes are of. [{DEFAULT}]"
    )
    for name in reversed(("size", *KEYS)):
        command = click.option(f"--{name}", metavar="N", help=HELP[name])(command)
    return family(command)


def model_of(model: str | None, flags: dict[str, Any]) -> str | None:
    """Take the flags of sizes out of `flags`, and return MODEL or the name that they stand for; None where neither is given.

    >>> model_of(None, {"size": "10B", "vocab": "50k", "family": "gpt"})
    'gpt:10B,vocab=50k'
    """
    names = {name: name.replace("-", "_") for name in ("size", *KEYS)}
    own_sizes = {name: value for name, key in names.items() if (value := flags.pop(key, None)) is not None}
    family = flags.pop("family", None)
    if not own_sizes and family is None:
        return model
    if model is not None and family is None and "size" not in own_sizes:
        return f"{model}:{','.join(f'{key}={value}' for key, value in own_sizes.items())}"
    if model is not None:
        first = next(iter(own_sizes), "family")
        raise ConfigError(f"describes a model in place of {model!r}; give one of them", key=first)
    return written(family or DEFAULT, own_sizes)


def model_or_usage(model: str | None, flags: dict[str, Any]) -> str:
    """Return `model_of`. Raises `click.UsageError` where no model is given."""
    model_name = model_of(model, flags)
    if model_name is None:
        raise click.UsageError("Missing argument 'MODEL' (or --size).", click.get_current_context())
    return model_name
