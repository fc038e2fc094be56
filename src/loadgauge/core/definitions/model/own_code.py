"""Support of a model's layers: of those that a family writes for every job, and of those captured from their own code."""

from collections.abc import Iterator, Sequence
from typing import Any


class Written:
    """Layers that a family writes. What was captured answers the same questions in its own way (`capture.road.OnDemand`).

    rewritten: whether the layers are written for what is trained, for dtypes and for losses; else they are as they ran
    states_splits: whether the class itself says how ranks split it; framework: that whose code runs, where no other can
    around: whether masks and the embedding's output are counted beside the layers; library: whether pictures are its inputs
    has_length: whether what it is called with has sequences; unit: what a sequence is so many of;
        sample: what a batch has without sequences
    resident: bytes of frozen parts that lie beside it on each card, as what encodes texts and pictures
    names: of the sizes of its inputs, where they are its own; notes: what an answer must say; labels: a name for each kind of block
    has_experts: whether a layer has experts that a description does not show
    """

    rewritten = around = has_length = True
    states_splits = has_experts = library = False
    framework, unit, sample = "", "tokens", "samples"
    resident: int = 0
    names: tuple[str, ...] = ()
    notes: Sequence[str] = ()
    labels: tuple[str, ...] = ()

    def besides(self, length: int) -> str:
        """Return the parts of a sequence beside its first text, in words; "" where there is nothing. length: tokens of that text"""
        return ""

    def problems(self, layout: Any) -> Iterator[str]:
        """Why a layout (`spec.layout.Layout`) cannot be that of these layers, one line each."""
        return iter(())


WRITTEN = Written()

DROPS = "dropout_of_trainer"
"""Dropout of the embedding's output and of both halves of each layer that a trainer adds to any family; no `config.json` has it."""
