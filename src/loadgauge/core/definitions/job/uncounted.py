"""`Uncounted`: settings of a job file that are not counted. Every estimate imports this; few read a job file."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

Kind = Literal["bounded", "widening", "unknown"]


class Parts(NamedTuple):
    """Parts of the memory of a GPU [bytes]: at its peak, which what saves makes lower by no more than their share; and each
    where it is largest, which bounds what costs. parameters: of the model, over the GPUs"""

    peak: Mapping[str, float]
    largest: Mapping[str, float]
    parameters: float


class Uncounted(msgspec.Struct, frozen=True):
    """Something a job file asks for that is not counted: a line for the report, and how far it may change the memory.

    key: as the file writes it, or the section it stands for; known: whether a list has it; file: that has it
    low, high: by how much the memory of a GPU may be lower and higher [bytes]
    kernels: what a part of the model may run in
    parameter: of each parameter of the model, over all GPUs [bytes]
    effect: `saves`, `costs` or `either`: what it can do, where how much follows from `parts` of the memory and a `share` of them;
        of a key in no list, where its name suggests memory or time
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
    file: str = ""

    @property
    def kind(self) -> Kind:
        """Return its class: `unknown` of a key in no list, `widening` where it can go either way, else `bounded`.

        >>> Uncounted("", "liger", effect="saves").kind, Uncounted("", "qat", effect="either").kind
        ('bounded', 'widening')
        """
        return "unknown" if not self.known else "widening" if self.effect == "either" or self.kernels else "bounded"

    @property
    def endless(self) -> bool:
        """Return whether it may change the memory by an amount that is not known."""
        return not self.known and bool(self.effect)

    def change(self, memory: Parts) -> tuple[float, float]:
        """Return the changes of a GPU's memory that it may cause, downward and upward [bytes].

        >>> Uncounted("", "tiled", effect="saves", parts=("loss",), share=0.5).change(Parts({"loss": 8.0}, {"loss": 9.0}, 0.0))
        (4.0, 0.0)
        """
        fewer, more = (
            self.share * sum(parts.get(part, 0.0) for part in self.parts) for parts in (memory.peak, memory.largest)
        )
        low = self.low + (fewer if self.effect in ("saves", "either") else 0.0)
        high = self.high + (more if self.effect in ("costs", "either") else 0.0)
        return low, high + self.parameter * memory.parameters

    def document(self, memory: Parts) -> dict[str, Any]:
        """Return it as documents have it; the amounts are null where they are not known [bytes]."""
        low, high = self.change(memory)
        effect = self.effect or (
            "either" if self.kernels or (low and high) else "saves" if low else "costs" if high else ""
        )
        open_ended = self.endless or bool(self.kernels)
        return {
            "key": self.key,
            "file": self.file,
            "class": self.kind,
            "effect": effect or "none",
            "low_bytes": None if open_ended else low,
            "high_bytes": None if open_ended else high,
            "why": self.note.partition(": ")[2] or self.note,
        }
