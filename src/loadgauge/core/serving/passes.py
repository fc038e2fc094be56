"""The layers of a forward pass on one stage: of whole prompts, or of one new token of each sequence.

The operations are those that training is summed from (`layers/`), read forward only. Of a mixture, a few tokens reach only some
experts: of E with k a token, E (1 - (1 - k/E)^T) are reached by T tokens whose choices are even and independent.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from loadgauge.core.base.algebra import Size
from loadgauge.core.definitions.layout.axes import MODEL_PARALLEL
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.definitions.model.model import ModelSpec, Moe
from loadgauge.core.definitions.serving.inference import CACHE_FORMATS, Inference
from loadgauge.core.estimate.schedule.stages import Stage, stages
from loadgauge.core.layers import View, block_layer, embedding_layer, head_layer
from loadgauge.core.layers.embedding_head import prediction_layer
from loadgauge.core.layers.operations.operations import Layer, Operation

KERNELS = Kernels(norm="fused", norm_kernel="fused", activation="fused", experts="fused", chooses="fused")
"""Engines of inference have fused kernels; rotation and other element-wise steps stay operations of their own."""


AXES_OF = tuple(axis for axis in MODEL_PARALLEL if axis in Inference.__struct_fields__)
"""The axes that inference can be split by: tp, pp, ep."""


class Part(msgspec.Struct, frozen=True):
    """A layer and how often a pass runs through it on a stage."""

    name: str
    layer: Layer
    times: int


def split(model: ModelSpec, asked: Inference) -> tuple[Stage, ...]:
    """Return the pipeline stages. Raises `LayoutError` for a layout that the model does not allow.

    Layers that do not divide go one each to the last stages but the very last, which has the head (source: vllm,
    `distributed/utils.py`, `get_pp_indices`; sglang, `distributed/utils.py`, too).

    >>> from loadgauge import model
    >>> [stage.stop - stage.start for stage in split(model("deepseek-v3"), Inference(task="generate", context=64, answer=1, pp=4))]
    [15, 15, 16, 15]
    """
    each, left = divmod(model.num_hidden_layers, asked.pp)
    layers = tuple(each + (asked.pp - 2 - left < stage < asked.pp - 1) for stage in range(asked.pp))
    layout = Layout(
        tp=asked.tp,
        pp=asked.pp,
        stage_layers=layers if each and left else None,
        ep=asked.ep,
        etp=asked.etp if model.has_experts else 1,
        dp=asked.attentions,
        global_batch=asked.attentions,
        seq_len=-(-asked.context // asked.tp) * asked.tp,
        sequence_parallel=model.has_experts and asked.tp > 1,
    )
    layout.check(model)
    return stages(model, layout)


def _ranks(model: ModelSpec, asked: Inference, *, whole: bool) -> dict[str, Any]:
    """Fields that share out a view. whole: on one rank, as FLOPs are counted

    Of a mixture each expert is on `etp` ranks, which gather the tokens: the same bytes as to sum over them. Ranks need not have
    equally many.
    """
    if whole:
        return {"kernels": KERNELS}
    shared: dict[str, Any] = {"tp": asked.tp, "kernels": KERNELS}
    if model.has_experts:
        shared |= {"ep": asked.ep, "etp": asked.etp, "sequence_parallel": asked.tp > 1}
    return shared


def of_prompts(model: ModelSpec, asked: Inference, *, whole: bool = False) -> View:
    """Return the view of all prompts of the batch on one rank; whole: as if one rank did it all."""
    return _shared(View.of(asked.prompt, asked.batch, **_ranks(model, asked, whole=whole)))


def of_chunk(model: ModelSpec, asked: Inference) -> View:
    """Return the view of the prompts that run at once, which memory depends on; the pairs of a chunk meet the whole prompt."""
    chunk = asked.at_once
    return _shared(msgspec.structs.replace(of_prompts(model, asked), tokens=chunk, pairs=chunk * asked.prompt))


def of_token(model: ModelSpec, asked: Inference, context: Size, *, whole: bool = False) -> View:
    """Return the view of one new token of each sequence, at a context of so many tokens, the new one included."""
    return _shared(
        View.of_token(asked.batch, context, CACHE_FORMATS[asked.cache_format], **_ranks(model, asked, whole=whole))
    )


def _shared(view: View) -> View:
    """The view with its tokens as a number that ranks share unevenly, where they do."""
    return msgspec.structs.replace(view, tokens=float(view.tokens)) if view.sequence_parallel else view


def parts(model: ModelSpec, stage: Stage, view: View, rows: Size, attentions: int = 1) -> Iterator[Part]:
    """Yield the layers of a stage. rows: tokens whose logits are wanted; attentions: `Inference.attentions`"""
    for kind, times in enumerate(model.layer_counts(stage.start, stage.stop)):
        if times:
            layer = block_layer(model.blocks[kind], model.hidden_size, view)
            mixture = model.blocks[kind].mlp
            if isinstance(mixture, Moe):
                layer = _reached(layer, mixture, view.tokens * attentions)
            yield Part(f"layers of kind {kind}" if len(model.blocks) > 1 else "layers", layer, times)
    if stage.first:
        yield Part("embedding", embedding_layer(model, view), 1)
    if stage.last:
        own = _shared(msgspec.structs.replace(view, tokens=rows, pairs=rows, positions=1, cached=None))
        if model.mtp_layers:
            yield Part("prediction", prediction_layer(model, view), model.mtp_layers)
        yield Part("head", head_layer(model, own, loss=False, holds_table=not stage.first), 1)


def touched(experts: Size, per_token: Size, tokens: Size) -> Size:
    """Return the number of experts that some token of `tokens` goes to, at even and independent choices.

    >>> touched(8, 2, 1), round(touched(256, 8, 16), 1), round(touched(256, 8, 4096))
    (2.0, 102.0, 256)
    """
    return experts * (1 - (1 - per_token / experts) ** tokens)


def _reached(layer: Layer, mixture: Moe, tokens: Size) -> Layer:
    """The layer whose grouped products are of the experts that are reached."""
    share = touched(mixture.num_experts, mixture.computed_per_tok, tokens) / mixture.num_experts

    def fewer(operation: Operation) -> Operation:
        if not any(weight.expert for weight in operation.weights):
            return operation
        products = tuple(
            msgspec.structs.replace(product, m=product.m / share, batch=product.batch * share)
            for product in operation.gemms
        )
        return msgspec.structs.replace(operation, gemms=products)

    return Layer(layer.name, tuple(fewer(operation) for operation in layer))
