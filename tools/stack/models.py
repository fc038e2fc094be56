"""Small models of the families that people fine-tune: every kind of tensor is there, and large enough to be seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stack.case import Case


def config(case: Case) -> Any:
    """The transformers config of a case."""
    import transformers

    name, more = CONFIGS[case.family](case)
    common = {"vocab_size": case.vocab, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return getattr(transformers, name)(**{**common, **more})


def _decoder(case: Case, **more: Any) -> dict[str, Any]:
    heads = max(4, case.hidden // 64)
    return {
        "hidden_size": case.hidden, "intermediate_size": case.hidden * 11 // 4, "num_hidden_layers": case.layers,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2, "max_position_embeddings": 8192,
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _gpt2(case: Case) -> dict[str, Any]:
    return {"n_embd": case.hidden, "n_layer": case.layers, "n_head": case.hidden // 64, "n_positions": 2048,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}  # fmt: skip


def _neox(case: Case) -> dict[str, Any]:
    made = _decoder(case, intermediate_size=4 * case.hidden)
    del made["num_key_value_heads"]
    return made


CONFIGS: dict[str, Callable[[Case], tuple[str, dict[str, Any]]]] = {
    "llama": lambda case: ("LlamaConfig", _decoder(case)),
    "llama-tied": lambda case: ("LlamaConfig", _decoder(case, tie_word_embeddings=True)),
    "mistral": lambda case: ("MistralConfig", _decoder(case, sliding_window=None)),
    "qwen2": lambda case: ("Qwen2Config", _decoder(case)),
    "qwen3": lambda case: ("Qwen3Config", _decoder(case, head_dim=64)),
    "gemma": lambda case: ("GemmaConfig", _decoder(case, head_dim=64, tie_word_embeddings=True)),
    "phi3": lambda case: ("Phi3Config", _decoder(case)),
    "gpt2": lambda case: ("GPT2Config", _gpt2(case)),
    "gpt-neox": lambda case: ("GPTNeoXConfig", _neox(case)),
    "mixtral": lambda case: ("MixtralConfig", _decoder(case, num_local_experts=4, num_experts_per_tok=2,
                                                       sliding_window=None)),
}  # fmt: skip
"""By family: the config class of transformers, and its sizes."""
