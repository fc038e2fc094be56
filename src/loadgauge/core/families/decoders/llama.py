"""Llama and the families that differ from it in biases, windows, norms, fused matrices or the activation."""

from collections.abc import Callable, Sequence

import msgspec

from loadgauge.core.definitions.model.model import ModelSpec, Norm
from loadgauge.core.families import common as parts
from loadgauge.core.families.decoders import decoder
from loadgauge.core.families.decoders.decoder import Decoder, one_window, readers
from loadgauge.core.families.reader import Reader, shown

RMS_NORM_FLOAT32 = Norm("rmsnorm", gain_float32=True)
HELIUM_NORM = Norm("rmsnorm", gain_float32=True, gain_copied=True)


def ministral_windows(reader: Reader, count: int) -> list[int | None]:
    """Return the window of each of `count` layers [tokens]; None: all keys. By `layer_types`; without it, one for all."""
    window = reader.optional_whole("sliding_window")
    types = parts.layer_types(reader, count)
    if types is None:
        return [window] * count
    return parts.windows(reader, types, window)


def rope_layers(reader: Reader, count: int) -> list[bool]:
    """Return whether each of `count` layers rotates: 1 in `no_rope_layers`; without it, all but each
    `no_rope_layer_interval`-th.
    """
    interval = reader.whole("no_rope_layer_interval")
    listed = reader.wholes("no_rope_layers")
    if not listed:
        return [bool((i + 1) % interval) for i in range(count)]
    if len(listed) < count:
        raise reader.wrong("no_rope_layers", f"has {len(listed)} entries for {count} layers")
    return [bool(entry) for entry in listed[:count]]


def smollm3_windows(reader: Reader, count: int) -> list[int | None]:
    """Return the window of each of `count` layers [tokens]; None: all keys.

    With `use_sliding_window`, by `layer_types`; without it, the layers that do not rotate have one.
    """
    switched_on = reader.flag("use_sliding_window")
    window = reader.optional_whole("sliding_window")
    types = parts.layer_types(reader, count)
    if not switched_on or window is None:
        return [None] * count
    if types is None:
        return [None if rotates else window for rotates in rope_layers(reader, count)]
    return parts.windows(reader, types, window)


def exaone_windows(reader: Reader, count: int) -> list[int | None]:
    """Return the window of each of `count` layers [tokens]; None: all keys.

    By `layer_types`; without it by `sliding_window_pattern`, a number of layers, or L and G letter by letter.
    """
    window = reader.optional_whole("sliding_window")
    types = parts.layer_types(reader, count)
    letters = reader.raw("sliding_window_pattern")
    if types is None and (window is None or letters is None):
        return [None] * count
    if isinstance(letters, str):
        if not letters or not set(letters) <= {"L", "G"}:
            raise reader.wrong("sliding_window_pattern", f"must be L and G, or a number, got {shown(letters)}")
        local = [letters[i % len(letters)] == "L" and i < count - 1 for i in range(count)]
    else:
        every = reader.optional_whole("sliding_window_pattern", minimum=0 if types else 1) or 1
        local = [bool((i + 1) % every) for i in range(count)]
    if types is None:
        types = tuple("sliding_attention" if is_local else "full_attention" for is_local in local)
    return parts.windows(reader, types, window)


def exaone_rotated(reader: Reader, windows: Sequence[int | None]) -> Sequence[bool]:
    """Return whether each layer rotates: where some could have a window, those that have it; else all."""
    whole = reader.optional_whole("sliding_window") is None
    return [whole or window is not None for window in windows]


INTERNLM3 = Decoder(
    classes={**parts.language("InternLM3"), **parts.decoder_classes("Llama")},
    ignored=("qkv_bias", "bias"),
)
IQUEST = Decoder(
    classes={**parts.language("IQuestCoder"), **parts.decoder_classes("Llama")},
    clip_key="clip_qkv",
)


def internlm3(reader: Reader) -> ModelSpec:
    """Read a config of InternLM3: Llama, whose published configs have other names for its biases. Raises as `hf.from_dict`."""
    attention, mlp = (
        reader.flag(*names, default=False) for names in (("attention_bias", "qkv_bias"), ("mlp_bias", "bias"))
    )
    return decoder.read(
        reader, msgspec.structs.replace(INTERNLM3, qkv_bias=attention, output_bias=attention, mlp_bias=mlp)
    )


READERS: dict[str, Callable[[Reader], ModelSpec]] = {
    "internlm3": internlm3,
    **readers(
        {
            "iquestcoder": IQUEST,
            "llama": Decoder(classes=parts.decoder_classes("Llama")),
            "mistral": Decoder(classes=parts.decoder_classes("Mistral"), windows=one_window),
            "ministral": Decoder(classes=parts.decoder_classes("Ministral"), windows=ministral_windows),
            "ministral3": Decoder(
                classes=parts.decoder_classes("Ministral3"), query_scale="native", windows=one_window
            ),
            "phi3": Decoder(
                classes=parts.decoder_classes("Phi3"),
                fused_qkv=True,
                fused_gate_up=True,
                heads_first=True,
                residual_dropout="resid_pdrop",
                rotary_factor=1.0,
                windows=one_window,
            ),
            "phi4_multimodal": Decoder(  # beside its eyes and ears, and without the adapters for them
                classes=parts.language("Phi4Multimodal"),
                fused_qkv=True,
                fused_gate_up=True,
                heads_first=True,
                residual_dropout="resid_pdrop",
                rotary_factor=1.0,
                windows=one_window,
            ),
            "arcee": Decoder(classes=parts.decoder_classes("Arcee"), gated=False),
            "apertus": Decoder(
                classes=parts.decoder_classes("Apertus"),
                gated=False,
                ignored=("qk_norm", "post_norm", "mlp_bias"),
                qk_norm=parts.RMS_NORM,
            ),
            "granite": Decoder(classes=parts.decoder_classes("Granite")),
            "smollm3": Decoder(
                classes=parts.decoder_classes("SmolLM3"),
                ignored=("max_window_layers",),
                windows=smollm3_windows,
                rotated=lambda reader, windows: rope_layers(reader, len(windows)),
            ),
            "seed_oss": Decoder(
                classes=parts.decoder_classes("SeedOss"),
                output_bias="attention_out_bias",
                residual_dropout="residual_dropout",
            ),
            "helium": Decoder(
                classes=parts.decoder_classes("Helium"), norm=HELIUM_NORM, own_tables=2, output_bias=False
            ),
            "ernie4_5": Decoder(
                classes=parts.decoder_classes("Ernie4_5"),
                own_tables=2,
                tables_float32=True,
                qkv_bias="use_bias",
                output_bias="use_bias",
                mlp_bias="use_bias",
            ),
            "exaone4": Decoder(
                classes=parts.decoder_classes("Exaone4"),
                placement="after",
                qk_norm=parts.RMS_NORM,
                windows=exaone_windows,
                rotated=exaone_rotated,
            ),
        }
    ),
}
