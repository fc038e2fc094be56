"""Gemma 1 to 3: a norm whose gain is an offset from 1, and from Gemma 2 on a norm after each half and local layers."""

from __future__ import annotations

from loadgauge.families import common as parts
from loadgauge.families.decoder import Decoder, readers
from loadgauge.families.reader import Reader


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


READERS = readers(
    {
        "gemma": Decoder(
            classes=parts.decoder_classes("Gemma"),
            ignored=("hidden_activation",),
            renamed_activations={"gelu": "gelu_pytorch_tanh"},  # the first published configs say gelu, and mean tanh
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
)
