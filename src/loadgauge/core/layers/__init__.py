"""The layers, each written once as a list of operations."""

from loadgauge.core.layers.block import block_layer, block_layers
from loadgauge.core.layers.embedding_head import embedding_layer, head_layer, rotary_layer
from loadgauge.core.layers.operations.rank_view import View

__all__ = ["View", "block_layer", "block_layers", "embedding_layer", "head_layer", "rotary_layer"]
