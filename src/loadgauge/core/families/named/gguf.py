"""The header of a GGUF file: the sizes of the model that it holds, and how its matrices are stored (source: ggml, docs/gguf.md)."""

import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from loadgauge.core.base.errors import ConfigError, refuse

FIXED = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Types of a value of fixed size, as `struct` has them."""
TEXT, ARRAY = 8, 9
MOST = 4_000_000
"""Entries of a list, or letters of a text, that a header may have."""
_NAMES = "fp32 bf16 q4_0 q4_1 - - - q8_0 q5_0 q5_1 q2_k q3_k_s q3_k_m q3_k_l q4_k_s q4_k_m q5_k_s q5_k_m q6_k"
FILE_TYPES = dict(enumerate(_NAMES.split())) | {25: "iq4_nl", 30: "iq4_xs", 32: "bf16"}
"""Formats by `general.file_type` (`llama_ftype`); half precision takes 16 bits whichever it is."""
SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Keys of an architecture, and transformers' names of them."""
READ = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""Architectures whose sizes say the whole model, and transformers' types of them."""


class Header(NamedTuple):
    """Holds what a header says: the model's name, transformers' configuration where its sizes say it all, and the format."""

    name: str
    config: dict[str, Any]
    stored: str


def header(file: str) -> Header:
    """Read the header of a file. Raises `ConfigError` for one that is no GGUF file, or is cut."""
    try:
        with open(file, "rb") as content:
            refuse(
                content.read(4) != b"GGUF" or _fixed(content, "I") not in (2, 3),
                "is no GGUF file of version 2 or 3",
                file=file,
            )
            tensors, count = _fixed(content, "Q"), _fixed(content, "Q")
            values = dict(_pairs(content, min(count, MOST)))
            names = {_text(content): _past_tensor(content) for _ in range(min(tensors, MOST))}
    except (struct.error, UnicodeDecodeError, OverflowError):
        raise ConfigError("is a GGUF file whose header is cut", file=file) from None
    kind = str(values.get("general.architecture"))
    sizes = {own: values.get(f"{kind}.{key}") for key, own in SIZES.items()}
    sizes["vocab_size"] = sizes["vocab_size"] or values.get("tokenizer.ggml.tokens")
    experts = values.get(f"{kind}.expert_count")
    config = {"model_type": READ.get(kind), "tie_word_embeddings": bool(names) and "output.weight" not in names}
    if experts:
        whole = (
            {"num_experts": experts} if kind == "qwen3moe" else {"model_type": "mixtral", "num_local_experts": experts}
        )
        config |= whole
    config |= {key: size for key, size in sizes.items() if size is not None}
    name = str(values.get("general.name") or "").strip()
    return Header(name, config if kind in READ else {}, FILE_TYPES.get(values.get("general.file_type", -1), ""))


def _pairs(content: BinaryIO, count: int) -> Iterator[tuple[str, Any]]:
    for _ in range(count):
        yield _text(content), _value(content, _fixed(content, "I"))


def _value(content: BinaryIO, kind: int) -> Any:
    """Return a value; of a list its length, of one whose layers differ too."""
    if kind == TEXT:
        return _text(content)
    if kind != ARRAY:
        return _fixed(content, FIXED.get(kind, "Q"))
    kind, length = _fixed(content, "I"), _fixed(content, "Q")
    for _ in range(min(length, MOST)):
        _value(content, kind)
    return length


def _past_tensor(content: BinaryIO) -> int:
    """Return how many dimensions a tensor has, after reading them, its type and its place."""
    dimensions = int(_fixed(content, "I"))
    content.read(8 * min(dimensions, 8) + 4 + 8)
    return dimensions


def _text(content: BinaryIO) -> str:
    return content.read(min(_fixed(content, "Q"), MOST)).decode()


def _fixed(content: BinaryIO, kind: str) -> Any:
    return struct.unpack(f"<{kind}", content.read(struct.calcsize(f"<{kind}")))[0]
