"""Gemma 3n: several residual streams of which a layer computes one (AltUp), and a product beside attention (LAuReL)."""

from collections.abc import Callable

import msgspec

from loadgauge.core.definitions.model.model import AltUp, Attention, Block, Mlp, ModelSpec
from loadgauge.core.families import common as parts
from loadgauge.core.families.decoders import decoder
from loadgauge.core.families.decoders.gemma import GEMMA4
from loadgauge.core.families.reader import Reader

GEMMA_3N = msgspec.structs.replace(
    GEMMA4,
    classes={"Gemma3nForCausalLM": parts.LANGUAGE, "Gemma3nTextModel": parts.BODY},
    ignored=("hidden_act", "altup_active_idx", "altup_coef_clip"),
    placement="pre",
)
SPARSE_LAYERS = 10
"""Layers of a model of more whose MLPs have a cut-off, where the config does not say."""


def gemma3n(reader: Reader) -> ModelSpec:
    """Read a config of Gemma 3n's text tower; its last `num_kv_shared_layers` borrow keys and values. Raises as
    `hf.from_dict`.
    """
    count = parts.layers(reader, "num_hidden_layers")
    widths = (
        reader.wholes("intermediate_size", minimum=1) if isinstance(reader.raw("intermediate_size"), list) else None
    )
    if widths is not None:
        if len(widths) != count:
            raise reader.wrong("intermediate_size", f"has {len(widths)} entries for {count} layers")
        reader.config = {**reader.config, "intermediate_size": widths[0]}
    spec = decoder.read(reader, GEMMA_3N)
    types = parts.layer_types(reader, count)
    if types is None:
        types = tuple("sliding_attention" if (i + 1) % 5 else "full_attention" for i in range(count))
    window = reader.whole("sliding_window")
    sharing = count - reader.whole("num_kv_shared_layers", minimum=0)
    if sharing < 1 or not set(types) <= set(types[:sharing]):
        raise reader.wrong("num_kv_shared_layers", "leaves no layer of each kind that makes keys and values")
    cut_off = reader.raw("activation_sparsity_pattern")
    if cut_off is None:
        cut_off = [0.95] * (SPARSE_LAYERS if count > SPARSE_LAYERS else 0) + [0.0] * count
    if isinstance(cut_off, int | float):
        cut_off = [cut_off] * count
    if not isinstance(cut_off, list) or len(cut_off) < count:
        raise reader.wrong("activation_sparsity_pattern", f"must be a list of {count} numbers")
    streams = AltUp(
        count=reader.whole("altup_num_inputs"),
        laurel_rank=reader.whole("laurel_rank"),
        scaled=reader.flag("altup_correct_scale"),
    )
    own = reader.whole("hidden_size_per_layer_input")
    no_gain = msgspec.structs.replace(GEMMA4.norm, weight=False)

    def made(index: int, block: Block) -> Block:
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, Attention)
        assert isinstance(mlp, Mlp)
        attention = msgspec.structs.replace(
            attention,
            value_norm=no_gain,
            borrowed=index >= sharing,
            sliding_window=window if types[index] == "sliding_attention" else None,
        )
        mlp = msgspec.structs.replace(mlp, cut_off=bool(cut_off[index]))
        if widths is not None:
            mlp = msgspec.structs.replace(mlp, intermediate_size=widths[index])
        return msgspec.structs.replace(block, attention=attention, mlp=mlp, streams=streams, per_layer_input=own)

    rows = reader.whole("vocab_size_per_layer_input")
    spec = msgspec.structs.replace(spec, per_layer_vocab=rows, rotary_tables=len(set(types)))
    return parts.rebuilt(spec, made)


READERS: dict[str, Callable[[Reader], ModelSpec]] = {"gemma3n_text": gemma3n}
