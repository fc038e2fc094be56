"""A GGUF file is answered by its header (ggml, docs/gguf.md), which the test writes by the format's own description."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from tests.support.command_line import document

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families.catalogue import find, model

LLAMA = {
    "block_count": 32, "context_length": 131072, "embedding_length": 4096, "feed_forward_length": 14336,
    "attention.head_count": 32, "attention.head_count_kv": 8,
}  # fmt: skip


def text(words: str) -> bytes:
    return struct.pack("<Q", len(words.encode())) + words.encode()


def value(held: Any) -> bytes:
    if isinstance(held, str):
        return struct.pack("<I", 8) + text(held)
    if isinstance(held, list):
        return struct.pack("<IIQ", 9, 8, len(held)) + b"".join(map(text, held))
    return struct.pack("<II", 4, held) if isinstance(held, int) else struct.pack("<If", 6, held)


def gguf(place: Path, kind: str, sizes: dict[str, Any], *tensors: str, **general: Any) -> str:
    pairs = {"general.architecture": kind} | {f"general.{key}": held for key, held in general.items()}
    pairs |= {key if key.startswith("tokenizer") else f"{kind}.{key}": held for key, held in sizes.items()}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    body = b"".join(text(key) + value(held) for key, held in pairs.items())
    rows = b"".join(text(name) + struct.pack("<IQQIQ", 2, 4096, 4096, 12, 0) for name in tensors)
    place.write_bytes(head + body + rows)
    return str(place)


def test_its_sizes_are_the_model_and_its_type_the_format(tmp_path: Path) -> None:
    tokens = {"tokenizer.ggml.tokens": ["a"] * 128256, "rope.freq_base": 500000.0}
    file = gguf(tmp_path / "mine.gguf", "llama", LLAMA | tokens, "token_embd.weight", "output.weight", file_type=15)
    found = find(file)
    assert parameters(found.spec).total == parameters(model("llama-3.1-8b")).total
    assert found.stored == "q4_k_m"
    answer = document(f"estimate {file} --gpu rtx3090 --task generate --context 8192")
    named = document("estimate llama-3.1-8b --weight-format q4_k_m --gpu rtx3090 --task generate --context 8192")
    assert answer["memory"] == named["memory"]
    tied = gguf(tmp_path / "tied.gguf", "llama", LLAMA | tokens, "token_embd.weight", file_type=7)
    assert parameters(find(tied).spec).total == parameters(model("llama-3.1-8b")).total - 128256 * 4096
    assert find(tied).stored == "q8_0"


def test_experts(tmp_path: Path) -> None:
    """Qwen3-30B-A3B by the sizes that its header has; Mixtral is a llama with experts."""
    sizes = {
        "block_count": 48, "context_length": 40960, "embedding_length": 2048, "feed_forward_length": 6144,
        "attention.head_count": 32, "attention.head_count_kv": 4, "attention.key_length": 128, "expert_count": 128,
        "expert_used_count": 8, "expert_feed_forward_length": 768, "vocab_size": 151936,
    }  # fmt: skip
    file = gguf(tmp_path / "a.gguf", "qwen3moe", sizes, "output.weight", file_type=18)
    assert parameters(find(file).spec).total == parameters(model("qwen3-30b-a3b")).total
    mixed = LLAMA | {"expert_count": 8, "expert_used_count": 2, "vocab_size": 32000}
    file = gguf(tmp_path / "b.gguf", "llama", mixed, "output.weight")
    assert parameters(find(file).spec).total == parameters(model("mixtral-8x7b")).total


def test_another_architecture_is_found_by_its_name(tmp_path: Path) -> None:
    file = gguf(tmp_path / "x.gguf", "gemma3", {"block_count": 48}, name="Gemma 3 12B It", file_type=14)
    assert (find(file).spec.name, find(file).stored) == ("gemma-3-12b", "q4_k_s")
    with pytest.raises(ConfigError, match="names no model"):
        find(gguf(tmp_path / "y.gguf", "brand-new", {"block_count": 4}, name="Mine"))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), b"{}" * 40])
def test_what_is_no_header_is_said_at_once(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="GGUF file"):
        find(str(file))
