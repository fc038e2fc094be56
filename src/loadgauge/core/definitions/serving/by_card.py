"""Choices of engines by the card, where nobody says them: `data/engine_defaults.toml`."""

import functools
from bisect import bisect_right
from typing import Any

import msgspec

from loadgauge.core.base.package_data import read_table
from loadgauge.core.base.units import GIB


class ByCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The choices of one engine, by the memory of the card (the head of the file says what its keys are)."""

    source: str
    memory: tuple[int, ...]
    tokens: tuple[int, ...]
    smaller: str = ""
    graphs: tuple[tuple[int, int], ...] = ()
    wide: int = 1
    sizes: tuple[tuple[int, int, int], ...] = ()

    def column(self, gpu: Any) -> int:
        """Return the column of a card (`Gpu`)."""
        low = self.smaller and self.smaller in gpu.id
        return 0 if low else bisect_right(self.memory, gpu.capacity / GIB) - 1


@functools.cache
def of_engine(kind: str) -> ByCard | None:
    """Return the choices of an engine; None where they do not hang on the card."""
    table = read_table("engine_defaults.toml").get(kind)
    return None if table is None else msgspec.convert(table, ByCard)


def usual_tokens(kind: str, gpu: Any) -> int | None:
    """Return the tokens of prompts that a server reads at once on a card, where nobody says it; None where it is not known.

    >>> from loadgauge import gpu
    >>> [usual_tokens(kind, gpu(name)) for kind in ("vllm", "sglang") for name in ("l4", "a100-sxm4-80gb", "b200-sxm-180gb")]
    [2048, 2048, 8192, 2048, 8192, 16384]
    """
    own = of_engine(kind)
    return None if own is None or gpu is None else own.tokens[own.column(gpu)]


def captured_on(kind: str, gpu: Any, tp: int, most: int | None = None) -> int | None:
    """Return the number of batches whose graphs a server captures on a card; None where that does not hang on it.

    most: the largest of them; None: as the engine has it on the card

    >>> from loadgauge import gpu
    >>> captured_on("sglang", gpu("l4"), 1), captured_on("sglang", gpu("h100-sxm5-80gb"), 8), captured_on("vllm", gpu("l4"), 1)
    (7, 52, None)
    >>> captured_on("sglang", gpu("h100-sxm5-80gb"), 8, 16)
    6
    """
    own = of_engine(kind)
    if own is None or gpu is None or not own.graphs:
        return None
    most = most or own.graphs[own.column(gpu)][tp >= own.wide]
    return sum(size <= most for start, stop, by in own.sizes for size in range(start, stop + 1, by))
