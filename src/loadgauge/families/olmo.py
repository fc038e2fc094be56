"""OLMo 1 to 3 and OLMoE: norms without a gain, then norms after each half, and over all heads of queries and keys."""

from __future__ import annotations

from loadgauge.families import common as parts
from loadgauge.families.common import ATTENTION_BIAS
from loadgauge.families.decoder import Decoder, readers, typed_windows
from loadgauge.families.experts import Experts
from loadgauge.spec.model import Norm

RMS_NORM_FLOAT32 = Norm("rmsnorm", gain_float32=True)

READERS = readers(
    {
        "olmo": Decoder(
            classes=parts.decoder_classes("Olmo"),
            vocab_size=50304,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=None,
            max_position_embeddings=2048,
            norm=Norm("layernorm", weight=False, arithmetic="float32"),
            qkv_bias=ATTENTION_BIAS,
            output_bias=ATTENTION_BIAS,
            clip_key="clip_qkv",
        ),
        "olmo2": Decoder(
            classes=parts.decoder_classes("Olmo2"),
            vocab_size=50304,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=None,
            max_position_embeddings=2048,
            norm=RMS_NORM_FLOAT32,
            placement="after",
            qk_norm=RMS_NORM_FLOAT32,
            qk_norm_over="all",
            qkv_bias=ATTENTION_BIAS,
            output_bias=ATTENTION_BIAS,
        ),
        "olmo3": Decoder(
            classes=parts.decoder_classes("Olmo3"),
            vocab_size=50304,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=None,
            max_position_embeddings=2048,
            norm=RMS_NORM_FLOAT32,
            placement="after",
            qk_norm=RMS_NORM_FLOAT32,
            qk_norm_over="all",
            qkv_bias=ATTENTION_BIAS,
            output_bias=ATTENTION_BIAS,
            windows=typed_windows(4096, lambda reader: 4),
            own_angles=True,
        ),
        "olmoe": Decoder(
            classes=parts.decoder_classes("Olmoe"),
            vocab_size=50304,
            hidden_size=2048,
            intermediate_size=2048,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=None,
            max_position_embeddings=4096,
            qk_norm=parts.RMS_NORM,
            qk_norm_over="all",
            qkv_bias=ATTENTION_BIAS,
            output_bias=ATTENTION_BIAS,
            clip_key="clip_qkv",
            experts=Experts(
                count=(("num_experts", "num_local_experts"), 64),
                per_token=(("num_experts_per_tok",), 8),
                width=("intermediate_size", 2048),
                norm_topk_prob=("norm_topk_prob", False),
            ),
        ),
        "flex_olmo": Decoder(
            classes=parts.decoder_classes("FlexOlmo"),
            vocab_size=100352,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=None,
            max_position_embeddings=4096,
            norm=RMS_NORM_FLOAT32,
            placement="after",
            qk_norm=RMS_NORM_FLOAT32,
            qk_norm_over="all",
            qkv_bias=ATTENTION_BIAS,
            output_bias=ATTENTION_BIAS,
            experts=Experts(
                count=(("num_experts", "num_local_experts"), 7),
                per_token=(("num_experts_per_tok",), 5),
                width=("intermediate_size", 11008),
                norm_topk_prob=("norm_topk_prob", False),
            ),
        ),
    }
)
