"""Decoders with rotary positions: Llama and its many relatives, of which a `Decoder` states one.

To add a family whose blocks are of this kind, write one `Decoder` (in `llama.py`, `qwen.py` or a file of its own), put
it in that file's `READERS`, and its `model_type` in `hf.FILES`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from loadgauge.core.definitions.model.model import Attention, Block, LatentAttention, Mlp, ModelSpec, Moe, Norm
from loadgauge.core.families import common as parts
from loadgauge.core.families.common import Switch, switch
from loadgauge.core.families.mixtures.experts import Experts, expert_layers
from loadgauge.core.families.reader import Reader

Windows = Callable[[Reader, int], list[int | None]]
"""From the config and the number of layers: the keys each layer's queries may see; None: all."""
Rotated = Callable[[Reader, Sequence[int | None]], Sequence[bool]]
"""From the config and the windows: whether each layer rotates its queries and keys."""


def one_window(reader: Reader, count: int) -> list[int | None]:
    """The windows of `count` layers [tokens]: `sliding_window` for each."""
    return [reader.optional_whole("sliding_window")] * count


def typed_windows(every: Callable[[Reader], int]) -> Windows:
    """A reader of the windows by `layer_types`, or else: all keys in each `every`-th layer, `sliding_window` in the others."""

    def read_windows(reader: Reader, count: int) -> list[int | None]:
        window = reader.optional_whole("sliding_window")
        step = every(reader)
        return parts.windows_where(reader, count, window, lambda i: bool((i + 1) % step))

    return read_windows


class Decoder(msgspec.Struct, frozen=True, kw_only=True):
    """Traits of a decoder family, beside the defaults of its configuration class (`class_defaults`)."""

    classes: Mapping[str, str]
    head_dim_rounded: bool = False
    """`hidden_size` over the number of heads is rounded down where they do not divide the width (GLM-4.5)."""
    activation_key: str = "hidden_act"
    renamed_activations: Mapping[str, str] = {}
    ignored: tuple[str, ...] = ()
    """Keys of published configs that transformers does not look at."""
    norm: Norm = parts.RMS_NORM
    placement: Literal["pre", "after", "sandwich", "parallel"] = "pre"
    """Parallel halves share one norm."""
    parallel: Switch = False
    """The halves run side by side whatever `placement` says."""
    qk_norm: Norm | None = None
    qk_norm_over: Literal["head", "own", "all"] = "head"
    qk_normed: Switch = True
    """Switch of the norms of queries and keys, in a family that can have them."""
    rotated_only: bool = False
    """Layers that do not rotate have no norm of queries and keys (Llama 4)."""
    clip_key: str = ""
    """The key that clamps queries, keys and values where it is not null."""
    qkv_bias: Switch = "attention_bias"
    output_bias: Switch = "attention_bias"
    mlp_bias: Switch = "mlp_bias"
    head_bias: Switch = False
    gated: bool = True
    fused_qkv: bool = False
    """One weight makes queries, keys and values."""
    fused_gate_up: bool = False
    """One weight makes gate and up."""
    heads_first: bool = False
    """See `Attention.heads_first`. So is every family that may rotate a part of each head: it joins the two parts."""
    own_tables: int = 0
    tables_float32: bool = False
    """See `Attention.own_tables`."""
    query_scale: Literal["none", "native", "float32"] = "none"
    """See `Attention.query_scale`."""
    unrotated_query_scale: Switch = False
    """Layers that do not rotate scale their queries, in float32 (Llama 4)."""
    sinks: bool = False
    """See `Attention.sinks`."""
    scores_shifted: bool = False
    """See `Attention.scores_shifted`."""
    softmax_float32: bool = True
    """See `Attention.softmax_float32`."""
    residual_dropout: str = ""
    """The key of the dropout after each half; empty: there is none."""
    dropout_after_attention: bool = True
    embedding_dropout: str = ""
    softcaps: bool = False
    """`attn_logit_softcapping` and `final_logit_softcapping` are keys."""
    bidirectional_key: bool = False
    """`use_bidirectional_attention` is a key."""
    windows: Windows = lambda reader, count: [None] * count
    own_angles: bool = False
    """Layers with a window have rotary tables of their own."""
    rotated: Rotated = lambda reader, windows: [True] * len(windows)
    rotary_factor: float | None = None
    """Default share of each head that is rotated, where the family has the key; None: the whole head."""
    dense_size_key: str = "intermediate_size"
    """The key of the width of MLPs that are not experts."""
    value_head_dim: str = ""
    """The key of `Attention.value_head_dim`."""
    embedding_norm: Norm | None = None
    output_gate: bool = False
    gate_matrix: bool = False
    """See `Attention.output_gate`."""
    experts: Experts | None = None
    latent: Callable[[Reader], LatentAttention] | None = None
    """Reads multi-head latent attention, which stands in place of the usual one."""
    next_tokens: bool = False
    """`num_nextn_predict_layers` is a key."""
    positions: tuple[str, ...] = ("max_position_embeddings",)
    """Names of the key of the longest sequence."""
    own: Mapping[str, Any] = {}
    """Defaults of keys that the class does not declare."""


