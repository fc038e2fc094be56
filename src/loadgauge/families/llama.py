"""Llama and the families that differ from it in biases, windows, norms, fused matrices or the activation."""

from __future__ import annotations

from collections.abc import Sequence

from loadgauge.families import common as parts
from loadgauge.families.common import ATTENTION_BIAS
from loadgauge.families.decoder import Decoder, one_window, readers
from loadgauge.families.reader import Reader, shown
from loadgauge.spec.model import Norm

RMS_NORM_FLOAT32 = Norm("rmsnorm", gain_float32=True)
HELIUM_NORM = Norm("rmsnorm", gain_float32=True, gain_copied=True)


def ministral_windows(reader: Reader, count: int) -> list[int | None]:
    """`layer_types`; where it is missing, every layer has the window, if there is one."""
    window = reader.optional_whole("sliding_window", default=4096)
    types = parts.layer_types(reader, count)
    if types is None:
        return [window] * count
    return parts.windows(reader, types, window)


def rope_layers(reader: Reader, count: int) -> list[bool]:
    """Layers that rotate: 1 in `no_rope_layers`; where it is missing, all but each `no_rope_layer_interval`-th."""
    interval = reader.whole("no_rope_layer_interval", default=4)
    listed = reader.wholes("no_rope_layers")
    if not listed:
        return [bool((i + 1) % interval) for i in range(count)]
    if len(listed) < count:
        raise reader.wrong("no_rope_layers", f"has {len(listed)} entries for {count} layers")
    return [bool(one) for one in listed[:count]]


def smollm3_windows(reader: Reader, count: int) -> list[int | None]:
    """With `use_sliding_window`, the layers that do not rotate have a window, or those `layer_types` says."""
    switched_on = reader.flag("use_sliding_window", default=False)
    window = reader.optional_whole("sliding_window", default=None)
    types = parts.layer_types(reader, count)
    if not switched_on or window is None:
        return [None] * count
    if types is None:
        return [None if rotates else window for rotates in rope_layers(reader, count)]
    return parts.windows(reader, types, window)


def smollm3_rotated(reader: Reader, windows: Sequence[int | None]) -> Sequence[bool]:
    """Three layers of four."""
    return rope_layers(reader, len(windows))


def exaone_windows(reader: Reader, count: int) -> list[int | None]:
    """`layer_types`; where it is missing, `sliding_window_pattern`: a number of layers, or L and G letter by letter."""
    window = reader.optional_whole("sliding_window", default=4096)
    types = parts.layer_types(reader, count)
    letters = reader.raw("sliding_window_pattern", default=4)
    if types is None and (window is None or letters is None):
        return [None] * count
    if isinstance(letters, str):
        if not letters or not set(letters) <= {"L", "G"}:
            raise reader.wrong("sliding_window_pattern", f"must be L and G, or a number, got {shown(letters)}")
        local = [letters[i % len(letters)] == "L" and i < count - 1 for i in range(count)]
    else:
        every = reader.optional_whole("sliding_window_pattern", default=4, minimum=0 if types else 1) or 1
        local = [bool((i + 1) % every) for i in range(count)]
    if types is None:
        types = tuple("sliding_attention" if one else "full_attention" for one in local)
    return parts.windows(reader, types, window)


def exaone_rotated(reader: Reader, windows: Sequence[int | None]) -> Sequence[bool]:
    """Where some layers could have a window, only those that have it rotate."""
    whole = reader.optional_whole("sliding_window", default=4096) is None
    return [whole or window is not None for window in windows]


