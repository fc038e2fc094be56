"""Dispatch: from a linear mixer to the function that lists its operations."""

from __future__ import annotations

from loadgauge.core.base.algebra import Size
from loadgauge.core.definitions.model.model import (
    GatedDeltaNet,
    KimiDelta,
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


def linear_mixer(build: Builder, x: Tensor, spec: LinearMixer, hidden_size: Size) -> Tensor:
    """Adds a mixer without softmax to the list; `x` is its (normed) input. Returns the output projection."""
    if isinstance(spec, Mamba2):
        return mamba2(build, x, spec, hidden_size)
    if isinstance(spec, Mamba1):
        return mamba1(build, x, spec, hidden_size)
    if isinstance(spec, GatedDeltaNet):
        return gated_delta_net(build, x, spec, hidden_size)
    if isinstance(spec, KimiDelta):
        return kimi_delta(build, x, spec, hidden_size)
    if isinstance(spec, ShortConvolution):
        return short_convolution(build, x, spec, hidden_size)
    return lightning_attention(build, x, spec, hidden_size)
