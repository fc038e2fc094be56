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
            classes=parts.decoder_classes("Glm"), output_bias=False, fused_gate_up=True, rotary_factor=0.5, own_tables=2
        ),
        "glm4": Decoder(
            classes=parts.decoder_classes("Glm4"),
            output_bias=False,
            placement="sandwich",
            fused_gate_up=True,
            rotary_factor=0.5,
            own_tables=2,
        ),
        "glm4_moe": Decoder(
            classes=parts.decoder_classes("Glm4Moe"),
            output_bias=False,
            head_dim_rounded=True,
            qk_norm=parts.RMS_NORM,
            qk_normed="use_qk_norm",
            rotary_factor=0.5,
            next_tokens=True,
            experts=Experts(
                count=("n_routed_experts", "num_local_experts"),
                per_token=("num_experts_per_tok",),
                width="moe_intermediate_size",
                sparse=experts.after_first,
                shared=experts.counted("n_shared_experts"),
                router_score="sigmoid",
                norm_topk_prob="norm_topk_prob",
                router_float32=True,
                weights_float32=True,
            ),
        ),
        "glm4_moe_lite": Decoder(
            classes=parts.decoder_classes("Glm4MoeLite"),
            latent=latent_attention,
            ignored=("head_dim",),
            next_tokens=True,
            experts=Experts(
                count=("n_routed_experts", "num_local_experts"),
                per_token=("num_experts_per_tok",),
                width="moe_intermediate_size",
                sparse=experts.typed,
                shared=experts.counted("n_shared_experts"),
                router_score="sigmoid",
                norm_topk_prob="norm_topk_prob",
                router_float32=True,
                weights_float32=True,
            ),
        ),
    }
)
