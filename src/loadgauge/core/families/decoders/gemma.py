"""Gemma 1 to 4: a norm whose gain is an offset from 1 (not in Gemma 4), from Gemma 2 on a norm after each half and local layers."""

from collections.abc import Callable

import msgspec

from loadgauge.core.definitions.model.model import Attention, Block, Mlp, ModelSpec, Moe, Norm
from loadgauge.core.families import common as parts
from loadgauge.core.families.decoders import decoder
from loadgauge.core.families.decoders.decoder import Decoder, readers
from loadgauge.core.families.mixtures.experts import Experts
from loadgauge.core.families.reader import Reader


def gemma2_windows(reader: Reader, count: int) -> list[int | None]:
    """Return the window of each of `count` layers [tokens]; None: all keys. By `layer_types`, or each second layer has none."""
    window = reader.optional_whole("sliding_window")
    return parts.windows_where(reader, count, window, lambda i: not i % 2)


def gemma3_windows(reader: Reader, count: int) -> list[int | None]:
    """Return the window of each of `count` layers [tokens]; None: all keys.

    By `layer_types`; without it each sixth layer, or each `sliding_window_pattern`-th, has none.
    """
    window = reader.optional_whole("sliding_window")
    every = reader.whole("sliding_window_pattern", default=6)
    if window is not None and reader.flag("use_bidirectional_attention", nullable=True):
        window = window // 2 + 1  # as transformers' Gemma3TextConfig does
    return parts.windows_where(reader, count, window, lambda i: bool((i + 1) % every))


GEMMA4_NORM = Norm("rmsnorm", gain_float32=True, gain_copied=True, root_kept=True)
GEMMA4 = Decoder(
    classes={"Gemma4ForCausalLM": parts.LANGUAGE, "Gemma4TextModel": parts.BODY},
    activation_key="hidden_activation",
    ignored=("hidden_act", "attn_logit_softcapping", "expert_intermediate_size"),
    norm=GEMMA4_NORM,
    placement="sandwich",
    qk_norm=GEMMA4_NORM,
    softcaps=True,
    output_bias="attention_bias",
    windows=lambda reader, count: [None] * count,
    own_angles=False,
)
SIZES_OF_LAYERS = ("head_dim", "num_key_value_heads")
"""Keys of `per_layer_config` that are modelled."""
GEMMA4_EXPERTS = Experts(
    count=("num_experts",),
    per_token=("top_k_experts",),
    shared=lambda reader, width: reader.whole("intermediate_size"),
    weights_float32=True,
)


