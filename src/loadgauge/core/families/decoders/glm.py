"""GLM-4 to 4.7: half of each head rotated, two key-value heads, then norms after each half, then experts."""

import msgspec

from loadgauge.core.families import common as parts
from loadgauge.core.families.decoders.decoder import Decoder, readers
from loadgauge.core.families.mixtures import experts
from loadgauge.core.families.mixtures.deepseek import latent_attention

GLM4V_MOE = Decoder(
    classes={},
    output_bias=False,
    head_dim_rounded=True,
    rotary_factor=0.5,
    next_tokens=True,
    ignored=("use_qk_norm",),
    experts=experts.DEEPSEEK_V3,
)

READERS = readers(
    {
        "glm4v_moe_text": GLM4V_MOE,
        "glm4v_text": Decoder(
            classes={},
            qkv_bias=True,
            output_bias=False,
            placement="sandwich",
            fused_gate_up=True,
            rotary_factor=1.0,
        ),
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
            experts=experts.DEEPSEEK_V3,
        ),
        "glm4_moe_lite": Decoder(
            classes=parts.decoder_classes("Glm4MoeLite"),
            latent=latent_attention,
            ignored=("head_dim",),
            next_tokens=True,
            experts=msgspec.structs.replace(experts.DEEPSEEK_V3, sparse=experts.typed),
        ),
    }
)
