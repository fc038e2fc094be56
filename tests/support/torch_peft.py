"""Training steps of transformers' Llama with PEFT's adapters, and with bitsandbytes' 4-bit layers, on the simulated device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from loadgauge.pytorch.trace.programs.script import FunctionJob
from loadgauge.pytorch.trace.trace import Trace, trace

SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BATCH, RANK, BLOCK = 2, 8, 64


class CudaBackend(TorchDispatchMode):
    """bitsandbytes' operator for a product with a 4-bit matrix, in the steps of its CUDA backend for many rows
    (`backends/cuda/ops.py`, `_dequant_linear_fallback`): scales, the matrix in 16 bits, the product."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if str(func) != "bitsandbytes.gemm_4bit.default":
            return func(*args, **kwargs)
        names = [
            "x",
            "packed",
            "shape",
            "scales",
            "block",
            "kind",
            "bias",
            "absmax_8bit",
            "absmax_code",
            "absmax_offset",
        ]
        given = dict(zip(names, args, strict=False)) | kwargs
        x, packed, shape, scales, block, kind = (given[name] for name in names[:6])
        if (codes := given.get("absmax_8bit")) is not None:
            scales = torch.empty_like(codes, dtype=torch.float32) + given["absmax_offset"]
        whole = torch.ops.bitsandbytes.dequantize_4bit(packed, scales, block, kind, list(shape), x.dtype)
        return nn.functional.linear(x, whole, given.get("bias"))


def in_four_bits(child: Any, shape: tuple[int, ...], kind: str, double: bool) -> Any:
    """bitsandbytes' own layer in place of a linear one, whose weights are fake. shape: rows and columns"""
    import bitsandbytes as bnb

    state, packed, (rows, columns) = bnb.functional.QuantState, torch.bfloat16, shape
    with _disable_current_modes():
        new = bnb.nn.Linear4bit(
            columns, rows, bias=child.bias is not None, compute_dtype=packed, compress_statistics=double, quant_type=kind,
            device="meta",
        )  # fmt: skip
    blocks = -(-rows * columns // BLOCK)

    def empty(*shape: int, dtype: Any = torch.float32, where: Any = child.weight.device) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=where)

    nested = {}
    if double:
        outer = state(absmax=empty(-(-blocks // 256)), code=empty(256), blocksize=256, dtype=torch.float32)
        nested = {"offset": empty(), "state2": outer}
    weight: Any = nn.Parameter(empty(-(-rows * columns // 2), 1, dtype=torch.uint8), requires_grad=False)
    weight.quant_state = state(
        absmax=empty(blocks, dtype=torch.uint8 if double else torch.float32), shape=torch.Size(shape),
        code=empty(16), blocksize=BLOCK, quant_type=kind, dtype=packed, **nested,
    )  # fmt: skip
    weight.compress_statistics, weight.quant_type, weight.quant_storage = double, kind, torch.uint8
    new.weight, new.quant_state, new.bias = weight, weight.quant_state, child.bias
    return new


def quantise(model: Any, *, double: bool) -> None:
    """Exchanges the linear layers of the blocks for bitsandbytes' own."""
    for parent in model.model.layers.modules():
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, in_four_bits(child, tuple(child.weight.shape), "nf4", double))
    model.is_loaded_in_4bit, model.quantization_method = True, "bitsandbytes"


def prepared(
    s: int, *, quantised: bool | str, upcast: str, adapters: str, autocast: bool, dropout: float,
    targets: tuple[str, ...], checkpointed: bool, saved: tuple[str, ...], attention: str,
    leaf: bool = True, layers: tuple[int, ...] | None = None, method: peft.PeftConfig | None = None,
) -> Callable[[], Callable[[], None]]:  # fmt: skip
    """A function that builds model, adapters and optimizer, and returns a training step.

    leaf: the first layer's input has a gradient too, as in every other layer
    method: another method of PEFT's than LoRA
    """

    def build() -> Callable[[], None]:
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            config = transformers.LlamaConfig(**SIZES, use_cache=False)
            model: Any = transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention)
            torch.set_default_dtype(torch.float32)
        model.train()
        if quantised:
            quantise(model, double=quantised == "nf4")
        if upcast == "all":
            peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        elif upcast == "norms":
            for name, module in model.named_modules():
                if "norm" in name:
                    module.to(torch.float32)
        how = peft.LoraConfig(
            r=RANK,
            lora_dropout=dropout,
            target_modules=list(targets),
            modules_to_save=list(saved) or None,
            layers_to_transform=None if layers is None else list(layers),
        )
        model = peft.get_peft_model(model, method or how)
        if adapters == "bfloat16":
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.bfloat16)
        if (leaf and layers is None) or checkpointed:  # as Trainer and PEFT's preparation do with checkpointing
            model.enable_input_require_grads()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ids = torch.zeros((BATCH, s), dtype=torch.long, device="cuda")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)

        def step() -> None:
            with CudaBackend() if quantised else contextlib.nullcontext():
                with torch.autocast("cuda", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
                    loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                del loss
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return step

    return build


def traced(s: int, **how: Any) -> Trace:
    """The trace of two such steps."""
    return trace(FunctionJob(prepared(s, leaf=False, **how), "peft"))
