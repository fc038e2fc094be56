"""Parameters, counted from the list of operations."""

import msgspec

from loadgauge.core.base.algebra import Size, remembered, shard
from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.definitions.model.model import Block, ModelSpec, Moe
from loadgauge.core.layers import View, block_layer, embedding_layer, head_layer
from loadgauge.core.layers.embedding_head import prediction_layer
from loadgauge.core.layers.operations.operations import Layer


class Parameters(msgspec.Struct, frozen=True):
    """Parameters of a whole model by part. Tied embeddings are counted once."""

    embedding: Size
    layers: Size
    head: Size
    idle: Size = 0
    """Of the routed experts that a token does not pass through."""
    mtp: Size = 0
    """Of the multi-token prediction modules, without the embedding and the head that they share with the model."""

    @property
    def total(self) -> Size:
        """Number of all parameters."""
        return self.embedding + self.layers + self.head + self.mtp

    @property
    def active(self) -> Size:
        """Parameters a token passes through: of E routed experts, the K it is routed to. Both tables count.

        DeepSeek and OpenAI leave out the embedding (`active - embedding`), Mistral counts it.
        """
        return self.total - self.idle


@remembered(64)
def parameters(model: ModelSpec) -> Parameters:
    """Count a model's parameters by part.

    The total equals `sum(p.numel() for p in model.parameters())` of transformers' class.

    >>> from loadgauge.core.families.reference import llama_model
    >>> parameters(llama_model(80, 8192, 64, 32000)).total
    65285660672
    """
    view = View(tokens=1, pairs=1, kernels=Kernels())
    counts = model.layer_counts()
    blocks = [(block, block_layer(block, model.hidden_size, view)) for block in model.blocks]
    idle = sum(count * _idle(block, layer) for count, (block, layer) in zip(counts, blocks, strict=True))
    module: Size = 0
    if model.mtp_layers:
        last, layer = blocks[model.pattern[-1]]
        ends = prediction_layer(model, view).params + head_layer(model, view, loss=False, shared=True).params
        module, idle = ends + layer.params, idle + model.mtp_layers * _idle(last, layer)
    return Parameters(
        embedding=embedding_layer(model, view).params,
        layers=sum(count * layer.params for count, (_, layer) in zip(counts, blocks, strict=True)),
        head=head_layer(model, view, loss=False).params,
        idle=idle,
        mtp=model.mtp_layers * module,
    )


def _idle(block: Block, layer: Layer) -> Size:
    """Parameters of the experts that a token is not sent to."""
    if not isinstance(block.mlp, Moe):
        return 0
    routed = sum(weight.numel for weight in layer.weights if weight.expert)
    idle = shard(routed, block.mlp.num_experts) * (block.mlp.num_experts - block.mlp.computed_per_tok)
    return round(idle) if isinstance(idle, float) else idle
