"""Hybrids of attention and state-space mixers: Mamba or Mamba-2 in most layers, or beside the attention of each.

A family is a `Decoder`, which states its attention layers, and a function that puts the other mixers in their places.
"""

from collections.abc import Callable

import msgspec

from loadgauge.core.definitions.model.model import Block, Mamba1, Mamba2, ModelSpec, Moe
from loadgauge.core.families import common as parts
from loadgauge.core.families.common import interleaved, language, rebuilt, types_of
from loadgauge.core.families.decoders import decoder
from loadgauge.core.families.decoders.decoder import Decoder
from loadgauge.core.families.hybrids.state_space import mamba2_of, step_rank
from loadgauge.core.families.mixtures import experts
from loadgauge.core.families.mixtures.experts import Experts
from loadgauge.core.families.reader import Reader

# Mamba-2 between attention layers, or beside them

BAMBA = Decoder(classes=language("Bamba"), rotary_factor=0.5)


def bamba(reader: Reader) -> ModelSpec:
    """Read a config of Bamba: Mamba-2, and attention in the layers of `attn_layer_indices`. Raises as `hf.from_dict`."""
    spec = decoder.read(reader, BAMBA)
    chosen = set(reader.wholes("attn_layer_indices") or ())
    types = ["full_attention" if i in chosen else "linear_attention" for i in range(spec.num_hidden_layers)]
    return interleaved(spec, types, mamba2_of(reader, spec.hidden_size))


GRANITE = Decoder(
    classes=language("GraniteMoeHybrid"),
    dense_size_key="shared_intermediate_size",
    fused_gate_up=True,
    ignored=("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"),
    rotated=lambda reader, windows: [reader.raw("position_embedding_type") == "rope"] * len(windows),
    experts=Experts(
        count=("num_local_experts",),
        width="intermediate_size",
        shared=experts.wide("shared_intermediate_size"),
        router_score="softmax_of_chosen",
    ),
)


def granite(reader: Reader) -> ModelSpec:
    """Read a config of Granite 4.0 hybrids: Mamba-2 by `layer_types`; without experts, the shared MLP alone.

    Raises as `hf.from_dict`.
    """
    dense = reader.whole("num_local_experts", minimum=0) == 0
    if dense:
        reader.ignore("num_experts_per_tok", "intermediate_size")
    spec = decoder.read(reader, msgspec.structs.replace(GRANITE, experts=None) if dense else GRANITE)
    types = types_of(reader, spec.num_hidden_layers) or ("linear_attention",) * spec.num_hidden_layers

    def fused(index: int, block: Block) -> Block:
        moe = block.mlp
        if not isinstance(moe, Moe) or moe.shared is None:
            return block
        shared = msgspec.structs.replace(moe.shared, fused_gate_up=True)
        return msgspec.structs.replace(block, mlp=msgspec.structs.replace(moe, shared=shared))

    return interleaved(rebuilt(spec, fused), types, mamba2_of(reader, spec.hidden_size))


FALCON_H1 = Decoder(
    classes=language("FalconH1"),
    ignored=(
        "attention_in_multiplier", "attention_out_multiplier", "embedding_multiplier", "key_multiplier",
        "lm_head_multiplier", "mlp_multipliers", "ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier",
        "mlp_expansion_factor", "mamba_use_mlp",
    )
)  # fmt: skip


def falcon_h1(reader: Reader) -> ModelSpec:
    """Read a config of Falcon-H1: Mamba-2 in parallel with the attention of every layer. Raises as `hf.from_dict`."""
    spec = decoder.read(reader, FALCON_H1)
    inner = reader.optional_whole("mamba_d_ssm")
    mixer: Mamba2 = msgspec.structs.replace(
        mamba2_of(reader, spec.hidden_size, inner),
        output_bias=reader.flag("projectors_bias"),
        gated_norm=reader.flag("mamba_rms_norm"),
        norm_before_gate=reader.flag("mamba_norm_before_gate"),
    )
    return rebuilt(spec, lambda index, block: msgspec.structs.replace(block, beside=mixer))


# Mamba between attention layers

JAMBA = Decoder(
    classes=language("Jamba", classifier=True),
    rotated=lambda reader, windows: [False] * len(windows),  # the state-space layers know the order
    ignored=("use_mamba_kernels", "use_mambapy", "use_associative_scan"),
    experts=Experts(
        count=("num_experts", "num_local_experts"),
        width="intermediate_size",
        sparse=lambda reader, count: [kind == 1 for kind in _periodic(reader, "expert", count)],
        norm_topk_prob=False,
    ),
)


def _periodic(reader: Reader, prefix: str, count: int) -> list[int]:
    """1 for each layer whose place is `offset` within a period, else 0."""
    every = reader.whole(f"{prefix}_layer_period")
    offset = reader.whole(f"{prefix}_layer_offset", minimum=0)
    if offset >= every:
        raise reader.wrong(f"{prefix}_layer_offset", f"{offset} is not within a period of {every} layers")
    return [int(i % every == offset) for i in range(count)]


def jamba(reader: Reader) -> ModelSpec:
    """Read a config of Jamba: Mamba, and attention in one layer of `attn_layer_period`.

    Experts are in one of `expert_layer_period`. Raises as `hf.from_dict`.
    """
    single = reader.whole("num_experts", "num_local_experts") == 1
    if single:
        reader.ignore("num_experts_per_tok", "expert_layer_period", "expert_layer_offset")
    spec = decoder.read(reader, msgspec.structs.replace(JAMBA, experts=None) if single else JAMBA)
    types = ("linear_attention", "full_attention")
    placed = [types[kind] for kind in _periodic(reader, "attn", spec.num_hidden_layers)]
    hidden = spec.hidden_size
    mixer = Mamba1(
        intermediate_size=hidden * reader.whole("mamba_expand"),
        state_size=reader.whole("mamba_d_state"),
        time_step_rank=step_rank(reader, "mamba_dt_rank", hidden),
        conv_kernel=reader.whole("mamba_d_conv"),
        use_bias=reader.flag("mamba_proj_bias"),
        use_conv_bias=reader.flag("mamba_conv_bias"),
        norm=parts.RMS_NORM,
        hidden_act=reader.text("hidden_act"),
    )
    return interleaved(spec, placed, mixer)


READERS: dict[str, Callable[[Reader], ModelSpec]] = {
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "granitemoehybrid": granite,
    "jamba": jamba,
}
