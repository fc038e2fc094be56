"""Nemotron-NAS: Llama 3 after a search that took attention, or channels of the MLP, out of single layers."""

from collections.abc import Callable

from loadgauge.core.definitions.model.model import Attention, Block, Mlp, ModelSpec
from loadgauge.core.families import common as parts
from loadgauge.core.families.reader import Reader

UNUSUAL = ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens", "unshifted_sink", "is_mamba", "moe")
EXAMPLE = '{"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": 5.25}}'
STEP = 256
"""MLPs are as wide as a multiple of this."""


def _part(reader: Reader, name: str) -> Reader | None:
    """One half of a block; None where there is nothing of it."""
    part = reader.section(name, default={"no_op": True})
    for key in UNUSUAL:
        if part.raw(key, default=None):
            raise part.unmodelled(key, "is not modelled for this family")
    part.ignore(*part.config)
    return None if part.flag("no_op", default=False) else part


def nemotron_nas(reader: Reader) -> ModelSpec:
    """Read a config of Nemotron-NAS: `block_configs` says of each layer how many query heads share a key head and how wide its
    MLP is. Raises as `hf.from_dict`.
    """
    hidden = reader.whole("hidden_size")
    heads = reader.whole("num_attention_heads", default=32)
    count = parts.layers(reader, "num_hidden_layers")
    stated = reader.raw("block_configs", default=None)
    if stated is None:
        raise reader.wrong("block_configs", f"is missing; add the published list, {EXAMPLE} for each of {count} layers")
    if not isinstance(stated, list) or len(stated) != count:
        raise reader.wrong("block_configs", f"must be a list of {count} objects, one for each layer")
    reader.ignore("intermediate_size", "num_key_value_heads")
    width = parts.head_width(reader, hidden, heads)
    bias, activation = reader.flag("mlp_bias", default=False), reader.text("hidden_act", default="silu")

    def block(index: int) -> Block:
        inner = reader.within(stated[index], path=f"block_configs[{index}]")
        attend, feed = _part(inner, "attention"), _part(inner, "ffn")
        if attend is None and feed is None:
            raise inner.unmodelled("ffn", "a layer without attention and MLP is not modelled")
        mixer = mlp = None
        if attend is not None:
            shared = attend.whole("n_heads_in_group", default=1)
            if heads % shared:
                raise attend.wrong("n_heads_in_group", f"{shared} does not divide {heads} heads")
            mixer = Attention(
                num_attention_heads=heads,
                num_key_value_heads=heads // shared,
                head_dim=width,
                qkv_bias=reader.flag("attention_bias", default=False),
                output_bias=reader.flag("attention_bias", default=False),
                dropout=reader.rate("attention_dropout", default=0.0),
            )
        if feed is not None:
            factor = feed.optional_real("ffn_mult", default=None)
            if factor is None:
                raise feed.wrong("ffn_mult", "is missing")
            size = STEP * -(-int(2 * factor * hidden / 3) // STEP)
            mlp = Mlp(intermediate_size=size, bias=bias, activation=activation)
        return Block(attention=mixer, mlp=mlp, norm=parts.RMS_NORM)

    return parts.assembled(
        reader,
        hidden,
        [block(index) for index in range(count)],
        max_position_embeddings=reader.whole("max_position_embeddings", default=2048),
        final_norm=parts.RMS_NORM,
        head=parts.decoder_head(reader, {"DeciLMForCausalLM": parts.LANGUAGE, "DeciLMModel": parts.BODY}),
    )


READERS: dict[str, Callable[[Reader], ModelSpec]] = {"nemotron-nas": nemotron_nas}