def gemma4_types(reader: Reader, count: int) -> tuple[str, ...]:
    """The type of attention of each of `count` layers: by `layer_types`, or all keys in each sixth; the last sees all."""
    types = parts.layer_types(reader, count)
    if types is None:
        types = tuple("sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(count))
    return (*types[:-1], "full_attention")


def own_keys(reader: Reader, count: int) -> dict[int, dict[str, int]]:
    """Return the sizes that `per_layer_config` states of single layers, by index; a layer not named has those of all layers.

    transformers writes there what it made of `global_head_dim` and its like, under "05" for layer 5 of 30. count: layers of the
    model. Raises `ConfigError` for a name that is no layer's, `NotModelled` for other keys than `SIZES_OF_LAYERS`.
    """
    layers = reader.section("per_layer_config", default={})
    sizes: dict[int, dict[str, int]] = {}
    for name in layers.config:
        if not (name.isascii() and name.isdecimal() and int(name) < count):
            raise layers.wrong(name, f"is not one of layers 0 to {count - 1}")
        layer = layers.section(name, default={})
        sizes[int(name)] = {key: layer.whole(key) for key in SIZES_OF_LAYERS if layer.has(key)}
        for key in layer.config:
            if key not in SIZES_OF_LAYERS:
                raise layer.unmodelled(key, "layers that differ one by one are not modelled")
    return sizes


def gemma4(reader: Reader) -> ModelSpec:
    """Read a config of Gemma 4: layers that see all keys have wider heads, and may make values of what makes keys; the last
    `num_kv_shared_layers` borrow keys and values. Raises as `hf.from_dict`.
    """
    everywhere = reader.raw("use_bidirectional_attention") == "all"
    moe = reader.flag("enable_moe_block")
    spec = decoder.read(reader, msgspec.structs.replace(GEMMA4, experts=GEMMA4_EXPERTS) if moe else GEMMA4)
    count = spec.num_hidden_layers
    types = gemma4_types(reader, count)
    window = reader.whole("sliding_window")
    window = window // 2 + 1 if everywhere else window
    joint = reader.flag("attention_k_eq_v")
    keys = reader.optional_whole("num_global_key_value_heads", default=None)
    wide = reader.whole("global_head_dim", default=512)
    sharing = count - reader.whole("num_kv_shared_layers", minimum=0)
    if sharing < 1:
        raise reader.wrong("num_kv_shared_layers", f"leaves none of {count} layers that makes keys and values")
    double = reader.flag("use_double_wide_mlp")
    own = reader.whole("hidden_size_per_layer_input", minimum=0)
    rows = reader.whole("vocab_size_per_layer_input")
    stated = own_keys(reader, count) if reader.has("per_layer_config") else None
    no_gain = msgspec.structs.replace(GEMMA4_NORM, weight=False)

    def made(index: int, block: Block) -> Block:
        attention, mlp = block.attention, block.mlp
        assert isinstance(attention, Attention)
        borrowed = index >= sharing
        attention = msgspec.structs.replace(attention, value_norm=no_gain, borrowed=borrowed, causal=not everywhere)
        if stated is not None:
            attention = msgspec.structs.replace(attention, **stated.get(index, {}))
        elif types[index] == "full_attention":
            few = keys if joint and keys else attention.num_key_value_heads
            attention = msgspec.structs.replace(attention, head_dim=wide, num_key_value_heads=few)
        if attention.num_attention_heads % attention.num_key_value_heads:
            key = "per_layer_config" if stated is not None else "num_global_key_value_heads"
            few = attention.num_key_value_heads
            raise reader.wrong(key, f"{few} does not divide {attention.num_attention_heads} heads")
        if types[index] == "full_attention":
            attention = msgspec.structs.replace(attention, keys_are_values=joint)
        else:
            attention = msgspec.structs.replace(attention, sliding_window=2 * window - 1 if everywhere else window)
        if double and borrowed and isinstance(mlp, Mlp):
            mlp = msgspec.structs.replace(mlp, intermediate_size=2 * mlp.intermediate_size)
        if isinstance(mlp, Moe):
            mlp = msgspec.structs.replace(mlp, own_norms=True)
        return msgspec.structs.replace(block, attention=attention, mlp=mlp, per_layer_input=own)

    spec = msgspec.structs.replace(spec, per_layer_vocab=rows if own else 0, rotary_tables=len(set(types)))
    return parts.rebuilt(spec, made)


READERS: dict[str, Callable[[Reader], ModelSpec]] = {
    "gemma4_text": gemma4,
    **readers(
        {
            "gemma": Decoder(
                classes=parts.decoder_classes("Gemma"),
                ignored=("hidden_activation",),
                renamed_activations={
                    "gelu": "gelu_pytorch_tanh"
                },  # the first published configs say gelu, and mean tanh
                norm=parts.RMS_NORM_PLUS_ONE,
                bidirectional_key=True,
            ),
            "gemma2": Decoder(
                classes=parts.decoder_classes("Gemma2"),
                activation_key="hidden_activation",
                ignored=("hidden_act",),
                norm=parts.RMS_NORM_PLUS_ONE,
                placement="sandwich",
                softcaps=True,
                bidirectional_key=True,
                windows=gemma2_windows,
            ),
            "vaultgemma": Decoder(
                classes=parts.language("VaultGemma"),
                activation_key="hidden_activation",
                ignored=("hidden_act",),
                norm=parts.RMS_NORM_PLUS_ONE,
                softcaps=True,
                windows=gemma2_windows,
            ),
            "gemma3_text": Decoder(
                classes={
                    "Gemma3ForCausalLM": parts.LANGUAGE,
                    "Gemma3TextForSequenceClassification": parts.CLASSIFY,
                    "Gemma3TextModel": parts.BODY,
                },
                activation_key="hidden_activation",
                ignored=("hidden_act",),
                norm=parts.RMS_NORM_PLUS_ONE,
                placement="sandwich",
                qk_norm=parts.RMS_NORM_PLUS_ONE,
                softcaps=True,
                bidirectional_key=True,
                windows=gemma3_windows,
                own_angles=True,
            ),
        }
    ),
}
