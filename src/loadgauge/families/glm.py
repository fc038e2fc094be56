"""GLM-4 to 4.7: half of each head rotated, two key-value heads, then norms after each half, then experts."""

from __future__ import annotations

from loadgauge.families import common as parts
from loadgauge.families import experts
from loadgauge.families.decoder import Decoder, readers
from loadgauge.families.deepseek import latent_attention
from loadgauge.families.experts import Experts

READERS = readers(
    {
        "glm": Decoder(
            classes=parts.decoder_classes("Glm"),
            vocab_size=151552,
            hidden_size=4096,
            intermediate_size=13696,
            num_hidden_layers=40,
            num_attention_heads=32,
            num_key_value_heads=2,
            head_dim=128,
            max_position_embeddings=131072,
            qkv_bias=("attention_bias", True),
            fused_gate_up=True,
            rotary_factor=0.5,
            own_tables=2,
        ),
        "glm4": Decoder(
            classes=parts.decoder_classes("Glm4"),
            vocab_size=151552,
            hidden_size=4096,
            intermediate_size=13696,
            num_hidden_layers=40,
            num_attention_heads=32,
            num_key_value_heads=2,
            head_dim=128,
            max_position_embeddings=131072,
            placement="sandwich",
            qkv_bias=("attention_bias", True),
            fused_gate_up=True,
            rotary_factor=0.5,
            own_tables=2,
        ),
        "glm4_moe": Decoder(
            classes=parts.decoder_classes("Glm4Moe"),
            vocab_size=151552,
            hidden_size=4096,
            intermediate_size=10944,
            num_hidden_layers=46,
            num_attention_heads=96,
            num_key_value_heads=8,
            head_dim_rounded=True,
            max_position_embeddings=131072,
            qkv_bias=("attention_bias", False),
            qk_norm=parts.RMS_NORM,
            qk_normed=("use_qk_norm", False),
            rotary_factor=0.5,
            next_tokens=1,
            experts=Experts(
                count=(("n_routed_experts", "num_local_experts"), 128),
                per_token=(("num_experts_per_tok",), 8),
                width=("moe_intermediate_size", 1408),
                sparse=experts.after_first(1),
                shared=experts.counted("n_shared_experts", 1),
                router_score="sigmoid",
                norm_topk_prob=("norm_topk_prob", True),
                router_float32=True,
                weights_float32=True,
            ),
        ),
        "glm4_moe_lite": Decoder(
            classes=parts.decoder_classes("Glm4MoeLite"),
            vocab_size=154880,
            hidden_size=2048,
            intermediate_size=10240,
            num_hidden_layers=47,
            num_attention_heads=20,
            num_key_value_heads=20,
            max_position_embeddings=202752,
            latent=latent_attention(heads=20, q=768, kv=512, nope=192, rope=64, value=256),
            ignored=("head_dim",),
            next_tokens=0,
            experts=Experts(
                count=(("n_routed_experts", "num_local_experts"), 64),
                per_token=(("num_experts_per_tok",), 4),
                width=("moe_intermediate_size", 1536),
                sparse=experts.typed,
                shared=experts.counted("n_shared_experts", 1),
                router_score="sigmoid",
                norm_topk_prob=("norm_topk_prob", True),
                router_float32=True,
                weights_float32=True,
            ),
        ),
    }
)
