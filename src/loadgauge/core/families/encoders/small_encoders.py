"""Encoders made small: DistilBERT, ELECTRA and ALBERT, whose layers share their weights."""

import msgspec

from loadgauge.core.definitions.model.model import Block, Head, ModelSpec
from loadgauge.core.families import common as parts
from loadgauge.core.families.common import BODY, CLASSIFY, LANGUAGE
from loadgauge.core.families.reader import Reader

DETECT = "detect"
"""One logit for each token: was it replaced?"""


def _block(
    reader: Reader,
    hidden_size: int,
    heads: tuple[str, ...] = ("num_attention_heads",),
    width: str = "intermediate_size",
    activation: str = "hidden_act",
    attention_dropout: str = "attention_probs_dropout_prob",
) -> Block:
    """A block with norms after the residual sums and biases everywhere. All but `hidden_size` are keys of the config."""
    return Block(
        attention=parts.multi_head(
            reader,
            hidden_size,
            reader.whole(*heads),
            qkv_bias=True,
            output_bias=True,
            rotary=False,
            causal=reader.flag("is_decoder"),
            softmax_float32=False,
            dropout=reader.rate(attention_dropout),
        ),
        mlp=parts.plain_mlp(reader, reader.whole(width), activation),
        norm=parts.LAYER_NORM,
        placement="post",
    )


def distilbert(reader: Reader) -> ModelSpec:
    """Read a config of DistilBERT: BERT without types and pooler. Raises as `hf.from_dict`."""
    reader.ignore("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_")
    hidden_size = reader.whole("dim", "hidden_size")
    activation = reader.text("activation")
    dropout = reader.rate("dropout")
    heads = ("n_heads", "num_attention_heads")
    block = _block(reader, hidden_size, heads, "hidden_dim", "activation", "attention_dropout")
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
        head = parts.masked_language_head(activation)
    elif wanted == CLASSIFY:
        head = parts.first_token_classifier(reader, "relu")
    positions = reader.whole("max_position_embeddings")
    return parts.assembled(
        reader,
        hidden_size,
        [msgspec.structs.replace(block, dropout=dropout, dropout_after_attention=False)]
        * parts.layers(reader, "n_layers", "num_hidden_layers"),
        max_position_embeddings=positions,
        learned_positions=positions,
        embedding_norm=parts.LAYER_NORM,
        embedding_dropout=dropout,
        head=head,
    )


def electra(reader: Reader) -> ModelSpec:
    """Read a config of ELECTRA: narrow embeddings; its head predicts tokens, or detects the replaced ones.

    Raises as `hf.from_dict`.
    """
    parts.refuse_cross_attention(reader, "an encoder that attends to another")
    reader.ignore("position_embedding_type", "embedding_dropout")
    hidden_size = reader.whole("hidden_size")
    width = reader.whole("embedding_size")
    activation = reader.text("hidden_act")
    dropout = reader.rate("hidden_dropout_prob")
    block = _block(reader, hidden_size)
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
        head = parts.first_token_classifier(reader, "gelu")
    positions = reader.whole("max_position_embeddings")
    return parts.assembled(
        reader,
        hidden_size,
        [msgspec.structs.replace(block, dropout=dropout)] * parts.layers(reader, "num_hidden_layers"),
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
    """Read a config of ALBERT: the layers of a group are one layer, applied again and again. Raises as `hf.from_dict`."""
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
    block = _block(reader, hidden_size)
    own = msgspec.structs.replace(block, dropout=dropout, dropout_after_mlp=False)
    shares = msgspec.structs.replace(own, shares_weights=True)
    layers: list[Block] = []
    seen: set[int] = set()
    for i in range(count):
        group = int(i / (count / groups))
        layers += [shares if group in seen else own] * inner
        seen.add(group)
    wanted = parts.task(
        reader,
        {"AlbertForMaskedLM": LANGUAGE, "AlbertForSequenceClassification": CLASSIFY, "AlbertModel": BODY},
    )
    head = Head(kind="pooler", transform=True, activation="tanh")
    if wanted == LANGUAGE:
        parts.refuse_untied(reader)
        head = parts.masked_language_head(activation)
    elif wanted == CLASSIFY:
        head = parts.first_token_classifier(reader, "tanh")
    positions = reader.whole("max_position_embeddings")
    return parts.assembled(
        reader,
        hidden_size,
        layers,
        max_position_embeddings=positions,
        learned_positions=positions,
        token_types=reader.whole("type_vocab_size"),
        embedding_size=reader.whole("embedding_size"),
        factorised_embedding=True,
        embedding_norm=parts.LAYER_NORM,
        embedding_dropout=dropout,
        head=head,
    )


READERS = {"distilbert": distilbert, "electra": electra, "albert": albert}
