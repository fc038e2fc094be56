"""HunYuan, with and without experts: norms over each head of queries and keys, after their rotation."""

from loadgauge.core.families import common as parts
from loadgauge.core.families.decoders.decoder import Decoder, readers
from loadgauge.core.families.mixtures import experts
from loadgauge.core.families.mixtures.experts import Experts

UNREAD = (
    "use_qk_norm", "use_cla", "cla_share_factor", "attention_head_dim", "use_mixed_mlp_moe", "use_mla", "mlp_bias",
    "moe_intermediate_size", "num_shared_expert", "moe_layer_num_skipped", "moe_drop_tokens",
    "moe_random_routing_dropped_token",
    "add_classification_head", "class_num", "pool_type", "norm_type", "org_vocab_size", "anyres_vit_max_image_size",
    "use_rotary_pos_emb", "capacity_factor", "group_limited_greedy", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "dense_list",
)  # fmt: skip
"""Keys of the published configs that transformers' classes do not look at."""

READERS = readers(
    {
        "hunyuan_v1_dense": Decoder(
            classes=parts.decoder_classes("HunYuanDenseV1"), qk_norm=parts.RMS_NORM, ignored=UNREAD
        ),
        "hunyuan_v1_moe": Decoder(
            classes=parts.decoder_classes("HunYuanMoEV1"),
            qk_norm=parts.RMS_NORM,
            ignored=UNREAD,
            experts=Experts(
                count=("num_experts", "num_local_experts"),
                per_token=("moe_topk", "num_experts_per_tok"),
                width="intermediate_size",
                shared=experts.one_more,
                router_float32=True,
                weights_float32=True,
            ),
        ),
    }
)
