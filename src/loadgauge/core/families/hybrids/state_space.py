"""Mamba-2 mixers as configs state them, and families whose blocks are a mixer or an MLP alone: Mamba, Mamba-2, Nemotron-H."""

from collections.abc import Callable

import msgspec

from loadgauge.core.definitions.model.model import Attention, Block, Mamba1, Mamba2, Mlp, ModelSpec, Norm
from loadgauge.core.families import common as parts
from loadgauge.core.families.mixtures.experts import Experts, expert_layers, wide
from loadgauge.core.families.reader import Reader, shown

NORM_FLOAT32 = Norm("rmsnorm", gain_float32=True, gain_copied=True)


def _checked(reader: Reader, mixer: Mamba2, key: str) -> Mamba2:
    if mixer.num_heads % mixer.n_groups:
        raise reader.wrong(key, f"{mixer.n_groups} groups do not divide {mixer.num_heads} heads")
    return mixer


def mamba2_of(reader: Reader, hidden_size: int, inner: int | None = None) -> Mamba2:
    """The mixer by Bamba's keys, which Granite and Falcon-H1 share; `inner`: its channels, None: by `mamba_expand`."""
    expanded = hidden_size * reader.whole("mamba_expand")
    inner = expanded if inner is None else inner
    heads = reader.whole("mamba_n_heads")
    if inner % heads:
        raise reader.wrong("mamba_n_heads", f"{heads} does not divide {inner} channels")
    automatic = reader.raw("mamba_d_head") == "auto"
    width = inner // heads if automatic else reader.whole("mamba_d_head", default=1)
    if width * heads != inner:
        raise reader.wrong("mamba_d_head", f"{width} times {heads} heads is not {inner} channels")
    reader.ignore("time_step_limit", "time_step_min", "time_step_max", "time_step_floor", "mamba_use_mlp")
    mixer = Mamba2(
        num_heads=heads,
        head_dim=width,
        state_size=reader.whole("mamba_d_state"),
        n_groups=reader.whole("mamba_n_groups"),
        conv_kernel=reader.whole("mamba_d_conv"),
        chunk_size=reader.whole("mamba_chunk_size"),
        use_bias=reader.flag("mamba_proj_bias"),
        output_bias=reader.flag("mamba_proj_bias"),
        use_conv_bias=reader.flag("mamba_conv_bias"),
        hidden_act=reader.text("hidden_act"),
    )
    return _checked(reader, mixer, "mamba_n_groups")


def mamba2_model(reader: Reader) -> ModelSpec:
    """Read a config of Mamba-2: blocks of one norm and one mixer, no MLP. Raises as `hf.from_dict`."""
    reader.ignore(
        "time_step_limit",
        "time_step_min",
        "time_step_max",
        "time_step_floor",
        "time_step_rank",
        "norm_before_gate",
        "rms_norm",
        "rescale_prenorm_residual",
        "mamba2",
        "use_mambapy",
        "intermediate_size",
    )
    hidden = reader.whole("hidden_size")
    heads, width = reader.whole("num_heads"), reader.whole("head_dim")
    inner = hidden * reader.whole("expand")
    if heads * width != inner:
        raise reader.wrong("num_heads", f"{heads} times head_dim {width} is not expand times hidden_size, {inner}")
    bias = reader.flag("use_bias")
    mixer = Mamba2(
        num_heads=heads,
        head_dim=width,
        state_size=reader.whole("state_size"),
        n_groups=reader.whole("n_groups"),
        conv_kernel=reader.whole("conv_kernel"),
        chunk_size=reader.whole("chunk_size"),
        use_bias=bias,
        output_bias=bias,
        use_conv_bias=reader.flag("use_conv_bias"),
        hidden_act=reader.text("hidden_act"),
    )
    return _of_mixers(reader, hidden, _checked(reader, mixer, "n_groups"), "Mamba2")


def mamba_model(reader: Reader) -> ModelSpec:
    """Read a config of Mamba or Falcon-Mamba, whose norms inside the mixer have no weights. Raises as `hf.from_dict`."""
    reader.ignore(
        *(
            "time_step_scale",
            "time_step_min",
            "time_step_max",
            "time_step_init_scheme",
            "time_step_floor",
            "mixer_rms_eps",
        ),
        *(
            "rescale_prenorm_residual",
            "use_mambapy",
            "use_associative_scan",
            "intermediate_size",
            "fused_add_norm",
            "ssm_cfg",
        ),
    )
    hidden = reader.whole("hidden_size")
    mixer = Mamba1(
        intermediate_size=hidden * reader.whole("expand"),
        state_size=reader.whole("state_size"),
        time_step_rank=step_rank(reader, "time_step_rank", hidden),
        conv_kernel=reader.whole("conv_kernel"),
        use_bias=reader.flag("use_bias"),
        use_conv_bias=reader.flag("use_conv_bias"),
        hidden_act=reader.text("hidden_act"),
    )
    return _of_mixers(reader, hidden, mixer, "Mamba", "FalconMamba")


