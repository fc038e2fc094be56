"""FLOPs: of the model (what MFU counts) and of the hardware (including recomputation)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from loadgauge.core.base.algebra import Size
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.estimate.memory.recompute import applied, recomputed_counts
from loadgauge.core.estimate.schedule.stages import stages
from loadgauge.core.layers import View, block_layer, block_layers, embedding_layer, head_layer
from loadgauge.core.layers.embedding_head import prediction_layer
from loadgauge.core.layers.operations.operations import Layer

NO_RECOMPUTE = RecomputePolicy()


class Flops(msgspec.Struct, frozen=True):
    """FLOPs; a multiply-add is 2. Attention counts every query-key pair, causal or not, as the papers do.

    model: forward + backward; hardware: model + recompute, where recompute is what runs again in backward.
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
        """FLOPs executed, recomputation included."""
        return self.model + self.recompute

    def times(self, factor: Size) -> Flops:
        """Return the FLOPs of `factor` micro-batches."""
        return Flops(self.forward * factor, self.backward * factor, self.recompute * factor)


def on_one_rank(view: View) -> View:
    """Return the view of a micro-batch as if one rank had all of it."""
    return msgspec.structs.replace(
        view,
        tp=1,
        sequence_parallel=False,
        cp=1,
        ep=1,
        etp=1,
        imbalance=1,
        tokens=view.cp * view.tokens,
        pairs=view.cp * view.pairs,
        positions=view.cp * view.positions,
        kernel_tokens=None if view.kernel_tokens is None else view.cp * view.kernel_tokens,
        kernels=msgspec.structs.replace(view.kernels, vocabulary_multiple=1),
    )


def microbatch_flops(
    model: ModelSpec, view: View, recompute: RecomputePolicy = NO_RECOMPUTE, repeated: Sequence[Size] | None = None
) -> Flops:
    """Return the FLOPs of one micro-batch through the whole model, over all the ranks that share it.

    repeated: how many layers of each distinct block are recomputed; None: as many as the policy says for one stage.

    Narayanan et al.'s count for GPT-3 (source: narayanan2021, equation 3), one sequence, whole layers recomputed:

    >>> from loadgauge.core.families.reference import gpt_model
    >>> l, h, s, v = 96, 12288, 2048, 51200
    >>> flops = microbatch_flops(gpt_model(l, h, 96, v), View.of(s, 1, kernels=Kernels(attention="eager")),
    ...                          RecomputePolicy(mode="full"))
    >>> flops.hardware == 96 * s * l * h**2 + 16 * l * s**2 * h + 6 * s * h * v
    True
    """
    whole = on_one_rank(view)
    modules = model.mtp_layers
    ends = [embedding_layer(model, whole), head_layer(model, whole)]
    if modules:
        ends += [prediction_layer(model, whole), head_layer(model, whole, shared=True)] * modules
    forward: Size = sum(layer.forward_flops for layer in ends)
    backward: Size = sum(layer.backward_flops for layer in ends)
    again: Size = sum(layer.recompute_flops() for layer in ends)
    counts = model.layer_counts()
    rerun = recomputed_counts(model, recompute, 0, model.num_hidden_layers) if repeated is None else repeated
    layers = block_layers(model.blocks, model.hidden_size, whole)
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
    return Flops(forward, backward - _not_made(model, whole, ends[0], layers), again)


def _not_made(model: ModelSpec, view: View, embedding: Layer, layers: Sequence[Layer]) -> Size:
    """FLOPs of the first layer's backward that adapters leave out: nothing before it is trained, so its input has no gradient."""
    first = model.pattern[0]
    trained = view.input_gradients or any(weight.trainable for weight in embedding.weights)
    if view.lora is None or not model.own.rewritten or trained or not model.blocks[first].reached:
        return 0  # of captured layers, and where only some are trained, each is known as it is
    alone = msgspec.structs.replace(model.blocks[first], reached=False)
    return layers[first].backward_flops - block_layer(alone, model.hidden_size, view).backward_flops


def step_flops(model: ModelSpec, layout: Layout, kernels: Kernels, view: View) -> Flops:
    """Return the FLOPs of one optimizer step, over all GPUs."""
    policy = layout.recompute
    repeated: list[Size] = [0] * len(model.blocks)
    for stage in stages(model, layout) if policy.mode != "none" else ():
        for (kind, again), count in stage.counts(policy, stage.start, stage.stop).items():
            repeated[kind] += count if again else 0
    if layout.copies > 1:
        # Half of the micro-batches pass each of the two copies.
        repeated = [count / layout.copies for count in repeated]
    return microbatch_flops(model, view, policy, repeated).times(layout.num_microbatches * layout.dp)
