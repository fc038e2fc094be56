"""XGLM and BioGPT: decoders that came out of fairseq, with biases and scaled embeddings."""

from functools import partial

import msgspec

from loadgauge.core.definitions.model.model import Attention, Block, ModelSpec
from loadgauge.core.families import common as parts
from loadgauge.core.families.reader import Reader


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """Config keys of the two families, by the name of the fact."""

    prefix: str
    hidden_size: tuple[str, ...]
    layers: tuple[str, ...]
    heads: tuple[str, ...]
    intermediate_size: str
    activation: str
    dropout: str
    attention_dropout: str
    learned: bool
    """Positions are a table; else sines and cosines, which are no parameters."""


def read(reader: Reader, names: Names) -> ModelSpec:
    """Read a config of XGLM or BioGPT, whose keys are those of `names`. Raises as `hf.from_dict`."""
    parts.refuse_cross_attention(reader, "a decoder that attends to an encoder")
    hidden_size = reader.whole(*names.hidden_size)
    heads = reader.whole(*names.heads)
    positions = reader.whole("max_position_embeddings")
    dropout = reader.rate(names.dropout)
    block = Block(
        attention=Attention(
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=parts.head_width(reader, hidden_size, heads, names.hidden_size[0]),
            qkv_bias=True,
            output_bias=True,
            rotary=False,
            scores_floored=not names.learned,
            softmax_float32=False,
            dropout=reader.rate(names.attention_dropout),
        ),
        mlp=parts.plain_mlp(
            reader, reader.whole(names.intermediate_size), names.activation, dropout=reader.rate("activation_dropout")
        ),
        norm=parts.LAYER_NORM,
        dropout=dropout,
    )
    reader.ignore("scale_embedding")
    return parts.assembled(
        reader,
        hidden_size,
        [block] * parts.layers(reader, *names.layers),
        max_position_embeddings=positions,
        learned_positions=positions + 2 if names.learned else 0,
        embedding_dropout=dropout,
        final_norm=parts.LAYER_NORM,
        head=parts.decoder_head(reader, parts.decoder_classes(names.prefix)),
    )


READERS = {
    "xglm": partial(
        read,
        names=Names(
            prefix="XGLM",
            hidden_size=("d_model", "hidden_size"),
            layers=("num_layers", "num_hidden_layers"),
            heads=("attention_heads", "num_attention_heads"),
            intermediate_size="ffn_dim",
            activation="activation_function",
            dropout="dropout",
            attention_dropout="attention_dropout",
            learned=False,
        ),
    ),
    "biogpt": partial(
        read,
        names=Names(
            prefix="BioGpt",
            hidden_size=("hidden_size",),
            layers=("num_hidden_layers",),
            heads=("num_attention_heads",),
            intermediate_size="intermediate_size",
            activation="hidden_act",
            dropout="hidden_dropout_prob",
            attention_dropout="attention_probs_dropout_prob",
            learned=True,
        ),
    ),
}
