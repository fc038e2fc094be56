"""`Uncounted`: settings of a job file that are not counted. Every estimate imports this; few read a job file."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Uncounted(msgspec.Struct, frozen=True):
    """Something a job file asks for that is not counted: a line for the report, and how far it may change the memory.

    key: as the file writes it, or the section it stands for; known: whether a list has it
    low, high: by how much the memory of a GPU may be lower and higher [bytes]
    kernels: what a part of the model may run in
    parameter: of each parameter of the model, over all GPUs [bytes]
    effect: `saves`, `costs` or `either`: what it can do, where how much follows from `parts` of the memory and a `share` of them
    """

    note: str
    key: str
    known: bool = True
    low: float = 0.0
    high: float = 0.0
    kernels: Mapping[str, str] = {}
    parameter: float = 0.0
    effect: str = ""
    parts: tuple[str, ...] = ()
    share: float = 1.0
