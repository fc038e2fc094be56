"""BLOOM, MPT and Falcon: distance as a bias on the scores instead of rotated heads (Falcon may have either)."""

from loadgauge.core.definitions.model.model import Attention, Block, Mlp, ModelSpec, Norm
from loadgauge.core.families import common as parts
from loadgauge.core.families.reader import Reader


def _hidden_size(reader: Reader, default: int) -> int:
    """`n_embed`, the older name, wins over `hidden_size`, as in transformers."""
    older = reader.optional_whole("n_embed")
    if older is not None and not reader.has("hidden_size"):
        return older
    stated = reader.whole("hidden_size")
    return older or stated


def bloom(reader: Reader) -> ModelSpec:
    """Read a config of BLOOM: a norm after the embedding, biases everywhere. Raises as `hf.from_dict`."""
    if reader.flag("apply_residual_connection_post_layernorm"):
        raise reader.unmodelled(
            "apply_residual_connection_post_layernorm", "residual sums after norms are not modelled"
        )
    hidden_size = _hidden_size(reader, 64)
    heads = reader.whole("n_head", "num_attention_heads")
    dropout = reader.rate("hidden_dropout")
    block = Block(
        attention=parts.multi_head(
            reader,
            hidden_size,
            heads,
            qkv_bias=True,
            output_bias=True,
            fused_qkv=True,
            rotary=False,
            alibi=True,
            dropout=reader.rate("attention_dropout"),
        ),
        # Its own tanh form of GELU keeps the input alone, as PyTorch's does.
        mlp=Mlp(intermediate_size=4 * hidden_size, gated=False, bias=True, activation="gelu_pytorch_tanh"),
        norm=parts.LAYER_NORM,
        dropout=dropout,
    )
    reader.ignore(*("attention_softmax_in_fp32", "masked_softmax_fusion", "offset_alibi", "skip_bias_add"))
    reader.ignore(*("skip_bias_add_qkv", "slow_but_exact", "bias_dropout_fusion"))
    return parts.assembled(
        reader,
        hidden_size,
        [block] * parts.layers(reader, "n_layer", "num_hidden_layers"),
        embedding_norm=parts.LAYER_NORM,
        final_norm=parts.LAYER_NORM,
        head=parts.decoder_head(reader, parts.decoder_classes("Bloom")),
    )


def mpt(reader: Reader) -> ModelSpec:
    """Read a config of MPT: no bias anywhere. transformers' class reads less of it than MosaicML's own code.

    Raises as `hf.from_dict`.
    """
    hidden_size = reader.whole("d_model", "hidden_size")
    heads = reader.whole("n_heads", "num_attention_heads")
    inner = reader.section("attn_config", default={})
    if inner.flag("qk_ln") or inner.text("attn_type")[:9] != "multihead":
        raise inner.unmodelled("attn_type", "transformers' class has multi-head attention without norms only")
    if not inner.flag("alibi"):
        raise inner.unmodelled("alibi", "transformers' class has ALiBi in every model")
    if reader.whole("expansion_ratio") != 4:
        raise reader.unmodelled("expansion_ratio", "transformers' class has 4 in every model")
    inner.ignore("alibi_bias_max", "attn_impl", "attn_uses_sequence_id", "prefix_lm", "softmax_scale")
    # Attention drops by one rate everywhere; the class looks at no other.
    dropout = inner.rate("attn_pdrop")
    block = Block(
        attention=parts.multi_head(
            reader,
            hidden_size,
            heads,
            "d_model",
            fused_qkv=True,
            clip=inner.optional_real("clip_qkv") is not None,
            rotary=False,
            alibi=True,
            dropout=dropout,
        ),
        mlp=Mlp(intermediate_size=4 * hidden_size, gated=False, activation="gelu"),
        norm=Norm("layernorm"),
        dropout=dropout,
    )
    reader.ignore("init_device", "init_config", "learned_pos_emb", "no_bias", "norm_type", "embedding_fraction")
    reader.ignore("resid_pdrop", "emb_pdrop", "logit_scale", "tokenizer_name", "verbose")
    return parts.assembled(
        reader,
        hidden_size,
        [block] * parts.layers(reader, "n_layers", "num_hidden_layers"),
        max_position_embeddings=reader.whole("max_seq_len"),
        final_norm=Norm("layernorm"),
        head=parts.decoder_head(reader, parts.decoder_classes("Mpt")),
        unused_keys=inner.unused(),
    )


def falcon(reader: Reader) -> ModelSpec:
    """Read a config of Falcon: attention and MLP side by side, after one norm (7B) or each after its own (40B, 180B).

    Raises as `hf.from_dict`.
    """
    hidden_size = _hidden_size(reader, 4544)
    heads = reader.whole("num_attention_heads")
    new, multi_query = (
        reader.flag(key, nullable=True) for key, default in (("new_decoder_architecture", False), ("multi_query", True))
    )
    key_value_heads = reader.optional_whole("num_kv_heads") or heads
    if not new:
        key_value_heads = 1 if multi_query else heads
    if heads % key_value_heads:
        raise reader.wrong("num_kv_heads", f"{key_value_heads} does not divide num_attention_heads {heads}")
    parallel = reader.flag("parallel_attn", nullable=True)
    norms = reader.optional_whole("num_ln_in_parallel_attn", maximum=2) or (2 if new else 1)
    if (new and not parallel) or (norms == 2 and not new):
        raise reader.unmodelled(
            "new_decoder_architecture", "transformers' class cannot run this combination of norms and parallel_attn"
        )
    biased = reader.flag("bias", nullable=True)
    alibi = reader.flag("alibi", nullable=True)
    attention_dropout = reader.rate("attention_dropout")
    block = Block(
        attention=Attention(
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            head_dim=parts.head_width(reader, hidden_size, heads),
            qkv_bias=biased,
            output_bias=biased,
            fused_qkv=True,
            rotary=not alibi,
            alibi=alibi,
            repeats_kv=new,
            softmax_float32=False,
            # With rotary positions transformers' class drops no probabilities.
            dropout=attention_dropout if alibi else 0.0,
        ),
        mlp=parts.plain_mlp(
            reader, reader.optional_whole("ffn_hidden_size") or 4 * hidden_size, "activation", bias=biased
        ),
        norm=parts.LAYER_NORM,
        placement="parallel" if parallel else "pre",
        shared_norm=parallel and norms == 1,
        dropout=reader.rate("hidden_dropout"),
        # Side by side, the sum of the halves is dropped once; one after the other, the first by attention's rate.
        dropout_after_attention=not parallel and attention_dropout > 0,
    )
    reader.ignore("apply_residual_connection_post_layernorm", "ff_factor")
    return parts.assembled(
        reader,
        hidden_size,
        [block] * parts.layers(reader, "num_hidden_layers"),
        max_position_embeddings=reader.whole("max_position_embeddings"),
        final_norm=parts.LAYER_NORM,
        head=parts.decoder_head(reader, parts.decoder_classes("Falcon")),
    )


READERS = {"bloom": bloom, "mpt": mpt, "falcon": falcon}
