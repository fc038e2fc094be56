"""FLOPs: of the model (what MFU counts) and of the hardware (with what runs again), and what they mean in days."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadgauge.algebra import Size
from loadgauge.estimate.memory.recompute import applied, recomputed_counts
from loadgauge.estimate.schedule.stages import stages
from loadgauge.layers import View, block_layer, embedding_layer, head_layer
from loadgauge.layers.embedding_head import prediction_layer
from loadgauge.spec.kernels import Kernels
from loadgauge.spec.layout import Layout, RecomputePolicy
from loadgauge.spec.model import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    LightningAttention,
    LinearMixer,
    Mamba1,
    Mamba2,
    ModelSpec,
    ShortConvolution,
)

NO_RECOMPUTE = RecomputePolicy()
DAY = 86_400
"""Seconds."""


class Flops(msgspec.Struct, frozen=True):
    """FLOPs; a multiply-add is 2. Attention counts every query-key pair, causal or not, as the papers do.

    model: forward + backward; hardware: model + recompute, where recompute is what runs again.
    """

    forward: Size
    backward: Size
    recompute: Size

    @property
    def model(self) -> Size:
        """Useful FLOPs: forward and backward."""
        return self.forward + self.backward

    @property
    def hardware(self) -> Size:
        """FLOPs carried out, recomputation included."""
        return self.model + self.recompute

    def times(self, factor: Size) -> Flops:
        """That many micro-batches."""
        return Flops(self.forward * factor, self.backward * factor, self.recompute * factor)


def microbatch_flops(
    model: ModelSpec, view: View, recompute: RecomputePolicy = NO_RECOMPUTE, repeated: Sequence[Size] | None = None
) -> Flops:
    """FLOPs of one micro-batch through the whole model, over all the ranks that share it.

    `repeated`: how many layers of each distinct block run again; None: as where the model is one stage.

    Narayanan et al.'s count for GPT-3 (source: narayanan2021, equation 3), one sequence, whole layers recomputed:

    >>> from loadgauge.families.reference import gpt_model
    >>> l, h, s, v = 96, 12288, 2048, 51200
    >>> flops = microbatch_flops(gpt_model(l, h, 96, v), View.of(s, 1, kernels=Kernels(attention="eager")),
    ...                          RecomputePolicy(mode="full"))
    >>> flops.hardware == 96 * s * l * h**2 + 16 * l * s**2 * h + 6 * s * h * v
    True
    """
    whole = msgspec.structs.replace(
        view, tp=1, sequence_parallel=False, cp=1, ep=1, etp=1, imbalance=1,
        tokens=view.cp * view.tokens, pairs=view.cp * view.pairs, positions=view.cp * view.positions,
        kernel_tokens=None if view.kernel_tokens is None else view.cp * view.kernel_tokens,
        kernels=msgspec.structs.replace(view.kernels, vocabulary_multiple=1),
    )  # fmt: skip
    modules = model.mtp_layers
    ends = [embedding_layer(model, whole), head_layer(model, whole)]
    if modules:
        ends += [prediction_layer(model, whole), head_layer(model, whole, shared=True)] * modules
    forward: Size = sum(layer.forward_flops for layer in ends)
    backward: Size = sum(layer.backward_flops for layer in ends)
    again: Size = sum(layer.recompute_flops() for layer in ends)
    counts = model.layer_counts()
    rerun = recomputed_counts(model, recompute, 0, model.num_hidden_layers) if repeated is None else repeated
    layers = [block_layer(block, model.hidden_size, whole) for block in model.blocks]
    names = frozenset(name for layer in layers for name in layer.names)
    if modules:
        # Their blocks are like the last layer.
        kind, more = model.pattern[-1], modules if recompute.every_layer else 0
        counts = tuple(count + (modules if index == kind else 0) for index, count in enumerate(counts))
        rerun = [count + (more if index == kind else 0) for index, count in enumerate(rerun)]
    for layer, count, more in zip(layers, counts, rerun, strict=True):
        forward = forward + count * layer.forward_flops
        backward = backward + count * layer.backward_flops
        twice = layer.recompute_flops(applied(recompute, layer, names))
        again = again + more * twice + (count - more) * layer.recompute_flops()
    return Flops(forward, backward, again)


def step_flops(model: ModelSpec, layout: Layout, kernels: Kernels, view: View) -> Flops:
    """FLOPs of one optimizer step, over all GPUs."""
    policy = layout.recompute
    repeated: list[Size] = [0] * len(model.blocks)
    for stage in stages(model, layout) if policy.mode != "none" else ():
        for (kind, again), count in stage.counts(policy, stage.start, stage.stop).items():
            repeated[kind] += count if again else 0
    if layout.copies > 1:
        # Half of the micro-batches pass each of the two copies.
        repeated = [count / layout.copies for count in repeated]
    return microbatch_flops(model, view, policy, repeated).times(layout.num_microbatches * layout.dp)


def rule_of_thumb(params: Size, tokens: Size, *, full_recompute: bool = False) -> Flops:
    """FLOPs by the rule of 2 per parameter and token forward, 4 backward, and 2 again where all is recomputed.

    Holds when s is well below 6 h and the vocabulary below 12 l h (source: narayanan2021, equation 3). Inference is the
    forward alone; training is 6 P T, or 8 P T with full recomputation. `microbatch_flops` is exact.

    >>> flops = rule_of_thumb(175e9, 300e9, full_recompute=True)
    >>> flops.model == 6 * 175e9 * 300e9, flops.hardware == 8 * 175e9 * 300e9
    (True, True)
    """
    forward = 2 * params * tokens
    return Flops(forward, 2 * forward, forward if full_recompute else 0)


def forward_flops_per_token(model: ModelSpec, context: Size) -> Size:
    """FLOPs to infer one token with `context` tokens before it: 2 per matrix parameter and 4 h a layer and token seen.

    >>> from loadgauge.families.reference import gpt_model
    >>> forward_flops_per_token(gpt_model(96, 12288, 96, 51200), 0) == 2 * (12 * 96 * 12288**2 + 12288 * 51200)
    True
    """
    view = View(tokens=1, pairs=context)
    counts = model.layer_counts()
    layers = [block_layer(block, model.hidden_size, view) for block in model.blocks]
    inside = sum(count * layer.forward_flops for count, layer in zip(counts, layers, strict=True))
    return inside + embedding_layer(model, view).forward_flops + head_layer(model, view, loss=False).forward_flops


def kv_cache_bytes(model: ModelSpec, sequences: Size, length: Size, itemsize: Size = 2) -> Size:
    """Bytes of keys and values kept for decoding: 2 k d a layer, sequence and token; a window bounds the length.

    Multi-head latent attention keeps the latent and the rotated part of the keys instead (source: deepseek2024v2), and a
    linear mixer a state that does not grow.

    >>> from loadgauge.families.reference import gpt_model
    >>> kv_cache_bytes(gpt_model(96, 12288, 96, 50257), 64, 512 + 32)
    164282499072
    """
    total: Size = 0
    for block, count in zip(model.blocks, model.layer_counts(), strict=True):
        mixer = block.attention
        if isinstance(mixer, LatentAttention):
            width = mixer.kv_lora_rank + mixer.qk_rope_head_dim
        elif isinstance(mixer, Attention):
            width = 2 * mixer.num_key_value_heads * mixer.head_dim
        else:
            total = total + count * _state_bytes(mixer, model.hidden_size, itemsize)
            continue
        held = length if mixer.sliding_window is None else min(length, mixer.sliding_window)
        total = total + count * (width * held * itemsize + _state_bytes(block.beside, model.hidden_size, itemsize))
    return total * sequences


def _state_bytes(mixer: LinearMixer | None, hidden_size: Size, itemsize: Size) -> Size:
    """Bytes that a linear mixer keeps of one sequence, however long: the last inputs of its convolution, and its state.

    As transformers' cache holds them: the state in float32, but for lightning attention.
    """
    if isinstance(mixer, Mamba2):
        inner = mixer.num_heads * mixer.head_dim
        channels = inner + 2 * mixer.n_groups * mixer.state_size
        return itemsize * channels * mixer.conv_kernel + 4 * inner * mixer.state_size
    if isinstance(mixer, Mamba1):
        return mixer.intermediate_size * (itemsize * mixer.conv_kernel + 4 * mixer.state_size)
    if isinstance(mixer, GatedDeltaNet):
        keys = mixer.linear_num_key_heads * mixer.linear_key_head_dim
        values = mixer.linear_num_value_heads * mixer.linear_value_head_dim
        state = values * mixer.linear_key_head_dim
        return itemsize * (2 * keys + values) * mixer.linear_conv_kernel_dim + 4 * state
    if isinstance(mixer, ShortConvolution):
        return itemsize * hidden_size * mixer.conv_L_cache
    if isinstance(mixer, LightningAttention):
        return itemsize * mixer.num_attention_heads * mixer.head_dim**2
    return 0  # no mixer, no state


def training_days(flops: Size, gpus: Size, flops_per_gpu: Size) -> Size:
    """Days to carry out `flops` at an achieved rate per GPU [FLOP/s] (source: narayanan2021, equation 4).

    >>> round(training_days(8 * 450e9 * 1.008e12, 3072, 163e12))
    84
    """
    return flops / (gpus * flops_per_gpu) / DAY


def gpus_needed(flops: Size, days: Size, flops_per_gpu: Size) -> Size:
    """GPUs to carry out `flops` in so many days at an achieved rate per GPU [FLOP/s]; not rounded.

    >>> round(gpus_needed(6 * 300e9 * 175e9, 23, 150e12))
    1057
    """
    return flops / (days * DAY * flops_per_gpu)


def utilisation(flops: Size, seconds: Size, gpus: Size, peak_flops: Size) -> Size:
    """Share of the peak: MFU of model FLOPs, HFU of hardware FLOPs (source: korthikanti2022, section 6.3).

    >>> utilisation(312e12, 2, 1, 312e12)
    0.5
    """
    return flops / (seconds * gpus * peak_flops)
