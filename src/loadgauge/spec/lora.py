"""Adapters: LoRA on a frozen base, and QLoRA, whose base is quantised to 4 bits."""

from __future__ import annotations

from typing import Literal

import msgspec

from loadgauge.algebra import Size
from loadgauge.errors import ConfigError

ATTENTION_TARGETS = frozenset({"query", "key", "value", "qkv", "output"})
ALL_TARGETS = ATTENTION_TARGETS | {"gate", "up", "gate_up", "down"}


class BaseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How frozen base matrices are stored. `nbytes`: of an element, scales included; `words`: for a report.

    `experts_only`: only the routed experts' matrices are stored so, and the rest stays in 16 bits.
    """

    nbytes: float
    words: str
    source: str
    experts_only: bool = False


BASE_FORMATS: dict[str, BaseFormat] = {
    # 4 bits, an 8-bit scale for each block of 64, and a float32 scale for each 256 of those.
    "nf4": BaseFormat(
        nbytes=0.5 + 1 / 64 + 4 / (64 * 256), words="4.127 bits (NF4, scales quantised too)", source="dettmers2023",
    ),
    # As bitsandbytes does unless it is to quantise the scales: a float32 scale for each block of 64.
    "nf4-single": BaseFormat(nbytes=0.5 + 4 / 64, words="4.5 bits (NF4, float32 scales)", source="dettmers2023"),
    # 4 bits and an 8-bit power of two for each block of 32, of the experts that checkpoints hold so.
    "mxfp4": BaseFormat(
        nbytes=0.5 + 1 / 32, words="4.25 bits (MXFP4) for the routed experts", source="openai2025", experts_only=True,
    ),
}  # fmt: skip
"""Formats of a frozen base, by name."""

BaseName = Literal["nf4", "nf4-single", "mxfp4"]


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """Low-rank adapters of `rank` on the linear layers named in `targets` (source: hu2021).

    A target of shape (i, o) gets two trainable matrices, (i, rank) and (rank, o); every other parameter is frozen.
    `quantised`: the format that the base matrices of the blocks are stored in (QLoRA, source: dettmers2023), True for
    `nf4`; each is made in 16 bits for as long as its product takes. `mxfp4` is for models whose experts come in it.
    `dropout`: of the adapter's input; above 0, each target keeps a dropped copy and a mask of its own.

    >>> Lora(rank=8, quantised="mxfp4").stored.nbytes
    0.53125
    """

    rank: Size
    targets: frozenset[str] = ALL_TARGETS
    dropout: float = 0.0
    quantised: bool | BaseName = False

    def __post_init__(self) -> None:
        if not isinstance(self.quantised, bool) and self.quantised not in BASE_FORMATS:
            raise ConfigError(f"unknown format of a base {self.quantised!r} (known: {', '.join(BASE_FORMATS)})")

    @property
    def stored(self) -> BaseFormat | None:
        """The format of the base matrices; None: as the rest of the weights."""
        return base_format(self.quantised)

    @property
    def experts_only(self) -> bool:
        """Whether only the matrices of routed experts are quantised."""
        return self.stored is not None and self.stored.experts_only


def base_format(quantised: bool | str) -> BaseFormat | None:
    """Return the format that `Lora.quantised` names; None where the base is not quantised."""
    if isinstance(quantised, bool):
        return BASE_FORMATS["nf4"] if quantised else None
    return BASE_FORMATS[quantised]
