"""GPT-2, GPTBigCode (StarCoder), GPT-NeoX (Pythia) and OPT: decoders with LayerNorm, biases and an MLP of two matrices."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from loadgauge.core.definitions.model.model import Attention, Block, ModelSpec, Norm
from loadgauge.core.families import common as parts
from loadgauge.core.families.common import switch
from loadgauge.core.families.reader import Reader


def gpt2(
    reader: Reader,
    classes: Mapping[str, str],
    named: str = "a decoder",
    *,
    ignored: Sequence[str] = (),
    softmax_float32: bool = False,
) -> ModelSpec:
    """GPT-2, GPT-3 and GPTBigCode: learned positions, one matrix for queries, keys and values.

    GPTBigCode has one key-value head for all query heads. classes: see `common.task`; named: the model, for errors
    """
    parts.refuse_cross_attention(reader, f"{named} that attends to an encoder")
    reader.ignore(*ignored)
    hidden_size, heads, count = parts.sizes(reader, "n_embd", "n_head", "n_layer")
    positions = reader.whole("n_positions", "max_position_embeddings")
    dropout = reader.rate("resid_pdrop")
    attention = Attention(
        num_attention_heads=heads,
        num_key_value_heads=1 if switch(reader, "multi_query") else heads,
        head_dim=parts.head_width(reader, hidden_size, heads, "n_embd"),
        qkv_bias=True,
        output_bias=True,
        fused_qkv=True,
        rotary=False,
        softmax_float32=softmax_float32,
        dropout=reader.rate("attn_pdrop"),
    )
    mlp = parts.plain_mlp(reader, reader.optional_whole("n_inner") or 4 * hidden_size, "activation_function")
    return parts.assembled(
        reader,
        hidden_size,
        [Block(attention=attention, mlp=mlp, norm=parts.LAYER_NORM, dropout=dropout)] * count,
        max_position_embeddings=positions,
        learned_positions=positions,
        embedding_dropout=reader.rate("embd_pdrop"),
        final_norm=parts.LAYER_NORM,
        head=parts.decoder_head(reader, classes),
    )


def gpt_neox(reader: Reader) -> ModelSpec:
    """Read a config of GPT-NeoX or Pythia: rotary positions, attention and MLP side by side. Raises as `hf.from_dict`."""
    hidden_size, heads, count = parts.sizes(reader)
    head_dim = parts.head_width(reader, hidden_size, heads)
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
        mlp=parts.plain_mlp(reader, reader.whole("intermediate_size"), "hidden_act"),
        norm=parts.LAYER_NORM,
        placement="parallel" if reader.flag("use_parallel_residual") else "pre",
        dropout=dropout,
    )
    return parts.assembled(
        reader,
        hidden_size,
        [block] * count,
        max_position_embeddings=reader.whole("max_position_embeddings"),
        embedding_dropout=dropout,
        final_norm=parts.LAYER_NORM,
        head=parts.decoder_head(reader, parts.decoder_classes("GPTNeoX")),
    )


def opt(reader: Reader) -> ModelSpec:
    """Read a config of OPT: learned positions with two rows to spare; 350M has narrower embeddings, and norms after sums.

    Raises as `hf.from_dict`.
    """
    hidden_size, heads, count = parts.sizes(reader)
    positions = reader.whole("max_position_embeddings")
    width = reader.optional_whole("word_embed_proj_dim")
    biased = reader.flag("enable_bias")
    affine = reader.flag("layer_norm_elementwise_affine")
    norm = Norm("layernorm", weight=affine, bias=affine)
    first = reader.flag("do_layer_norm_before")
    bare_end = reader.flag("_remove_final_layer_norm")
    block = Block(
        attention=parts.multi_head(
            reader,
            hidden_size,
            heads,
            qkv_bias=biased,
            output_bias=biased,
            rotary=False,
            dropout=reader.rate("attention_dropout"),
        ),
        mlp=parts.plain_mlp(reader, reader.whole("ffn_dim"), "activation_function", bias=biased),
        norm=norm,
        placement="pre" if first else "post",
        dropout=reader.rate("dropout"),
    )
    return parts.assembled(
        reader,
        hidden_size,
        [block] * count,
        max_position_embeddings=positions,
        learned_positions=positions + 2,
        embedding_size=None if width in (None, hidden_size) else width,
        final_norm=norm if first and not bare_end else None,
        head=parts.decoder_head(reader, parts.decoder_classes("OPT")),
    )


GPT2_CLASSES = {
    "GPT2LMHeadModel": parts.LANGUAGE,
    "GPT2ForSequenceClassification": parts.CLASSIFY,
    "GPT2Model": parts.BODY,
}
BIGCODE_CLASSES = {
    "GPTBigCodeForCausalLM": parts.LANGUAGE,
    "GPTBigCodeLMHeadModel": parts.LANGUAGE,
    "GPTBigCodeForSequenceClassification": parts.CLASSIFY,
    "GPTBigCodeModel": parts.BODY,
}
READERS: dict[str, Callable[[Reader], ModelSpec]] = {
    "gpt2": partial(gpt2, classes=GPT2_CLASSES, named="a GPT-2"),
    "gpt_bigcode": partial(
        gpt2,
        classes=BIGCODE_CLASSES,
        ignored=("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
        softmax_float32=True,
    ),
    "gpt_neox": gpt_neox,
    "opt": opt,
}