READERS = readers(
    {
        "llama": Decoder(
            classes=parts.decoder_classes("Llama"),
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=None,
            max_position_embeddings=2048,
            qkv_bias=ATTENTION_BIAS,
            output_bias=ATTENTION_BIAS,
            mlp_bias=("mlp_bias", False),
        ),
        "mistral": Decoder(
            classes=parts.decoder_classes("Mistral"),
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            windows=one_window(4096),
        ),
        "ministral": Decoder(
            classes=parts.decoder_classes("Ministral"),
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            windows=ministral_windows,
        ),
        "ministral3": Decoder(
            classes=parts.decoder_classes("Ministral3"),
            vocab_size=131072,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=34,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            query_scale="native",
            max_position_embeddings=262144,
            windows=one_window(None),
        ),
        "phi3": Decoder(
            classes=parts.decoder_classes("Phi3"),
            vocab_size=32064,
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=None,
            max_position_embeddings=4096,
            fused_qkv=True,
            fused_gate_up=True,
            heads_first=True,
            residual_dropout=("resid_pdrop", 0.0),
            rotary_factor=1.0,
            windows=one_window(None),
        ),
        "arcee": Decoder(
            classes=parts.decoder_classes("Arcee"),
            vocab_size=32000,
            hidden_size=2560,
            intermediate_size=18432,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=None,
            max_position_embeddings=4096,
            activation="relu2",
            gated=False,
            qkv_bias=ATTENTION_BIAS,
            output_bias=ATTENTION_BIAS,
            mlp_bias=("mlp_bias", False),
        ),
        "apertus": Decoder(
            classes=parts.decoder_classes("Apertus"),
            vocab_size=131072,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=None,
            max_position_embeddings=65536,
            activation="xielu",
            gated=False,
            ignored=("qk_norm", "post_norm", "mlp_bias"),
            qk_norm=parts.RMS_NORM,
            qkv_bias=ATTENTION_BIAS,
            output_bias=ATTENTION_BIAS,
        ),
        "granite": Decoder(
            classes=parts.decoder_classes("Granite"),
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=None,
            max_position_embeddings=2048,
            qkv_bias=ATTENTION_BIAS,
            output_bias=ATTENTION_BIAS,
            mlp_bias=("mlp_bias", False),
        ),
        "smollm3": Decoder(
            classes=parts.decoder_classes("SmolLM3"),
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=11008,
            num_hidden_layers=36,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
            qkv_bias=ATTENTION_BIAS,
            output_bias=ATTENTION_BIAS,
            mlp_bias=("mlp_bias", False),
            ignored=("max_window_layers",),
            windows=smollm3_windows,
            rotated=smollm3_rotated,
        ),
        "seed_oss": Decoder(
            classes=parts.decoder_classes("SeedOss"),
            vocab_size=155136,
            hidden_size=4096,
            intermediate_size=27648,
            num_hidden_layers=64,
            num_attention_heads=80,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=524288,
            qkv_bias=("attention_bias", True),
            output_bias=("attention_out_bias", False),
            mlp_bias=("mlp_bias", False),
            attention_dropout=0.1,
            residual_dropout=("residual_dropout", 0.1),
        ),
        "helium": Decoder(
            classes=parts.decoder_classes("Helium"),
            vocab_size=48000,
            hidden_size=2560,
            intermediate_size=7040,
            num_hidden_layers=24,
            num_attention_heads=20,
            num_key_value_heads=20,
            head_dim=128,
            max_position_embeddings=4096,
            norm=HELIUM_NORM,
            own_tables=2,
            qkv_bias=ATTENTION_BIAS,
            mlp_bias=("mlp_bias", False),
        ),
        "ernie4_5": Decoder(
            classes=parts.decoder_classes("Ernie4_5"),
            vocab_size=103424,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=18,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=128,
            max_position_embeddings=131072,
            tie_word_embeddings=True,
            own_tables=2,
            tables_float32=True,
            qkv_bias=("use_bias", False),
            output_bias=("use_bias", False),
            mlp_bias=("use_bias", False),
        ),
        "exaone4": Decoder(
            classes=parts.decoder_classes("Exaone4"),
            vocab_size=102400,
            hidden_size=4096,
            intermediate_size=16384,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
            max_position_embeddings=2048,
            placement="after",
            qk_norm=parts.RMS_NORM,
            windows=exaone_windows,
            rotated=exaone_rotated,
        ),
    }
)
