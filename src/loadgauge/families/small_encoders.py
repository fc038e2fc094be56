"""Encoders made small: DistilBERT, ELECTRA and ALBERT, whose layers share their weights."""

from __future__ import annotations

import msgspec

from loadgauge.families import common as parts
from loadgauge.families.common import BODY, CLASSIFY, LANGUAGE
from loadgauge.families.reader import Reader
from loadgauge.spec.model import Attention, Block, Head, Mlp, ModelSpec

DETECT = "detect"
"""One logit for each token: was it replaced?"""


def _block(
    reader: Reader, hidden_size: int, heads: int, intermediate_size: int, activation: str, attention_dropout: float
) -> Block:
    """A block with norms after the residual sums and biases everywhere."""
    return Block(
        attention=Attention(
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=parts.head_width(reader, hidden_size, heads),
            qkv_bias=True,
            output_bias=True,
            rotary=False,
            causal=reader.flag("is_decoder"),
            softmax_float32=False,
            dropout=attention_dropout,
        ),
        mlp=Mlp(intermediate_size=intermediate_size, gated=False, bias=True, activation=activation),
        norm=parts.LAYER_NORM,
        placement="post",
    )


def distilbert(reader: Reader) -> ModelSpec:
    """DistilBERT: BERT without types and pooler."""
    reader.ignore("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_")
    hidden_size = reader.whole("dim", "hidden_size")
    activation = reader.text("activation")
    dropout = reader.rate("dropout")
    block = _block(
        reader,
        hidden_size,
        reader.whole("n_heads", "num_attention_heads"),
        reader.whole("hidden_dim"),
        activation,
        reader.rate("attention_dropout"),
    )
    wanted = parts.task(
        reader,
        {
            "DistilBertForMaskedLM": LANGUAGE,
            "DistilBertForSequenceClassification": CLASSIFY,
            "DistilBertModel": BODY,
        },
    )
    head = Head(kind="none")
    if wanted == LANGUAGE:
        head = Head(
            transform=True, transform_norm=parts.LAYER_NORM, activation=activation, bias=True, loss_float32=False
        )
    elif wanted == CLASSIFY:
        head = _classifier(reader, "relu")
    positions = reader.whole("max_position_embeddings")
    return ModelSpec(
        name=reader.name,
        model_type=reader.model_type,
        hidden_size=hidden_size,
        vocab_size=reader.whole("vocab_size"),
        blocks=(msgspec.structs.replace(block, dropout=dropout, dropout_after_attention=False),),
        pattern=(0,) * parts.layers(reader, "n_layers", "num_hidden_layers"),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        max_position_embeddings=positions,
        learned_positions=positions,
        embedding_norm=parts.LAYER_NORM,
        embedding_dropout=dropout,
        head=head,
    )


def electra(reader: Reader) -> ModelSpec:
    """ELECTRA: narrow embeddings; the head is a generator's over the vocabulary, or a detector's on each token."""
    if reader.flag("add_cross_attention"):
        raise reader.unmodelled("add_cross_attention", "an encoder that attends to another is not modelled")
    reader.ignore("position_embedding_type", "embedding_dropout")
    hidden_size = reader.whole("hidden_size")
    width = reader.whole("embedding_size")
    activation = reader.text("hidden_act")
    dropout = reader.rate("hidden_dropout_prob")
    block = _block(
        reader,
        hidden_size,
        reader.whole("num_attention_heads"),
        reader.whole("intermediate_size"),
        activation,
        reader.rate("attention_probs_dropout_prob"),
    )
    wanted = parts.task(
        reader,
        {
            "ElectraForMaskedLM": LANGUAGE,
            "ElectraForCausalLM": LANGUAGE,
            "ElectraForPreTraining": DETECT,
            "ElectraForSequenceClassification": CLASSIFY,
            "ElectraModel": BODY,
        },
    )
    head = Head(kind="none")
    if wanted == LANGUAGE:
        head = Head(transform=True, transform_norm=parts.LAYER_NORM, bias=True, loss_float32=False)
    elif wanted == DETECT:
        head = Head(kind="classifier", per_token=True, transform=True, activation=activation, bias=True, num_labels=1)
    elif wanted == CLASSIFY:
        head = _classifier(reader, "gelu")
    positions = reader.whole("max_position_embeddings")
    return ModelSpec(
        name=reader.name,
        model_type=reader.model_type,
        hidden_size=hidden_size,
        vocab_size=reader.whole("vocab_size"),
        blocks=(msgspec.structs.replace(block, dropout=dropout),),
        pattern=(0,) * parts.layers(reader, "num_hidden_layers"),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        max_position_embeddings=positions,
        learned_positions=positions,
        token_types=reader.whole("type_vocab_size"),
        embedding_size=None if width == hidden_size else width,
        factorised_embedding=width != hidden_size,
        embedding_norm=parts.LAYER_NORM,
        embedding_dropout=dropout,
        head=head,
    )


