"""GPT-J, CodeGen and GPT-Neo: relatives of GPT-2 with other positions."""

from functools import partial

import msgspec

from loadgauge.core.definitions.model.model import Attention, Block, ModelSpec
from loadgauge.core.families import common as parts
from loadgauge.core.families.reader import Reader


def gptj(reader: Reader, prefix: str, fused: bool) -> ModelSpec:
    """Read a config of GPT-J or CodeGen: attention and MLP side by side after one norm, part of each head rotated.

    prefix: of transformers' classes; fused: one weight makes queries, keys and values. Raises as `hf.from_dict`.
    """
    hidden_size, heads, count = parts.sizes(reader, "n_embd", "n_head", "n_layer")
    head_dim = parts.head_width(reader, hidden_size, heads, "n_embd")
    turned = reader.optional_whole("rotary_dim")
    if turned is not None and turned > head_dim:
        raise reader.wrong("rotary_dim", f"{turned} is more than the {head_dim} channels of a head")
    block = Block(
        attention=Attention(
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=head_dim,
            fused_qkv=fused,
            rotary_dim=None if turned == head_dim else turned,
            own_tables=4,
            scores_float32=True,
            dropout=reader.rate("attn_pdrop"),
        ),
        mlp=parts.plain_mlp(reader, reader.optional_whole("n_inner") or 4 * hidden_size, "activation_function"),
        norm=parts.LAYER_NORM,
        placement="parallel",
        shared_norm=True,
        dropout=reader.rate("resid_pdrop"),
    )
    return parts.assembled(
        reader,
        hidden_size,
        [block] * count,
        max_position_embeddings=reader.whole("n_positions", "max_position_embeddings"),
        embedding_dropout=reader.rate("embd_pdrop"),
        final_norm=parts.LAYER_NORM,
        head=parts.decoder_head(reader, parts.decoder_classes(prefix), bias=True),
    )


def _attention_types(reader: Reader, count: int) -> tuple[str, ...]:
    """`attention_types`: pairs of a list of types and how often it is repeated."""
    by_layer: list[str] = []
    stated = reader.raw("attention_types")
    for entry in [[["global", "local"], 12]] if stated is None else stated if isinstance(stated, list) else [stated]:
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], list):
            raise reader.wrong("attention_types", "must be pairs of a list of types and a number")
        if isinstance(entry[1], bool) or not isinstance(entry[1], int) or not 0 <= entry[1] <= parts.MOST_LAYERS:
            raise reader.wrong("attention_types", "must be pairs of a list of types and a number of layers")
        if len(by_layer) + len(entry[0]) * entry[1] > count:
            raise reader.wrong("attention_types", f"has more entries than {count} layers")
        by_layer += entry[0] * entry[1]
    if len(by_layer) != count or not all(kind in ("global", "local") for kind in by_layer):
        raise reader.wrong("attention_types", f"must be global or local for each of {count} layers")
    return tuple(by_layer)


def gpt_neo(reader: Reader) -> ModelSpec:
    """Read a config of GPT-Neo: learned positions, a window in every second layer. Raises as `hf.from_dict`."""
    hidden_size, heads, count = parts.sizes(reader, "hidden_size", "num_heads", "num_layers")
    positions = reader.whole("max_position_embeddings")
    window = reader.whole("window_size")
    reader.ignore("attention_layers")  # transformers works it out anew
    attention = parts.multi_head(
        reader,
        hidden_size,
        heads,
        output_bias=True,
        rotary=False,
        scores_float32=True,
        dropout=reader.rate("attention_dropout"),
    )
    mlp = parts.plain_mlp(reader, reader.optional_whole("intermediate_size") or 4 * hidden_size, "activation_function")
    dropout = reader.rate("resid_dropout")
    layers = [
        Block(
            attention=msgspec.structs.replace(attention, sliding_window=window if kind == "local" else None),
            mlp=mlp,
            norm=parts.LAYER_NORM,
            dropout=dropout,
        )
        for kind in _attention_types(reader, count)
    ]
    return parts.assembled(
        reader,
        hidden_size,
        layers,
        max_position_embeddings=positions,
        learned_positions=positions,
        embedding_dropout=reader.rate("embed_dropout"),
        final_norm=parts.LAYER_NORM,
        head=parts.decoder_head(reader, parts.decoder_classes("GPTNeo")),
    )


READERS = {
    "gptj": partial(gptj, prefix="GPTJ", fused=False),
    "codegen": partial(gptj, prefix="CodeGen", fused=True),
    "gpt_neo": gpt_neo,
}