def step_rank(reader: Reader, key: str, hidden: int) -> int:
    """Read the rank of a Mamba mixer's time step, a sixteenth of the hidden size where it is automatic."""
    return -(-hidden // 16) if reader.raw(key) in (None, "auto") else reader.whole(key, default=1)


def _of_mixers(reader: Reader, hidden: int, mixer: Mamba1 | Mamba2, *classes: str) -> ModelSpec:
    """The model whose blocks are a norm and a mixer, with the classes that make it."""
    block = Block(attention=mixer, mlp=None, norm=parts.RMS_NORM, residual_in_fp32=reader.flag("residual_in_fp32"))
    heads = {
        f"{name}{end}": head
        for name in classes
        for end, head in (("ForCausalLM", parts.LANGUAGE), ("Model", parts.BODY))
    }
    return parts.assembled(
        reader,
        hidden,
        [block] * parts.layers(reader, "num_hidden_layers"),
        final_norm=parts.RMS_NORM,
        head=parts.decoder_head(reader, heads),
    )


LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
NEMOTRON_EXPERTS = Experts(
    count=("n_routed_experts", "num_local_experts"),
    shared=wide("moe_shared_expert_intermediate_size"),
    shared_bias=True,
    router_score="sigmoid",
    norm_topk_prob="norm_topk_prob",
    router_float32=True,
    weights_float32=True,
)


def _nemotron_types(reader: Reader) -> list[str]:
    """Return what each block is: `layers_block_type`, or the letters of `hybrid_override_pattern`."""
    key = next((name for name in ("layers_block_type", "layer_types") if reader.has(name)), "layers_block_type")
    named = reader.texts(key)
    pattern = reader.raw("hybrid_override_pattern")
    if named is not None:
        types = [OLD_NAMES.get(kind, kind) for kind in named]
    elif pattern is not None:
        key, letters = "hybrid_override_pattern", reader.text("hybrid_override_pattern", default="")
        types = [LETTERS.get(letter, letter) for letter in letters]
    else:
        types = list(LETTERS.values())
        reader.default(key, len(types))
    for kind in types:
        if kind not in LETTERS.values():
            raise reader.unmodelled(key, f"{shown(kind)} is not modelled for this family")
    if not 1 <= len(types) <= parts.MOST_LAYERS:
        raise reader.wrong(key, f"must name from 1 to {parts.MOST_LAYERS} layers, got {len(types)}")
    reader.ignore("num_hidden_layers")  # transformers goes by the pattern
    return types


def _older(reader: Reader, older: str, name: str) -> str:
    """The key to read: an older name of it comes first, as in transformers."""
    reader.ignore(name)
    return older if reader.has(older) else name


def nemotron_h(reader: Reader) -> ModelSpec:
    """Read a config of Nemotron-H: each block is one norm and a mixer, attention, an MLP, or experts. Raises as `hf.from_dict`."""
    reader.ignore(
        *("expand", "mamba_expand", "time_step_limit", "time_step_min", "time_step_max", "time_step_floor"),
        *("mamba_dt_min", "mamba_dt_max", "mamba_dt_limit", "mamba_dt_init_floor", "rescale_prenorm_residual"),
        *("residual_in_fp32", "use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep", "mamba_proj_bias"),
        *("attention_bias", "sliding_window", "hidden_dropout", "n_group", "topk_group", "routed_scaling_factor"),
        *("n_shared_experts", "moe_shared_expert_overlap", "attention_head_dim"),
        *("mtp_hybrid_override_pattern", "mtp_layers_block_type"),
    )
    types = _nemotron_types(reader)
    heads = reader.whole("num_attention_heads")
    bias, activation = reader.flag("use_bias"), reader.text("mlp_hidden_act")
    mlp = Mlp(
        intermediate_size=reader.whole("intermediate_size"),
        gated=False,
        bias=reader.flag("mlp_bias"),
        activation=activation,
    )
    mixer = Mamba2(
        num_heads=reader.whole("mamba_num_heads"),
        head_dim=reader.whole("mamba_head_dim"),
        state_size=reader.whole("ssm_state_size"),
        n_groups=reader.whole(_older(reader, "mamba_n_groups", "n_groups"), default=8),
        conv_kernel=reader.whole(_older(reader, "mamba_d_conv", "conv_kernel"), default=4),
        chunk_size=reader.whole(_older(reader, "mamba_chunk_size", "chunk_size"), default=128),
        use_bias=bias,
        output_bias=bias,
        use_conv_bias=reader.flag(_older(reader, "mamba_conv_bias", "use_conv_bias"), default=True),
        hidden_act=reader.text("mamba_hidden_act"),
    )
    attention = Attention(
        num_attention_heads=heads,
        num_key_value_heads=parts.key_value_heads(reader, heads),
        head_dim=reader.whole("head_dim"),
        rotary=False,
        dropout=reader.rate("attention_dropout"),
    )
    (moe,) = expert_layers(reader, NEMOTRON_EXPERTS, 1, mlp) if "moe" in types else (None,)
    latent = reader.optional_whole("moe_latent_size")
    moe = moe if moe is None else msgspec.structs.replace(moe, latent_size=latent)
    built = {
        "linear_attention": Block(attention=_checked(reader, mixer, "n_groups"), mlp=None, norm=NORM_FLOAT32),
        "full_attention": Block(attention=attention, mlp=None, norm=NORM_FLOAT32),
        "mlp": Block(attention=None, mlp=mlp, norm=NORM_FLOAT32),
        "moe": Block(attention=None, mlp=moe, norm=NORM_FLOAT32),
    }
    following = reader.whole("num_nextn_predict_layers", minimum=0)
    return parts.assembled(
        reader,
        reader.whole("hidden_size"),
        [built[kind] for kind in types],
        max_position_embeddings=reader.whole("max_position_embeddings"),
        final_norm=NORM_FLOAT32,
        head=parts.decoder_head(reader, {"NemotronHForCausalLM": parts.LANGUAGE, "NemotronHModel": parts.BODY}),
        num_nextn_predict_layers=following,
        unused_keys=("num_nextn_predict_layers (not counted unless asked)",) if following else (),
    )


READERS: dict[str, Callable[[Reader], ModelSpec]] = {
    "falcon_mamba": mamba_model,
    "mamba": mamba_model,
    "mamba2": mamba2_model,
    "nemotron_h": nemotron_h,
}
