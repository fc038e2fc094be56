"""Small models of transformers' hybrid classes, and what PyTorch keeps and computes in each of their layers."""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import msgspec
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import stand_ins
from loadgauge.core.definitions.model.kernels import Dtypes
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.frameworks import TRANSFORMERS
from loadgauge.core.families.hf import from_dict
from loadgauge.core.layers import View, block_layer
from loadgauge.core.layers.operations.operations import Layer
from recorded import FORMULAS

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_chunk_size": 32,
}  # fmt: skip
NEMOTRON = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 24, "n_groups": 2, "chunk_size": 32,
    "pad_token_id": 0,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 16,
    "head_dim": 16, "num_hidden_layers": 4,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
MIXED = {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 80}
MAMBA = {"vocab_size": 96, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "pad_token_id": 0}
PERIOD = {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 6}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "mamba2",
        {
            "vocab_size": 96, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2,
            "chunk_size": 32, "num_hidden_layers": 2, "pad_token_id": 0,
        },
    ),
    "mamba2, biased": (
        "mamba2",
        {
            "vocab_size": 96, "hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 4,
            "chunk_size": 16, "num_hidden_layers": 1, "pad_token_id": 0, "use_bias": True, "use_conv_bias": False,
            "residual_in_fp32": False,
        },
    ),
    "bamba": ("bamba", {**SIZES, **MAMBA2, "attn_layer_indices": [1]}),
    "granite": ("granitemoehybrid", {**SIZES, **MAMBA2, **MIXED, "num_local_experts": 0}),
    "granite, experts": ("granitemoehybrid", {**SIZES, **MAMBA2, **MIXED, "num_local_experts": 4}),
    "falcon": ("falcon_h1", {**SIZES, **MAMBA2, "mamba_d_ssm": 128, "num_hidden_layers": 1}),
    "falcon, norm": (
        "falcon_h1",
        {
            **SIZES, **MAMBA2, "mamba_d_ssm": 128, "num_hidden_layers": 1, "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
    ),
    "nemotron": ("nemotron_h", {**NEMOTRON, "hybrid_override_pattern": "M*-"}),
    "nemotron, experts": (
        "nemotron_h",
        {
            **NEMOTRON, **EXPERTS, "hybrid_override_pattern": "E", "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 80,
        },
    ),
    "qwen3-next": ("qwen3_next", {**SIZES, **DELTA, "num_experts": 0}),
    "qwen3-next, experts": (
        "qwen3_next", {**SIZES, **DELTA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 80},
    ),
    "qwen3.5": ("qwen3_5_text", {**SIZES, **DELTA}),
    "qwen3.5, experts": (
        "qwen3_5_moe_text", {**SIZES, **DELTA, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 80},
    ),
    "lfm2": ("lfm2", {**SIZES, "full_attn_idxs": [1]}),
    "lfm2, biased": ("lfm2", {**SIZES, "full_attn_idxs": [1], "conv_bias": True, "conv_L_cache": 4}),
    "lfm2, experts": (
        "lfm2_moe",
        {**SIZES, **EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 4},
    ),
    "mamba": ("mamba", {**MAMBA, "tie_word_embeddings": False}),
    "mamba, biased": ("mamba", {**MAMBA, "use_bias": True, "use_conv_bias": False, "residual_in_fp32": False}),
    "falcon mamba": ("falcon_mamba", {**MAMBA, "time_step_rank": 6}),
    "jamba": ("jamba", {**SIZES, **PERIOD, "num_experts": 1}),
    "jamba, experts": ("jamba", {**SIZES, **PERIOD, "num_experts": 4}),
    "minimax": ("minimax", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 32}),
}  # fmt: skip
"""By name: the model_type, and the keys of a small config."""

CLASSES = {
    "bamba": "BambaForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "jamba": "JambaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


class _Held:
    """Stands for a saved tensor as long as its graph lives."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Hybrid:
    """A small model; `fused` puts stand-ins in the place of the GPU kernels that its module would call."""

    def __init__(self, name: str, dtype: torch.dtype, attention: str = "sdpa", patch: Any = None) -> None:
        model_type, keys = CASES[name]
        self.dtype, self.attention, self.fused = dtype, attention, patch is not None
        self.spec: ModelSpec = from_dict({"model_type": model_type, **keys})
        config = transformers.AutoConfig.for_model(model_type, **keys)
        config.use_cache = False
        config._attn_implementation = "eager" if "mamba" in model_type else attention
        if "experts" in name or model_type == "minimax":
            config._experts_implementation = "grouped_mm"
        if patch is not None:
            folder = model_type.removesuffix("_text")
            module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
            for kernel, function in stand_ins.KERNELS.items():
                if hasattr(module, kernel):
                    patch.setattr(module, kernel, function)
        self.model = getattr(transformers, CLASSES[model_type])(config).to(dtype).train()
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        for key, buffer in self.model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.data = buffer.data.float()  # as transformers loads it, whatever the dtype
        self.vocabulary = config.vocab_size

    @property
    def layers(self) -> nn.ModuleList:
        """Its blocks."""
        lists = (module for module in self.model.modules() if isinstance(module, nn.ModuleList))
        return next(found for found in lists if len(found) == len(self.spec.pattern))

    def listed(self, position: int, s: int, b: int) -> Layer:
        """The list of one of its blocks."""
        kernels = msgspec.structs.replace(
            TRANSFORMERS,
            attention="flash" if self.attention == "sdpa" else "eager",
            recurrence="fused" if self.fused else "reference",
            writes_groups=False,  # a CPU's fused attention takes float32 with fewer key heads than heads
            dtypes=Dtypes(activation=self.dtype.itemsize),
        )
        block = self.spec.blocks[self.spec.pattern[position]]
        return block_layer(block, self.spec.hidden_size, View.of(s, b, kernels=kernels))

    def measured(self, s: int, b: int) -> list[tuple[int, int]]:
        """For each block: bytes that its graph holds after the forward, and FLOPs of its forward."""
        owned = {t.untyped_storage()._cdata for t in (*self.model.parameters(), *self.model.buffers())}
        held: list[list[weakref.ref[_Held]]] = []
        scopes: list[Any] = []
        counts: list[int] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            owned.update(t.untyped_storage()._cdata for t in kwargs.get("position_embeddings") or ())
            mine: list[weakref.ref[_Held]] = []
            held.append(mine)

            def pack(tensor: torch.Tensor) -> _Held:
                one = _Held(tensor)
                mine.append(weakref.ref(one))
                return one

            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor)
            scopes[:] = [hooks, FlopCounterMode(display=False, custom_mapping=FORMULAS)]
            for scope in scopes:
                scope.__enter__()

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            counts.append(scopes[1].get_total_flops())
            for scope in reversed(scopes):
                scope.__exit__(None, None, None)

        for layer in self.layers:
            layer.register_forward_pre_hook(enter, with_kwargs=True)
            layer.register_forward_hook(leave)
        ids = torch.randint(3, self.vocabulary, (b, s))
        result = self.model(ids, labels=ids)
        gc.collect()  # what nothing leads to any more, such as the last state, is not kept
        kept = []
        for mine in held:
            storages = [one.tensor.untyped_storage() for reference in mine if (one := reference()) is not None]
            kept.append(sum({x._cdata: x.nbytes() for x in storages if x._cdata not in owned}.values()))
        del result
        return list(zip(kept, counts, strict=True))
