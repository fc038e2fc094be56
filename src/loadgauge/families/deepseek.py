"""DeepSeek V2 and V3, Kimi K2, which is shaped like V3, and dots.llm1, which has V3's experts without its attention."""

from __future__ import annotations

from loadgauge.families import common as parts
from loadgauge.families import experts
from loadgauge.families.decoder import Decoder, readers
from loadgauge.families.experts import Experts
from loadgauge.families.qwen import window_after_types
from loadgauge.families.reader import Reader
from loadgauge.spec.model import LatentAttention


def latent_attention(reader: Reader) -> LatentAttention:
    """Read multi-head latent attention, by DeepSeek's keys. Raises as `hf.from_dict`."""
    count = reader.whole("num_attention_heads")
    if parts.key_value_heads(reader, count, None) != count:
        raise reader.wrong("num_key_value_heads", "must be num_attention_heads: latents are not shared by heads")
    return LatentAttention(
        num_attention_heads=count,
        q_lora_rank=reader.optional_whole("q_lora_rank"),
        kv_lora_rank=reader.whole("kv_lora_rank"),
        qk_nope_head_dim=reader.whole("qk_nope_head_dim"),
        qk_rope_head_dim=reader.whole("qk_rope_head_dim"),
        v_head_dim=reader.whole("v_head_dim"),
        bias=reader.flag("attention_bias"),
        dropout=reader.rate("attention_dropout"),
    )


V3 = Decoder(
    classes=parts.decoder_classes("DeepseekV3"),
    latent=latent_attention,
    ignored=("head_dim", "ep_size"),
    next_tokens=True,
    experts=experts.DEEPSEEK_V3,
)

READERS = readers(
    {
        "deepseek_v2": Decoder(
            classes=parts.decoder_classes("DeepseekV2"),
            latent=latent_attention,
            ignored=("head_dim", "ep_size"),
            experts=Experts(
                count=("n_routed_experts", "num_experts"),
                sparse=experts.after_first,
                shared=experts.counted("n_shared_experts"),
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
            qk_norm=parts.RMS_NORM,
            windows=window_after_types,
            experts=experts.DEEPSEEK_V3,
        ),
    }
)
