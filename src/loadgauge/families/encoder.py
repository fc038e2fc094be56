"""Encoders: BERT, RoBERTa, XLM-RoBERTa and its XL sizes, ModernBERT."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import msgspec

from loadgauge.families import common as parts
from loadgauge.families.reader import Reader
from loadgauge.spec.model import Attention, Block, Head, Mlp, ModelSpec, Norm


def encoder_classes(prefix: str) -> dict[str, str]:
    """The classes that transformers has for the encoder `prefix`, and what the head of each does."""
    return {f"{prefix}ForMaskedLM": parts.LANGUAGE, f"{prefix}ForCausalLM": parts.LANGUAGE, **_shared(prefix)}


def _shared(prefix: str) -> dict[str, str]:
    return {f"{prefix}ForSequenceClassification": parts.CLASSIFY, f"{prefix}Model": parts.BODY}


class Encoder(msgspec.Struct, frozen=True, kw_only=True):
    """What tells one relative of BERT from the next, other than the defaults of their configuration classes."""

    classes: Mapping[str, str]
    placement: Literal["pre", "post"] = "post"
    spare_positions: bool = True
    """Positions are counted from the padding token's id on, so the table has rows that no token reaches."""
    head_activation: str | None = "gelu"
    """Of the masked-LM head; None: `hidden_act`."""


def read(reader: Reader, family: Encoder) -> ModelSpec:
    """Reads a config of the BERT family `family` into a model."""
    if reader.flag("add_cross_attention"):
        raise reader.unmodelled("add_cross_attention", "an encoder that attends to another is not modelled")
    if reader.text("position_embedding_type", default="absolute") != "absolute":
        raise reader.unmodelled("position_embedding_type", "only absolute positions are modelled")
    hidden_size = reader.whole("hidden_size")
    heads = reader.whole("num_attention_heads")
    count = parts.layers(reader, "num_hidden_layers")
    rows = reader.whole("max_position_embeddings")
    longest = rows
    if family.spare_positions:
        longest -= 1 + (reader.optional_whole("pad_token_id", default=1, minimum=0) or 0)
        if longest < 1:
            raise reader.wrong("max_position_embeddings", f"{rows} rows leave no position after pad_token_id")
    activation = reader.text("hidden_act")
    dropout = reader.rate("hidden_dropout_prob")
    post = family.placement == "post"
    block = Block(
        attention=Attention(
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=parts.head_width(reader, hidden_size, heads),
            qkv_bias=True,
            output_bias=True,
            rotary=False,
            causal=reader.flag("is_decoder"),
            softmax_float32=False,
            dropout=reader.rate("attention_probs_dropout_prob"),
        ),
        mlp=Mlp(
            intermediate_size=reader.whole("intermediate_size"),
            gated=False,
            bias=True,
            activation=activation,
        ),
        norm=parts.LAYER_NORM,
        placement=family.placement,
        dropout=dropout,
        dropout_after_mlp=post,  # transformers' XLM-RoBERTa-XL drops the attention's output only
    )
    tied = reader.flag("tie_word_embeddings")
    head = _head(reader, family, activation)
    if head.kind == "lm" and not tied:
        raise reader.unmodelled(
            "tie_word_embeddings", "false is not modelled here: transformers then keeps a second bias that nothing uses"
        )
    return ModelSpec(
        name=reader.name,
        model_type=reader.model_type,
        hidden_size=hidden_size,
        vocab_size=reader.whole("vocab_size"),
        blocks=(block,),
        pattern=(0,) * count,
        tie_word_embeddings=tied,
        max_position_embeddings=longest,
        learned_positions=rows,
        token_types=reader.whole("type_vocab_size", minimum=0),
        embedding_norm=parts.LAYER_NORM if post else None,
        embedding_dropout=dropout,
        final_norm=None if post else parts.LAYER_NORM,
        head=head,
    )


