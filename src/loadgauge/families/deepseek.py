"""DeepSeek V2 and V3, Kimi K2, which is shaped like V3, and dots.llm1, which has V3's experts without its attention."""

from __future__ import annotations

from collections.abc import Callable

from loadgauge.families import common as parts
from loadgauge.families import experts
from loadgauge.families.common import ATTENTION_BIAS
from loadgauge.families.decoder import Decoder, readers
from loadgauge.families.experts import Experts
from loadgauge.families.qwen import window_after_types
from loadgauge.families.reader import Reader
from loadgauge.spec.model import LatentAttention


def latent_attention(
    *, heads: int, q: int, kv: int, nope: int, rope: int, value: int
) -> Callable[[Reader], LatentAttention]:
    """A reader of multi-head latent attention, with these defaults."""

    def read_latent(reader: Reader) -> LatentAttention:
        count = reader.whole("num_attention_heads", default=heads)
        if parts.key_value_heads(reader, count, None) != count:
            raise reader.wrong("num_key_value_heads", "must be num_attention_heads: latents are not shared by heads")
        return LatentAttention(
            num_attention_heads=count,
            q_lora_rank=reader.optional_whole("q_lora_rank", default=q),
            kv_lora_rank=reader.whole("kv_lora_rank", default=kv),
            qk_nope_head_dim=reader.whole("qk_nope_head_dim", default=nope),
            qk_rope_head_dim=reader.whole("qk_rope_head_dim", default=rope),
            v_head_dim=reader.whole("v_head_dim", default=value),
            bias=reader.flag("attention_bias", default=False),
            dropout=reader.rate("attention_dropout", default=0.0),
        )

    return read_latent


V3 = Decoder(
    classes=parts.decoder_classes("DeepseekV3"),
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    max_position_embeddings=4096,
    latent=latent_attention(heads=128, q=1536, kv=512, nope=128, rope=64, value=128),
    ignored=("head_dim", "ep_size"),
    next_tokens=1,
    experts=Experts(
        count=(("n_routed_experts", "num_local_experts"), 256),
        per_token=(("num_experts_per_tok",), 8),
        width=("moe_intermediate_size", 2048),
        sparse=experts.after_first(3),
        shared=experts.counted("n_shared_experts", 1),
        router_score="sigmoid",
        norm_topk_prob=("norm_topk_prob", True),
        router_float32=True,
        weights_float32=True,
    ),
)

READERS = readers(
    {
        "deepseek_v2": Decoder(
            classes=parts.decoder_classes("DeepseekV2"),
            vocab_size=102400,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=None,
            max_position_embeddings=2048,
            mlp_bias=("mlp_bias", False),
            latent=latent_attention(heads=32, q=1536, kv=512, nope=128, rope=64, value=128),
            ignored=("head_dim", "ep_size"),
            experts=Experts(
                count=(("n_routed_experts", "num_experts"), 64),
                per_token=(("num_experts_per_tok",), None),
                width=("moe_intermediate_size", 1407),
                sparse=experts.after_first(0),
                shared=experts.counted("n_shared_experts", 2),
                shared_bias=True,
                norm_topk_prob=False,
                router_float32=True,
                weights_float32=True,
            ),
        ),
        "deepseek_v3": V3,
        "kimi_k2": V3,
        "dots1": Decoder(
            classes=parts.decoder_classes("Dots1"),
            vocab_size=152064,
            hidden_size=4608,
            intermediate_size=10944,
            num_hidden_layers=62,
            num_attention_heads=32,
            num_key_value_heads=32,
            max_position_embeddings=2048,
            qk_norm=parts.RMS_NORM,
            qkv_bias=ATTENTION_BIAS,
            output_bias=ATTENTION_BIAS,
            windows=window_after_types(62),
            experts=Experts(
                count=(("n_routed_experts", "num_local_experts"), None),
                per_token=(("num_experts_per_tok",), None),
                width=("moe_intermediate_size", 1408),
                sparse=experts.after_first(0),
                shared=experts.counted("n_shared_experts", None),
                router_score="sigmoid",
                norm_topk_prob=("norm_topk_prob", False),
                router_float32=True,
                weights_float32=True,
            ),
        ),
    }
)
