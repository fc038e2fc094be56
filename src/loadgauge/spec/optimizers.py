"""Optimizers: the state that each keeps, the bytes that its step moves, and what PyTorch calls it."""

from __future__ import annotations

from typing import Any

import msgspec

from loadgauge.spec.precision import Precision


class Optimizer(msgspec.Struct, frozen=True, kw_only=True):
    """Optimizer state: `moments` of `Precision.moment` bytes each, or of `moment_bytes` where the optimizer decides.

    factored: one row and one column of float32 for each matrix instead of a moment (Adafactor)
    matrix_moments: moments of the matrices of the blocks, where they differ from the rest's (Muon)
    eight_bit: the optimizer that is this one with 8-bit moments, where there is one
    torch, options: the class that a trace builds, and its arguments; empty: PyTorch has none
    variants: other ways in which PyTorch runs the same optimizer, as further arguments by the suffix of their name
    """

    name: str
    moments: int
    matrix_moments: int | None = None
    moment_bytes: float | None = None
    factored: bool = False
    eight_bit: str = ""
    torch: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    variants: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    source: str = "rajbhandari2019"

    def moment(self, precision: Precision) -> float:
        """Return the bytes of one element of a moment.

        >>> from loadgauge.spec.precision import PRECISIONS
        >>> OPTIMIZERS["adamw"].moment(PRECISIONS["bf16-pure"]), OPTIMIZERS["adamw-8bit"].moment(PRECISIONS["bf16-pure"])
        (2, 1.015625)
        """
        return precision.moment if self.moment_bytes is None else self.moment_bytes

    def moved(self, precision: Precision) -> float:
        """Return the memory traffic of the step [bytes per parameter]: gradients read twice (once for their norm), master weights
        and moments read and written, the weights of the products written."""
        master = precision.master or precision.weight
        return 2 * precision.gradient + 2 * master + 2 * self.moments * self.moment(precision) + precision.compute


OPTIMIZERS: dict[str, Optimizer] = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer(
            name="adamw", moments=2, eight_bit="adamw-8bit", torch="torch.optim.AdamW", options=(("lr", 1e-4),),
            variants=(("fused", (("fused", True),)), ("loop", (("foreach", False),))),
        ),
        # One byte a moment and a float32 scale for each block of 256.
        Optimizer(name="adamw-8bit", moments=2, moment_bytes=1 + 4 / 256, source="dettmers2021"),
        Optimizer(
            name="adafactor", moments=0, factored=True, torch="torch.optim.Adafactor", options=(("lr", 1e-2),),
            source="shazeer2018",
        ),
        # Momentum alone for the matrices of the blocks; embeddings, head and vectors stay with AdamW.
        Optimizer(name="muon", moments=2, matrix_moments=1, source="jordan2024"),
        Optimizer(name="lion", moments=1, source="chen2023lion"),
        Optimizer(
            name="sgd-momentum", moments=1, torch="torch.optim.SGD", options=(("lr", 1e-2), ("momentum", 0.9)),
        ),
        Optimizer(name="sgd", moments=0, torch="torch.optim.SGD", options=(("lr", 1e-2),)),
    )
}  # fmt: skip
"""Every optimizer by name."""


class TorchOptimizer(msgspec.Struct, frozen=True):
    """An optimizer as PyTorch runs it: the name of its record, its class and its arguments."""

    optimizer: str
    factory: str
    options: dict[str, Any]


def torch_optimizers() -> dict[str, TorchOptimizer]:
    """Return PyTorch's optimizers and their variants by name: on CUDA foreach unless the name says otherwise.

    >>> torch_optimizers()["adamw-fused"].options
    {'lr': 0.0001, 'fused': True}
    """
    return {
        f"{optimizer.name}-{suffix}" if suffix else optimizer.name: TorchOptimizer(
            optimizer.name, optimizer.torch, dict(optimizer.options + more)
        )
        for optimizer in OPTIMIZERS.values()
        if optimizer.torch
        for suffix, more in (("", ()), *optimizer.variants)
    }
