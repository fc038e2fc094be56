"""Encoders: BERT, RoBERTa, XLM-RoBERTa and its XL sizes, ModernBERT."""

from collections.abc import Mapping
from functools import partial
from typing import Literal

import msgspec

from loadgauge.core.definitions.model.model import Block, Head, Mlp, ModelSpec, Norm
from loadgauge.core.families import common as parts
from loadgauge.core.families.reader import Reader


def encoder_classes(prefix: str) -> dict[str, str]:
    """The classes that transformers has for the encoder `prefix`, and what the head of each does."""
    return {f"{prefix}ForMaskedLM": parts.LANGUAGE, f"{prefix}ForCausalLM": parts.LANGUAGE, **_shared(prefix)}


def _shared(prefix: str) -> dict[str, str]:
    return {f"{prefix}ForSequenceClassification": parts.CLASSIFY, f"{prefix}Model": parts.BODY}


class Encoder(msgspec.Struct, frozen=True, kw_only=True):
    """Traits of a relative of BERT, beside the defaults of its configuration class."""

    classes: Mapping[str, str]
    placement: Literal["pre", "post"] = "post"
    spare_positions: bool = True
    """Positions are counted from the padding token's id on, so the table has rows that no token reaches."""
    head_activation: str | None = "gelu"
    """Of the masked-LM head; None: `hidden_act`."""


def read(reader: Reader, family: Encoder) -> ModelSpec:
    """Read a config of the relative of BERT that `family` states. Raises as `hf.from_dict`."""
    parts.refuse_cross_attention(reader, "an encoder that attends to another")
    if reader.text("position_embedding_type", default="absolute") != "absolute":
        raise reader.unmodelled("position_embedding_type", "only absolute positions are modelled")
    hidden_size, heads, count = parts.sizes(reader)
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
        attention=parts.multi_head(
            reader,
            hidden_size,
            heads,
            qkv_bias=True,
            output_bias=True,
            rotary=False,
            causal=reader.flag("is_decoder"),
            softmax_float32=False,
            dropout=reader.rate("attention_probs_dropout_prob"),
        ),
        mlp=parts.plain_mlp(reader, reader.whole("intermediate_size"), "hidden_act"),
        norm=parts.LAYER_NORM,
        placement=family.placement,
        dropout=dropout,
        dropout_after_mlp=post,  # transformers' XLM-RoBERTa-XL drops the attention's output only
    )
    head = _head(reader, family, activation)
    if head.kind == "lm":
        parts.refuse_untied(reader)
    return parts.assembled(
        reader,
        hidden_size,
        [block] * count,
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
        return parts.masked_language_head(family.head_activation or activation)
    if wanted == parts.CLASSIFY:
        return parts.first_token_classifier(reader, "tanh")
    return Head(kind="pooler", transform=True, activation="tanh")


def modernbert(reader: Reader) -> ModelSpec:
    """Read a config of ModernBERT: rotary positions, gated MLP, local attention in two layers of three.

    No norm before the first layer. Raises as `hf.from_dict`.
    """
    reader.ignore("position_embedding_type")  # published as "absolute", and not looked at
    hidden_size, heads, count = parts.sizes(reader)
    norm = Norm("layernorm", bias=reader.flag("norm_bias"))
    biased = reader.flag("attention_bias")
    dropout = reader.rate("attention_dropout")
    every = reader.whole("global_attn_every_n_layers", default=3)
    # Half of the window lies before the token and half after it.
    window = 2 * (reader.whole("local_attention") // 2) + 1
    types = parts.layer_types(reader, count)
    if types is None:
        types = tuple("sliding_attention" if i % every else "full_attention" for i in range(count))
    attention = parts.multi_head(
        reader,
        hidden_size,
        heads,
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
    return parts.assembled(
        reader,
        hidden_size,
        layers,
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
