"""Which function writes down which linear mixer."""

from __future__ import annotations

from loadgauge.algebra import Size
from loadgauge.layers.builder import Builder
from loadgauge.layers.convolution import short_convolution
from loadgauge.layers.gated_delta_net import gated_delta_net
from loadgauge.layers.kimi_delta import kimi_delta
from loadgauge.layers.lightning import lightning_attention
from loadgauge.layers.mamba import mamba2
from loadgauge.layers.mamba1 import mamba1
from loadgauge.layers.operations import Tensor
from loadgauge.spec.model import GatedDeltaNet, KimiDelta, LinearMixer, Mamba1, Mamba2, ShortConvolution


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
