"""The dialects by name. A dialect's file is read when it is needed."""

from __future__ import annotations

from importlib import import_module

from loadgauge.errors import ConfigError, suggest
from loadgauge.formats.table import Dialect, Document

FILES = {
    "megatron": "megatron", "megatron-bridge": "bridge", "torchtitan": "torchtitan", "deepspeed": "deepspeed",
    "accelerate": "accelerate", "transformers": "huggingface", "trl": "huggingface", "axolotl": "axolotl",
    "llamafactory": "llamafactory", "verl": "verl",
}  # fmt: skip
"""Dialects, and the files of this folder that have them, each under its name in capitals."""
BUILT_ON = {"trl": "transformers", "llamafactory": "transformers"}
"""Tools whose files have another's keys too: those of the other mark them as well."""
CONSTANTS = {"megatron-bridge": "BRIDGE"}
ALIASES = {"hf": "transformers", "fsdp": "accelerate", "llama-factory": "llamafactory", "bridge": "megatron-bridge"}
MARK = 10


def dialect(name: str) -> Dialect:
    """A dialect by its name.

    >>> dialect("megatron").title
    'Megatron-LM arguments'
    >>> dialect("megatron-ml")
    Traceback (most recent call last):
    loadgauge.errors.ConfigError: unknown dialect 'megatron-ml' (known: megatron, megatron-bridge, torchtitan, deepspeed,
    accelerate, transformers, trl, axolotl, llamafactory, verl); did you mean megatron?
    """
    wanted = ALIASES.get(name.lower(), name.lower())
    if wanted not in FILES:
        raise ConfigError(f"unknown dialect {name!r} (known: {', '.join(FILES)}){suggest(wanted, FILES)}")
    module = import_module(f"loadgauge.formats.{FILES[wanted]}")
    found: Dialect = getattr(module, CONSTANTS.get(wanted, wanted.upper()))
    return found


def recognise(document: Document) -> Dialect | None:
    """The dialect that has the most of a document's keys, those that only it has counting most; None where none has any."""
    present = set(document.names())
    scores: dict[str, int] = {}
    for name in FILES:
        found = dialect(name)
        if document.syntax in found.syntaxes:
            marks = len(present & found.marks)
            if marks and name in BUILT_ON:
                marks = len(present & (found.marks | dialect(BUILT_ON[name]).marks))
            scores[name] = MARK * marks + len(present & found.known) if marks else 0
    best = max(scores, key=lambda name: scores[name], default=None)
    return dialect(best) if best is not None and scores[best] else None
