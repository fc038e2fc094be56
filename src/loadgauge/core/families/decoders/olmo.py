"""OLMo 1 to 3 and OLMoE: norms without a gain, then norms after each half, and over all heads of queries and keys."""

from loadgauge.core.definitions.model.model import Norm
from loadgauge.core.families import common as parts
from loadgauge.core.families.decoders.decoder import Decoder, readers, typed_windows
from loadgauge.core.families.mixtures.experts import Experts

RMS_NORM_FLOAT32 = Norm("rmsnorm", gain_float32=True)

READERS = readers(
    {
        "olmo": Decoder(
            classes=parts.decoder_classes("Olmo"),
            norm=Norm("layernorm", weight=False, arithmetic="float32"),
            clip_key="clip_qkv",
        ),
        "olmo2": Decoder(
            classes=parts.decoder_classes("Olmo2"),
            norm=RMS_NORM_FLOAT32,
            placement="after",
            qk_norm=RMS_NORM_FLOAT32,
            qk_norm_over="all",
        ),
        "olmo3": Decoder(
            classes=parts.decoder_classes("Olmo3"),
            norm=RMS_NORM_FLOAT32,
            placement="after",
            qk_norm=RMS_NORM_FLOAT32,
            qk_norm_over="all",
            windows=typed_windows(lambda reader: 4),
            own_angles=True,
        ),
        "olmoe": Decoder(
            classes=parts.decoder_classes("Olmoe"),
            qk_norm=parts.RMS_NORM,
            qk_norm_over="all",
            clip_key="clip_qkv",
            experts=Experts(
                count=("num_experts", "num_local_experts"),
                width="intermediate_size",
                norm_topk_prob="norm_topk_prob",
            ),
        ),
        "flex_olmo": Decoder(
            classes=parts.decoder_classes("FlexOlmo"),
            norm=RMS_NORM_FLOAT32,
            placement="after",
            qk_norm=RMS_NORM_FLOAT32,
            qk_norm_over="all",
            experts=Experts(
                count=("num_experts", "num_local_experts"),
                width="intermediate_size",
                norm_topk_prob="norm_topk_prob",
            ),
        ),
    }
)
