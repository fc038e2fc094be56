"""The models the papers analyse, with every size open: ints, arrays or symbols.

The GPT of Narayanan et al. and Korthikanti et al. (LayerNorm, biases, dropout, learned positions, tied head) and the
Llama of Touvron et al. (RMSNorm, gated MLP, rotary positions, grouped-query attention, no bias, no dropout);
the blocks of Mixtral (routed experts) and of DeepSeek-V3 (latent attention, routed and shared experts).
"""

from loadgauge.core.base.algebra import Size, shard
from loadgauge.core.definitions.model.model import Attention, Block, LatentAttention, Mlp, ModelSpec, Moe, Norm

LAYER_NORM = Norm("layernorm", bias=True)


def llama_ffn(hidden_size: int, multiple_of: int = 256) -> int:
    """Llama's feed-forward width: two thirds of 4h, rounded up to a multiple (source: touvron2023).

    >>> llama_ffn(8192), llama_ffn(4096)
    (22016, 11008)
    """
    return multiple_of * ((8 * hidden_size // 3 + multiple_of - 1) // multiple_of)


def gpt_block(hidden_size: Size, num_attention_heads: Size, *, dropout: float = 0.1) -> Block:
    """Return a GPT block: 12 h^2 + 13 h parameters (source: narayanan2021). dropout: probability, everywhere"""
    return Block(
        attention=Attention(
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_attention_heads,
            head_dim=shard(hidden_size, num_attention_heads, "hidden_size"),
            qkv_bias=True,
            output_bias=True,
            fused_qkv=True,
            rotary=False,
            dropout=dropout,
        ),
        mlp=Mlp(intermediate_size=4 * hidden_size, gated=False, bias=True, activation="gelu"),
        norm=LAYER_NORM,
        dropout=dropout,
    )


def gpt_model(
    layers: int,
    hidden_size: Size,
    num_attention_heads: Size,
    vocab_size: Size,
    *,
    positions: Size = 0,
    dropout: float = 0.1,
    name: str = "gpt",
) -> ModelSpec:
    """A GPT with a tied head; `positions` rows of learned positions (0: none, as where they are neglected)."""
    return ModelSpec(
        name=name,
        model_type="gpt2",
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        blocks=(gpt_block(hidden_size, num_attention_heads, dropout=dropout),),
        pattern=(0,) * layers,
        tie_word_embeddings=True,
        learned_positions=positions,
        embedding_dropout=dropout,
        final_norm=LAYER_NORM,
        source="narayanan2021",
    )


def llama_block(
    hidden_size: Size, num_attention_heads: Size, num_key_value_heads: Size, head_dim: Size, intermediate_size: Size
) -> Block:
    """Return a Llama block: 2 h a d + 2 h k d + 3 h f + 2 h parameters (source: touvron2023)."""
    return Block(
        attention=Attention(
            num_attention_heads=num_attention_heads, num_key_value_heads=num_key_value_heads, head_dim=head_dim
        ),
        mlp=Mlp(intermediate_size=intermediate_size),
        norm=Norm("rmsnorm"),
    )


def llama_model(
    layers: int,
    hidden_size: Size,
    num_attention_heads: Size,
    vocab_size: Size,
    *,
    num_key_value_heads: Size | None = None,
    intermediate_size: Size | None = None,
    tie_word_embeddings: bool = False,
    name: str = "llama",
) -> ModelSpec:
    """Return a Llama (source: touvron2023); multi-head and with the published feed-forward width unless said otherwise."""
    width = llama_ffn(hidden_size) if intermediate_size is None else intermediate_size
    block = llama_block(
        hidden_size,
        num_attention_heads,
        num_attention_heads if num_key_value_heads is None else num_key_value_heads,
        shard(hidden_size, num_attention_heads, "hidden_size"),
        width,
    )
    return ModelSpec(
        name=name,
        model_type="llama",
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        blocks=(block,),
        pattern=(0,) * layers,
        tie_word_embeddings=tie_word_embeddings,
        final_norm=Norm("rmsnorm"),
        source="touvron2023",
    )


def mixtral_block(
    hidden_size: Size,
    num_attention_heads: Size,
    num_key_value_heads: Size,
    head_dim: Size,
    num_experts: Size,
    num_experts_per_tok: Size,
    moe_intermediate_size: Size,
) -> Block:
    """A Mixtral block: 2 h a d + 2 h k d + h E + 3 E h f + 2 h parameters (source: jiang2024)."""
    return Block(
        attention=Attention(
            num_attention_heads=num_attention_heads, num_key_value_heads=num_key_value_heads, head_dim=head_dim
        ),
        mlp=Moe(
            num_experts=num_experts,
            num_experts_per_tok=num_experts_per_tok,
            moe_intermediate_size=moe_intermediate_size,
            weights_float32=True,
        ),
        norm=Norm("rmsnorm"),
    )


def deepseek_block(
    hidden_size: Size,
    num_attention_heads: Size,
    q_lora_rank: Size | None,
    kv_lora_rank: Size,
    qk_nope_head_dim: Size,
    qk_rope_head_dim: Size,
    v_head_dim: Size,
    num_experts: Size,
    num_experts_per_tok: Size,
    moe_intermediate_size: Size,
    shared_intermediate_size: Size,
) -> Block:
    """A DeepSeek-V3 block (source: deepseek2024v3): latent attention, routed experts and one shared MLP.

    h q + q a (n + r) + h (m + r) + m a (n + v) + a v h parameters in the matrices of attention, with n, r and v the
    widths of a head's parts and q and m of the latents; h E + 3 E h f + 3 h g in those of the experts, g shared; and
    q + m + 2 h in the norms.
    """
    return Block(
        attention=LatentAttention(
            num_attention_heads=num_attention_heads,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
        ),
        mlp=Moe(
            num_experts=num_experts,
            num_experts_per_tok=num_experts_per_tok,
            moe_intermediate_size=moe_intermediate_size,
            router_score="sigmoid",
            router_float32=True,
            weights_float32=True,
            shared=Mlp(intermediate_size=shared_intermediate_size),
        ),
        norm=Norm("rmsnorm"),
    )
