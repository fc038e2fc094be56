"""DBRX: grouped heads from one matrix, clamped; experts in every layer; norms without a shift."""

from loadgauge.core.definitions.model.model import Attention, Block, Mlp, ModelSpec, Norm
from loadgauge.core.families import common as parts
from loadgauge.core.families.mixtures import experts
from loadgauge.core.families.mixtures.experts import Experts
from loadgauge.core.families.reader import Reader, shown

EXPERTS = Experts(count=("moe_num_experts",), per_token=("moe_top_k",), width="ffn_hidden_size")


def dbrx(reader: Reader) -> ModelSpec:
    """Read a config of DBRX: experts in every layer, no bias. Raises as `hf.from_dict`."""
    hidden_size, heads, count = parts.sizes(reader, "d_model", "n_heads", "n_layers")
    attending = reader.section("attn_config", default={})
    feeding = reader.section("ffn_config", default={})
    key_value_heads = attending.whole("kv_n_heads")
    if heads % key_value_heads:
        raise attending.wrong("kv_n_heads", f"{key_value_heads} does not divide {heads} heads")
    named = feeding.raw("ffn_act_fn") or {}
    activation = named.get("name", "silu") if isinstance(named, dict) else named
    if not isinstance(activation, str):
        raise feeding.wrong("ffn_act_fn", f"must be an object with a name, got {shown(named)}")
    attention = Attention(
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=parts.head_width(reader, hidden_size, heads, "d_model"),
        fused_qkv=True,
        clip=attending.optional_real("clip_qkv") is not None,
        dropout=attending.rate("attn_pdrop"),
    )
    norm = Norm("layernorm")
    dropout = reader.rate("resid_pdrop")
    attending.ignore("rope_theta", "model_type")
    feeding.ignore("model_type", "moe_jitter_eps", "moe_loss_weight", "moe_normalize_expert_weights", "hidden_size")
    feeding.ignore("uniform_expert_assignment")
    moes = experts.expert_layers(feeding, EXPERTS, count, Mlp(intermediate_size=1, activation=activation))
    layers = [Block(attention=attention, mlp=moe, norm=norm, dropout=dropout) for moe in moes if moe is not None]
    if reader.flag("tie_word_embeddings"):
        raise reader.wrong("tie_word_embeddings", "transformers' class of DBRX cannot tie them")
    return parts.assembled(
        reader,
        hidden_size,
        layers,
        max_position_embeddings=reader.whole("max_seq_len", "max_position_embeddings"),
        embedding_dropout=0.0,  # transformers' class does not look at emb_pdrop
        final_norm=norm,
        head=parts.decoder_head(reader, {"DbrxForCausalLM": parts.LANGUAGE, "DbrxModel": parts.BODY}),
        unused_keys=(*attending.unused(), *feeding.unused()),
    )


READERS = {"dbrx": dbrx}