def read(reader: Reader, family: Decoder) -> ModelSpec:
    """Read a config of the family that `family` states. Raises as `hf.from_dict`."""
    reader.ignore(*family.ignored)
    hidden_size = reader.whole("hidden_size")
    count = parts.layers(reader, "num_hidden_layers")
    attention_softcap, final_softcap = (
        family.softcaps and reader.optional_real(key) is not None
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    )
    attention = family.latent(reader) if family.latent else _attention(reader, family, hidden_size, attention_softcap)
    mlp = _mlp(reader, family)
    moes: Sequence[Moe | None] = [None] * count
    if family.experts is not None:
        moes = expert_layers(reader, family.experts, count, mlp)
    dropout = reader.rate(family.residual_dropout) if family.residual_dropout else 0.0
    scaled = switch(reader, family.unrotated_query_scale)
    parallel = family.placement == "parallel" or switch(reader, family.parallel)

    def block(window: int | None, rotates: bool, moe: Moe | None) -> Block:
        mixer: Attention | LatentAttention = attention
        if isinstance(mixer, Attention):
            # A window counts the query itself; without a causal mask it reaches as far ahead as back.
            keys = window if window is None or mixer.causal else 2 * window - 1
            normed = rotates or not family.rotated_only
            mixer = msgspec.structs.replace(
                mixer,
                sliding_window=keys,
                rotary=rotates,
                qk_norm=mixer.qk_norm if normed else None,
                query_scale="float32" if scaled and not rotates else mixer.query_scale,
            )
        return Block(
            attention=mixer,
            mlp=mlp if moe is None else moe,
            norm=family.norm,
            placement="parallel" if parallel else family.placement,
            shared_norm=parallel,
            dropout=dropout,
            dropout_after_attention=family.dropout_after_attention,
        )

    windows = family.windows(reader, count)
    layers = list(zip(windows, family.rotated(reader, windows), moes, strict=True))
    built = {kind: block(*kind) for kind in dict.fromkeys(layers)}
    following = parts.next_token_layers(reader) if family.next_tokens else 0
    return parts.assembled(
        reader,
        hidden_size,
        [built[kind] for kind in layers],
        max_position_embeddings=reader.optional_whole(*family.positions),
        rotary_tables=len(set(windows)) if family.own_angles else 1,
        embedding_dropout=reader.rate(family.embedding_dropout) if family.embedding_dropout else 0.0,
        embedding_norm=family.embedding_norm,
        final_norm=family.norm,
        head=parts.decoder_head(reader, family.classes, softcap=final_softcap, bias=family.head_bias),
        num_nextn_predict_layers=following,
        unused_keys=("num_nextn_predict_layers (not counted unless asked)",) if following else (),
    )


def _attention(reader: Reader, family: Decoder, hidden_size: int, softcap: bool) -> Attention:
    heads = reader.whole("num_attention_heads")
    key_value_heads = parts.key_value_heads(reader, heads)
    head_dim = reader.optional_whole("head_dim")
    if head_dim is None:
        whole = hidden_size - hidden_size % heads if family.head_dim_rounded and hidden_size >= heads else hidden_size
        head_dim = parts.head_width(reader, whole, heads)
    return Attention(
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        qkv_bias=switch(reader, family.qkv_bias),
        output_bias=switch(reader, family.output_bias),
        fused_qkv=family.fused_qkv,
        clip=bool(family.clip_key) and reader.optional_real(family.clip_key) is not None,
        qk_norm=family.qk_norm if family.qk_norm is not None and switch(reader, family.qk_normed) else None,
        qk_norm_over=family.qk_norm_over,
        rotary_dim=None if family.rotary_factor is None else parts.rotary_dim(reader, head_dim, family.rotary_factor),
        sinks=family.sinks,
        value_head_dim=reader.whole(family.value_head_dim) if family.value_head_dim else None,
        output_gate=family.output_gate,
        gate_matrix=family.gate_matrix,
        causal=not (family.bidirectional_key and reader.flag("use_bidirectional_attention", nullable=True)),
        softcap=softcap,
        softmax_float32=family.softmax_float32,
        scores_shifted=family.scores_shifted,
        heads_first=family.heads_first or family.rotary_factor is not None,
        own_tables=family.own_tables,
        tables_float32=family.tables_float32,
        query_scale=family.query_scale,
        dropout=reader.rate("attention_dropout"),
    )


def _mlp(reader: Reader, family: Decoder) -> Mlp:
    activation = reader.text(family.activation_key, default=family.own.get(family.activation_key, UNSET))
    return Mlp(
        intermediate_size=reader.whole(family.dense_size_key, default=family.own.get(family.dense_size_key, UNSET)),
        gated=family.gated,
        bias=switch(reader, family.mlp_bias),
        activation=family.renamed_activations.get(activation, activation),
        fused_gate_up=family.fused_gate_up,
    )


def readers(family: Mapping[str, Decoder]) -> dict[str, Callable[[Reader], ModelSpec]]:
    """The function that reads a config, for each `model_type` of `family`."""
    return {model_type: partial(read, family=stated) for model_type, stated in family.items()}
