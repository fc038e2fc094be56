"""The layers, each written once as a list of operations."""

from loadgauge.layers.block import block_layer
from loadgauge.layers.embedding_head import embedding_layer, head_layer, rotary_layer
from loadgauge.layers.rank_view import View

__all__ = ["View", "block_layer", "embedding_layer", "head_layer", "rotary_layer"]
