"""Dispatch: from a linear mixer to the function that lists its operations."""

from __future__ import annotations

from collections.abc import Callable

from loadgauge.core.base.algebra import Size
from loadgauge.core.definitions.model.model import (
    GatedDeltaNet,
    KimiDelta,
    LightningAttention,
    LinearMixer,
    Mamba1,
    Mamba2,
    ShortConvolution,
)
from loadgauge.core.layers.mixers.convolution import short_convolution
from loadgauge.core.layers.mixers.gated_delta_net import gated_delta_net
from loadgauge.core.layers.mixers.kimi_delta import kimi_delta
from loadgauge.core.layers.mixers.lightning import lightning_attention
from loadgauge.core.layers.mixers.mamba import mamba2
from loadgauge.core.layers.mixers.mamba1 import mamba1
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Tensor

MIXERS: dict[type, Callable[..., Tensor]] = {
    Mamba2: mamba2,
    Mamba1: mamba1,
    GatedDeltaNet: gated_delta_net,
    KimiDelta: kimi_delta,
    ShortConvolution: short_convolution,
    LightningAttention: lightning_attention,
}
"""The function that lists the operations of each kind of mixer."""


def linear_mixer(build: Builder, x: Tensor, spec: LinearMixer, hidden_size: Size) -> Tensor:
    """Adds a mixer without softmax to the list; `x` is its (normed) input. Returns the output projection."""
    return MIXERS[type(spec)](build, x, spec, hidden_size)
