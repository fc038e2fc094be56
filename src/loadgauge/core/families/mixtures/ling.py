"""Ling 1 and 2.0: experts behind one matrix for queries, keys and values; from 2.0 on norms of queries and keys and half of
each head rotated. transformers has no class for them: what is not stated is what the published code takes.
"""

from collections.abc import Callable

import msgspec

from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.families import common as parts
from loadgauge.core.families.decoders import decoder
from loadgauge.core.families.decoders.decoder import Decoder
from loadgauge.core.families.mixtures import experts
from loadgauge.core.families.reader import Reader

LING = Decoder(
    classes=parts.language("BailingMoe"),
    fused_qkv=True,
    mlp_bias=False,
    embedding_dropout="embedding_dropout",
    residual_dropout="output_dropout",
    ignored=(
        "norm_head",
        "norm_softmax",
        "max_window_layers",
        "moe_router_enable_expert_bias",
        "score_function",
        "router_dtype",
        "moe_shared_expert_intermediate_size",
        "mtp_loss_scaling_factor",
        "use_rmsnorm",
        "first_k_dense_replace",
        "norm_topk_prob",
        "moe_router_enable_shared_expert",
    ),
    experts=experts.Experts(
        count=("num_experts", "n_routed_experts"),
        sparse=experts.after_first,
        shared=experts.counted("num_shared_experts", "n_shared_experts"),
    ),
)
LING_2 = msgspec.structs.replace(
    LING,
    classes=parts.language("BailingMoeV2"),
    rotary_factor=1.0,
    next_tokens=True,
    experts=msgspec.structs.replace(
        experts.DEEPSEEK_V3,
        count=("num_experts", "n_routed_experts"),
        shared=experts.counted("num_shared_experts", "n_shared_experts"),
        norm_topk_prob=True,
    ),
)


DEFAULTS = {"hidden_act": "silu", "embedding_dropout": 0.1, "attention_dropout": 0.1, "output_dropout": 0.1}
DEFAULTS_2 = {"hidden_act": "silu"}
"""Defaults of the published code, other than sizes."""


def ling(reader: Reader) -> ModelSpec:
    """Read a config of Ling 1 (BailingMoe) or 2.0 (BailingMoeV2), by its class. Raises as `hf.from_dict`."""
    named = (reader.texts("architectures") or ("",))[0].lower()
    second = named.startswith("bailingmoev2") or reader.model_type == "bailing_moe_v2"
    family = LING_2 if second else LING
    reader.config = {**(DEFAULTS_2 if second else DEFAULTS), **reader.config}
    norm_topk = reader.flag("norm_topk_prob", default=True)
    assert family.experts is not None
    family = msgspec.structs.replace(
        family,
        qkv_bias=reader.flag("use_qkv_bias", default=False),
        output_bias=reader.flag("use_bias", default=not second),
        qk_norm=parts.RMS_NORM if reader.flag("use_qk_norm", default=second) else None,
        experts=msgspec.structs.replace(family.experts, norm_topk_prob=second or norm_topk),
    )
    return decoder.read(reader, family)


READERS: dict[str, Callable[[Reader], ModelSpec]] = {"bailing_moe": ling, "bailing_moe_v2": ling}