def _head(reader: Reader, family: Encoder, activation: str) -> Head:
    wanted = parts.task(reader, family.classes)
    if wanted == parts.LANGUAGE:
        return Head(
            transform=True,
            transform_norm=parts.LAYER_NORM,
            activation=family.head_activation or activation,
            bias=True,
            loss_float32=False,
        )
    if wanted == parts.CLASSIFY:
        return Head(
            kind="classifier", transform=True, activation="tanh", bias=True, num_labels=parts.num_labels(reader)
        )
    return Head(kind="pooler", transform=True, activation="tanh")


def modernbert(reader: Reader) -> ModelSpec:
    """ModernBERT: rotary positions, gated MLP, local attention in two layers of three, no norm before the first."""
    reader.ignore("position_embedding_type")  # published as "absolute", and not looked at
    hidden_size = reader.whole("hidden_size")
    heads = reader.whole("num_attention_heads")
    count = parts.layers(reader, "num_hidden_layers")
    norm = Norm("layernorm", bias=reader.flag("norm_bias"))
    biased = reader.flag("attention_bias")
    dropout = reader.rate("attention_dropout")
    every = reader.whole("global_attn_every_n_layers", default=3)
    # Half of the window lies before the token and half after it.
    window = 2 * (reader.whole("local_attention") // 2) + 1
    types = parts.layer_types(reader, count)
    if types is None:
        types = tuple("sliding_attention" if i % every else "full_attention" for i in range(count))
    attention = Attention(
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=parts.head_width(reader, hidden_size, heads),
        qkv_bias=biased,
        output_bias=biased,
        fused_qkv=True,
        causal=False,
        dropout=dropout,
    )
    block = Block(
        attention=attention,
        mlp=Mlp(
            intermediate_size=reader.whole("intermediate_size"),
            bias=reader.flag("mlp_bias"),
            activation=reader.text("hidden_activation"),
            fused_gate_up=True,
            dropout=reader.rate("mlp_dropout"),
        ),
        norm=norm,
        dropout=dropout,
        dropout_after_mlp=False,
    )
    layers = [
        msgspec.structs.replace(
            block, attention=msgspec.structs.replace(attention, sliding_window=keys), first_norm=index > 0
        )
        for index, keys in enumerate(parts.windows(reader, types, window, "local_attention"))
    ]
    blocks, pattern = parts.distinct(layers)
    return ModelSpec(
        name=reader.name,
        model_type=reader.model_type,
        hidden_size=hidden_size,
        vocab_size=reader.whole("vocab_size"),
        blocks=blocks,
        pattern=pattern,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        max_position_embeddings=reader.whole("max_position_embeddings"),
        rotary_tables=len(set(types)),
        embedding_norm=norm,
        embedding_dropout=reader.rate("embedding_dropout"),
        final_norm=norm,
        head=_modernbert_head(reader, norm),
    )


def _modernbert_head(reader: Reader, norm: Norm) -> Head:
    wanted = parts.task(reader, {"ModernBertForMaskedLM": parts.LANGUAGE, **_shared("ModernBert")})
    head = Head(
        transform=True,
        transform_bias=reader.flag("classifier_bias"),
        transform_norm=norm,
        activation=reader.text("classifier_activation"),
        bias=reader.flag("decoder_bias"),
    )
    if wanted == parts.LANGUAGE:
        return head
    if wanted == parts.BODY:
        return Head(kind="none")
    return msgspec.structs.replace(head, kind="classifier", bias=True, num_labels=parts.num_labels(reader))


READERS = {
    "bert": partial(
        read,
        family=Encoder(
            classes={"BertForMaskedLM": parts.LANGUAGE, "BertLMHeadModel": parts.LANGUAGE, **_shared("Bert")},
            spare_positions=False,
            head_activation=None,
        ),
    ),
    "roberta": partial(read, family=Encoder(classes=encoder_classes("Roberta"))),
    "xlm-roberta": partial(read, family=Encoder(classes=encoder_classes("XLMRoberta"))),
    "xlm-roberta-xl": partial(
        read,
        family=Encoder(
            classes=encoder_classes("XLMRobertaXL"),
            placement="pre",
        ),
    ),
    "modernbert": modernbert,
}