def albert(reader: Reader) -> ModelSpec:
    """ALBERT: the layers of a group are one layer, applied again and again."""
    reader.ignore("position_embedding_type", "classifier_dropout_prob", "net_structure_type", "down_scale_factor")
    reader.ignore("gap_size", "num_memory_blocks")  # of the published files; transformers looks at none of them
    hidden_size = reader.whole("hidden_size")
    activation = reader.text("hidden_act")
    dropout = reader.rate("hidden_dropout_prob")
    count = parts.layers(reader, "num_hidden_layers")
    groups = reader.whole("num_hidden_groups")
    inner = reader.whole("inner_group_num", maximum=parts.MOST_LAYERS // count or 1)
    if groups > count:
        raise reader.wrong("num_hidden_groups", f"{groups} groups of {count} layers: some would never run")
    block = _block(
        reader,
        hidden_size,
        reader.whole("num_attention_heads"),
        reader.whole("intermediate_size"),
        activation,
        reader.rate("attention_probs_dropout_prob"),
    )
    own = msgspec.structs.replace(block, dropout=dropout, dropout_after_mlp=False)
    shares = msgspec.structs.replace(own, shares_weights=True)
    layers: list[Block] = []
    seen: set[int] = set()
    for i in range(count):
        group = int(i / (count / groups))
        layers += [shares if group in seen else own] * inner
        seen.add(group)
    blocks, pattern = parts.distinct(layers)
    wanted = parts.task(
        reader,
        {"AlbertForMaskedLM": LANGUAGE, "AlbertForSequenceClassification": CLASSIFY, "AlbertModel": BODY},
    )
    tied = reader.flag("tie_word_embeddings")
    if wanted == LANGUAGE and not tied:
        raise reader.unmodelled(
            "tie_word_embeddings", "false is not modelled here: transformers then keeps a second bias that nothing uses"
        )
    head = Head(kind="pooler", transform=True, activation="tanh")
    if wanted == LANGUAGE:
        head = Head(
            transform=True, transform_norm=parts.LAYER_NORM, activation=activation, bias=True, loss_float32=False
        )
    elif wanted == CLASSIFY:
        head = _classifier(reader, "tanh")
    positions = reader.whole("max_position_embeddings")
    return ModelSpec(
        name=reader.name,
        model_type=reader.model_type,
        hidden_size=hidden_size,
        vocab_size=reader.whole("vocab_size"),
        blocks=blocks,
        pattern=pattern,
        tie_word_embeddings=tied,
        max_position_embeddings=positions,
        learned_positions=positions,
        token_types=reader.whole("type_vocab_size"),
        embedding_size=reader.whole("embedding_size"),
        factorised_embedding=True,
        embedding_norm=parts.LAYER_NORM,
        embedding_dropout=dropout,
        head=head,
    )


def _classifier(reader: Reader, activation: str) -> Head:
    """A dense layer and a matrix over the labels, on the first token."""
    return Head(
        kind="classifier", transform=True, activation=activation, bias=True, num_labels=parts.num_labels(reader)
    )


READERS = {"distilbert": distilbert, "electra": electra, "albert": albert}
