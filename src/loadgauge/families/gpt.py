"""GPT-2, GPT-NeoX (Pythia) and OPT: decoders with LayerNorm, biases and an MLP of two matrices."""

from __future__ import annotations

from loadgauge.families import common as parts
from loadgauge.families.reader import Reader
from loadgauge.spec.model import Attention, Block, Mlp, ModelSpec, Norm


def gpt2(reader: Reader) -> ModelSpec:
    """GPT-2 and GPT-3: learned positions, one matrix for queries, keys and values."""
    if reader.flag("add_cross_attention"):
        raise reader.unmodelled("add_cross_attention", "a GPT-2 that attends to an encoder is not modelled")
    hidden_size = reader.whole("n_embd", "hidden_size")
    heads = reader.whole("n_head", "num_attention_heads")
    count = parts.layers(reader, "n_layer", "num_hidden_layers")
    positions = reader.whole("n_positions", "max_position_embeddings")
    dropout = reader.rate("resid_pdrop")
    block = Block(
        attention=Attention(
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=parts.head_width(reader, hidden_size, heads, "n_embd"),
            qkv_bias=True,
            output_bias=True,
            fused_qkv=True,
            rotary=False,
            softmax_float32=False,
            dropout=reader.rate("attn_pdrop"),
        ),
        mlp=Mlp(
            intermediate_size=reader.optional_whole("n_inner") or 4 * hidden_size,
            gated=False,
            bias=True,
            activation=reader.text("activation_function"),
        ),
        norm=parts.LAYER_NORM,
        dropout=dropout,
    )
    return ModelSpec(
        name=reader.name,
        model_type=reader.model_type,
        hidden_size=hidden_size,
        vocab_size=reader.whole("vocab_size"),
        blocks=(block,),
        pattern=(0,) * count,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        max_position_embeddings=positions,
        learned_positions=positions,
        embedding_dropout=reader.rate("embd_pdrop"),
        final_norm=parts.LAYER_NORM,
        head=parts.decoder_head(
            reader,
            {
                "GPT2LMHeadModel": parts.LANGUAGE,
                "GPT2ForSequenceClassification": parts.CLASSIFY,
                "GPT2Model": parts.BODY,
            },
        ),
    )


def gpt_neox(reader: Reader) -> ModelSpec:
    """GPT-NeoX and Pythia: rotary positions, attention and MLP side by side."""
    hidden_size = reader.whole("hidden_size")
    heads = reader.whole("num_attention_heads")
    head_dim = parts.head_width(reader, hidden_size, heads)
    count = parts.layers(reader, "num_hidden_layers")
    biased = reader.flag("attention_bias")
    dropout = reader.rate("hidden_dropout")
    block = Block(
        attention=Attention(
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=head_dim,
            qkv_bias=biased,
            output_bias=biased,
            fused_qkv=True,
            rotary_dim=parts.rotary_dim(reader, head_dim, 0.25, "partial_rotary_factor", "rotary_pct"),
            heads_first=True,
            dropout=reader.rate("attention_dropout"),
        ),
        mlp=Mlp(
            intermediate_size=reader.whole("intermediate_size"),
            gated=False,
            bias=True,
            activation=reader.text("hidden_act"),
        ),
        norm=parts.LAYER_NORM,
        placement="parallel" if reader.flag("use_parallel_residual") else "pre",
        dropout=dropout,
    )
    return ModelSpec(
        name=reader.name,
        model_type=reader.model_type,
        hidden_size=hidden_size,
        vocab_size=reader.whole("vocab_size"),
        blocks=(block,),
        pattern=(0,) * count,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        max_position_embeddings=reader.whole("max_position_embeddings"),
        embedding_dropout=dropout,
        final_norm=parts.LAYER_NORM,
        head=parts.decoder_head(reader, parts.decoder_classes("GPTNeoX")),
    )


def opt(reader: Reader) -> ModelSpec:
    """OPT: learned positions with two rows to spare; the 350M model has narrower embeddings, and norms after sums."""
    hidden_size = reader.whole("hidden_size")
    heads = reader.whole("num_attention_heads")
    count = parts.layers(reader, "num_hidden_layers")
    positions = reader.whole("max_position_embeddings")
    width = reader.optional_whole("word_embed_proj_dim")
    biased = reader.flag("enable_bias")
    affine = reader.flag("layer_norm_elementwise_affine")
    norm = Norm("layernorm", weight=affine, bias=affine)
    first = reader.flag("do_layer_norm_before")
    bare_end = reader.flag("_remove_final_layer_norm")
    block = Block(
        attention=Attention(
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=parts.head_width(reader, hidden_size, heads),
            qkv_bias=biased,
            output_bias=biased,
            rotary=False,
            dropout=reader.rate("attention_dropout"),
        ),
        mlp=Mlp(
            intermediate_size=reader.whole("ffn_dim"),
            gated=False,
            bias=biased,
            activation=reader.text("activation_function"),
        ),
        norm=norm,
        placement="pre" if first else "post",
        dropout=reader.rate("dropout"),
    )
    return ModelSpec(
        name=reader.name,
        model_type=reader.model_type,
        hidden_size=hidden_size,
        vocab_size=reader.whole("vocab_size"),
        blocks=(block,),
        pattern=(0,) * count,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        max_position_embeddings=positions,
        learned_positions=positions + 2,
        embedding_size=None if width in (None, hidden_size) else width,
        final_norm=norm if first and not bare_end else None,
        head=parts.decoder_head(reader, parts.decoder_classes("OPT")),
    )


READERS = {"gpt2": gpt2, "gpt_neox": gpt_neox, "opt": opt}
