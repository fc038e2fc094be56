"""Small models of transformers' own classes, and what loadgauge makes of their configs."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import torch
import transformers
from torch import nn

from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.training import Training, training
from loadgauge.core.families.hf import from_dict
from loadgauge.core.layers import View
from torch_kept import Storages, addresses, keeping, owned, total

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 512,
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


class Case(msgspec.Struct, frozen=True):
    """A family: transformers' config class and model class, and the keys that matter."""

    config: str
    model: str
    keys: dict[str, Any]


CASES = {
    "llama-gqa": Case("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}),
    "llama-mha": Case("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama-mqa": Case("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 1, "attention_bias": True}),
    "mistral": Case("MistralConfig", "MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": Case("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 2}),
    "qwen3": Case("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 32}),
    "phi3": Case("Phi3Config", "Phi3ForCausalLM", {"num_key_value_heads": 2, **TOKENS}),
    "gemma": Case("GemmaConfig", "GemmaForCausalLM", {"num_key_value_heads": 2, "head_dim": 32}),
    "gemma2": Case("Gemma2Config", "Gemma2ForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}),
    "gemma3": Case("Gemma3TextConfig", "Gemma3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}),
    "gpt-neox": Case("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "gpt-neox-serial": Case("GPTNeoXConfig", "GPTNeoXForCausalLM", {"use_parallel_residual": False}),
    "opt": Case("OPTConfig", "OPTForCausalLM", {"ffn_dim": 112, "word_embed_proj_dim": 64}),
    "opt-350m": Case(
        "OPTConfig", "OPTForCausalLM", {"ffn_dim": 112, "word_embed_proj_dim": 32, "do_layer_norm_before": False}
    ),
    "gpt2": Case("GPT2Config", "GPT2LMHeadModel", {}),
    "gpt2-gelu": Case("GPT2Config", "GPT2LMHeadModel", {"activation_function": "gelu"}),
    "bert": Case("BertConfig", "BertForMaskedLM", {}),
    "roberta": Case("RobertaConfig", "RobertaForMaskedLM", {}),
    "xlm-roberta-xl": Case("XLMRobertaXLConfig", "XLMRobertaXLForMaskedLM", {}),
    "modernbert": Case("ModernBertConfig", "ModernBertForMaskedLM", {"local_attention": 64, **TOKENS}),
}
NO_SDPA = {"gemma2"}
"""transformers has no fused attention for scores that pass through tanh."""
DROPOUTS = (
    "attention_dropout", "hidden_dropout", "dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "mlp_dropout",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "embedding_dropout",
)  # fmt: skip
RENAMED = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}


class Built(msgspec.Struct):
    """A model and the spec of its config."""

    model: nn.Module
    config: Any
    spec: ModelSpec
    attention: str
    dtype: torch.dtype

    @property
    def precision(self) -> str:
        """What loadgauge calls training in this dtype."""
        return "fp32" if self.dtype == torch.float32 else "bf16-pure"

    def training(self, precision: str = "", optimizer: str = "adamw") -> Training:
        """How loadgauge is told to train it."""
        attention = {"sdpa": "flash"}.get(self.attention, self.attention)
        how = training("huggingface", precision or self.precision, optimizer, attention=attention)
        # A CPU's fused attention takes float32 with fewer key heads than heads.
        return msgspec.structs.replace(how, kernels=msgspec.structs.replace(how.kernels, writes_groups=False))

    def view(self, s: int, b: int, precision: str = "") -> View:
        """One micro-batch of it."""
        return View.of(s, b, kernels=self.training(precision).kernels)

    @property
    def layers(self) -> nn.ModuleList:
        """Its blocks."""
        count = self.config.num_hidden_layers
        found = (m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
        return next(found)

    def ids(self, s: int, b: int) -> torch.Tensor:
        """Token ids without padding."""
        return torch.randint(3, self.config.vocab_size, (b, s))


def build(name: str, attention: str, dtype: torch.dtype, dropout: float = 0.0, **keys: Any) -> Built:
    """A small model of a family in training mode, every dropout of it at one probability."""
    case = CASES[name]
    values = {**SIZES, **case.keys, **keys}
    if case.config == "GPT2Config":
        values = {RENAMED.get(key, key): value for key, value in values.items() if key != "intermediate_size"}
        values["n_positions"] = values.pop("max_position_embeddings")
    cls = getattr(transformers, case.config)
    values.update((key, dropout) for key in DROPOUTS if hasattr(_default(case.config), key))
    config = cls(**values)
    config._attn_implementation = attention
    config.use_cache = False
    model = getattr(transformers, case.model)(config).to(dtype).train()
    return Built(model, config, from_dict(config.to_dict()), attention, dtype)


@functools.cache
def _default(config: str) -> Any:
    return getattr(transformers, config)()


def block_kept(built: Built, position: int, s: int, b: int, context: Any = None) -> int:
    """Bytes that one block of the model keeps, beside parameters and the rotary tables that all blocks share."""
    own: set[int] = owned(built.model)
    seen: list[Storages] = []
    scope: list[Any] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own.update(addresses(kwargs.get("position_embeddings") or ()))
        scope.append(keeping(own))
        seen.append(scope[-1].__enter__())

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        scope.pop().__exit__(None, None, None)

    layer = built.layers[position]
    handles = layer.register_forward_pre_hook(enter, with_kwargs=True), layer.register_forward_hook(leave)
    ids = built.ids(s, b)
    result = built.model(ids, labels=ids) if context is None else _under(context, built, ids)
    count = total(seen[0])
    for handle in handles:
        handle.remove()
    del result
    return count


def _under(context: Any, built: Built, ids: torch.Tensor) -> Any:
    with context:
        return built.model(ids, labels=ids)
