"""Decoders with rotary positions and LayerNorm: StarCoder 2, Phi 1 and 2, StableLM, Persimmon, Nemotron, Cohere."""

from collections.abc import Sequence

from loadgauge.core.definitions.model.model import Norm
from loadgauge.core.families import common as parts
from loadgauge.core.families.decoders.decoder import Decoder, one_window, readers, typed_windows
from loadgauge.core.families.reader import Reader

COHERE_NORM = Norm("layernorm", arithmetic="written")


def local_rotate(reader: Reader, windows: Sequence[int | None]) -> Sequence[bool]:
    """Return whether each layer rotates: those with a window do (Cohere 2)."""
    return [window is not None for window in windows]


READERS = readers(
    {
        "starcoder2": Decoder(
            classes=parts.decoder_classes("Starcoder2"),
            ignored=("mlp_type", "norm_type", "activation_function"),
            norm=parts.LAYER_NORM,
            gated=False,
            qkv_bias="use_bias",
            output_bias="use_bias",
            mlp_bias="use_bias",
            residual_dropout="residual_dropout",
            embedding_dropout="embedding_dropout",
            windows=one_window,
        ),
        "phi": Decoder(
            classes=parts.decoder_classes("Phi"),
            norm=parts.LAYER_NORM,
            placement="parallel",
            qk_norm=parts.LAYER_NORM,
            qk_normed="qk_layernorm",
            gated=False,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            head_bias=True,
            rotary_factor=0.5,
            residual_dropout="resid_pdrop",
            embedding_dropout="embd_pdrop",
        ),
        "stablelm": Decoder(
            classes=parts.decoder_classes("StableLm"),
            norm=parts.LAYER_NORM,
            parallel="use_parallel_residual",
            qk_norm=Norm("layernorm"),
            qk_norm_over="own",
            qk_normed="qk_layernorm",
            qkv_bias="use_qkv_bias",
            rotary_factor=0.25,
            residual_dropout="hidden_dropout",
            dropout_after_attention=False,
        ),
        "persimmon": Decoder(
            classes=parts.decoder_classes("Persimmon"),
            norm=parts.LAYER_NORM,
            qk_norm=parts.LAYER_NORM,
            qk_normed="qk_layernorm",
            gated=False,
            fused_qkv=True,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            rotary_factor=0.5,
            residual_dropout="hidden_dropout",
            dropout_after_attention=False,
        ),
        "nemotron": Decoder(
            classes=parts.decoder_classes("Nemotron"),
            norm=Norm("layernorm_plus_one", bias=True),
            gated=False,
            rotary_factor=0.5,
            ignored=("rope_percent", "rope_percentage"),
        ),
        "jais2": Decoder(
            classes=parts.language("Jais2"),
            norm=parts.LAYER_NORM,
            gated=False,
        ),
        "cohere": Decoder(
            classes=parts.decoder_classes("Cohere"),
            norm=COHERE_NORM,
            placement="parallel",
            qk_norm=COHERE_NORM,
            qk_norm_over="own",
            qk_normed="use_qk_norm",
        ),
        "cohere2": Decoder(
            classes=parts.decoder_classes("Cohere2"),
            norm=COHERE_NORM,
            placement="parallel",
            ignored=(
                "use_embedding_sharing",
                "use_gated_activation",
                "use_parallel_block",
                "use_parallel_embedding",
                "position_embedding_type",
                "order_of_interleaved_layers",
                "rotary_pct",
                "head_dim",
                "layer_switch",
            ),
            windows=typed_windows(lambda reader: reader.whole("sliding_window_pattern", default=4)),
            rotated=local_rotate,
        ),
    }
)
