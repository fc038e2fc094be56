"""The frozen base of QLoRA: a model's linear layers exchanged by transformers' own loader for bitsandbytes' 4-bit ones."""

import contextlib
import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from loadgauge.core.base.errors import ConfigError, NotModelled, refuse
from loadgauge.pytorch.capture.requests.regime import FOUR_BITS, Regime
from loadgauge.pytorch.device.patches import replaced

BLOCK, OUTER = 64, 256
"""Elements with a scale, and scales with a scale of their own (source: bitsandbytes, `functional.quantize_4bit`)."""


def quantise(module: nn.Module, regime: Regime) -> None:
    """Put the linear layers of a model in 4 bits, those that transformers' or diffusers' loader puts there, and prepare it.

    Of a module of one's own they are all but the last that has parameters, which the loader takes for the head.
    Raises ConfigError without bitsandbytes, NotModelled where there is none to put in 4 bits.
    """
    try:
        import bitsandbytes as bnb
    except ImportError:
        raise ConfigError(
            "4-bit layers of a captured model are bitsandbytes' own: pip install bitsandbytes", key="qlora"
        ) from None
    from transformers import BitsAndBytesConfig, PreTrainedModel
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

    model: Any = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), module)
    kind, double = FOUR_BITS[regime.tuned.base]
    wide = regime.weight == 4 and not regime.autocast
    compute = torch.float32 if wide else torch.bfloat16
    how = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_compute_dtype=compute, bnb_4bit_use_double_quant=double, bnb_4bit_quant_type=kind
    )
    before = dict(model.named_modules())
    with _disable_current_modes(), torch.device("meta"):
        if isinstance(model, PreTrainedModel):
            Bnb4BitHfQuantizer(how, pre_quantized=False).preprocess_model(model=model, device_map=None)
        elif hasattr(module, "register_to_config"):
            theirs = import_module("diffusers.quantizers.bitsandbytes.utils")
            theirs.replace_with_bnb_linear(model, list(model._keep_in_fp32_modules or ()), quantization_config=how)
        else:
            head = list(dict(model.named_parameters()))[-1].rpartition(".")[0]
            replace_with_bnb_linear(model, modules_to_not_convert=[head], quantization_config=how)
    exchanged = {path: layer for path, layer in model.named_modules() if isinstance(layer, bnb.nn.Linear4bit)}
    refuse(not exchanged, f"--qlora of {type(model).__name__}: it has no linear layer beside its last", NotModelled)
    for path, layer in exchanged.items():
        _fill(layer, before[path], regime)
    module.is_loaded_in_4bit = model.is_loaded_in_4bit = True  # type: ignore[assignment]
    _upcast(module, regime)


def _fill(layer: Any, old: Any, regime: Regime) -> None:
    """Give a 4-bit layer weights without values, as they are once they are loaded. old: the layer in its place"""
    import bitsandbytes as bnb

    loaded, state = old.weight, bnb.functional.QuantState
    kind, double = FOUR_BITS[regime.tuned.base]
    dtype = (
        torch.float32 if regime.tuned.loaded == 4 else loaded.dtype
    )  # in which a gradient's product makes the matrix
    rows, columns = int(layer.out_features), int(layer.in_features)
    blocks = math.ceil(rows * columns / BLOCK)

    def empty(*shape: int, dtype: Any = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=loaded.device)

    nested: dict[str, Any] = {}
    if double:
        outer = state(absmax=empty(math.ceil(blocks / OUTER)), code=empty(256), blocksize=OUTER, dtype=torch.float32)
        nested = {"offset": empty(), "state2": outer}
    weight: Any = nn.Parameter(empty((rows * columns + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
    weight.quant_state = layer.quant_state = state(
        absmax=empty(blocks, dtype=torch.uint8 if double else torch.float32),
        shape=torch.Size((rows, columns)),
        code=empty(16),
        blocksize=BLOCK,
        quant_type=kind,
        dtype=dtype,
        **nested,
    )
    weight.compress_statistics, weight.quant_type, weight.quant_storage = double, kind, torch.uint8
    weight.blocksize, weight.bnb_quantized, weight.module = BLOCK, True, layer
    layer.weight = weight
    if old.bias is not None:
        layer.bias = nn.Parameter(old.bias.detach(), requires_grad=False)
    layer.train(old.training)


def _upcast(module: nn.Module, regime: Regime) -> None:
    """Cast to float32 what is to be, as PEFT and others do before training; under FSDP it is read in 16 bits, and marked."""
    upcast = regime.tuned.upcast
    if upcast == "none":
        return
    if not regime.gathered and upcast == "all":
        import peft

        prepare: Any = peft.prepare_model_for_kbit_training
        prepare(module, use_gradient_checkpointing=False)
        return
    for name, part in module.named_modules():
        if upcast == "norms" and "norm" not in name:
            continue
        if not regime.gathered:
            part.to(torch.float32)
            continue
        for parameter in part.parameters():
            if parameter.is_floating_point():
                parameter.held_wide = True


def shape_of(parameter: Any) -> tuple[tuple[int, ...], bool]:
    """The shape of a parameter [elements], of one in 4 bits that of the matrix; and whether it is in 4 bits."""
    state = getattr(parameter, "quant_state", None)
    return tuple(map(int, parameter.shape if state is None else state.shape)), state is not None


def elements(module: nn.Module) -> int:
    """Elements of all parameters of a module, those in 4 bits included."""
    return sum(math.prod(shape_of(parameter)[0]) for parameter in module.parameters())


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """bitsandbytes' product with a 4-bit matrix in the steps that its CUDA backend takes for many rows: scales, matrix, product.

    Its fused kernel, which makes no matrix, is for at most 1,536 rows, and on most cards for far fewer (source: bitsandbytes 0.50,
    `backends/cuda/ops.py`). Releases without the fused operator take these steps themselves. PEFT's DoRA makes the whole matrix
    too: it knows one in 4 bits by the class of its parameter, which tensors without values do not have.
    """
    import bitsandbytes as bnb
    from peft.tuners.lora import dora

    own: Any = torch.ops.bitsandbytes
    plain: Any = vars(dora)["dequantize_module_weight"]
    packet = getattr(own, "gemm_4bit", None)

    def whole_of(layer: Any) -> Any:
        state = getattr(layer, "quant_state", None)  # a copied layer's parameter has none
        return plain(layer) if state is None else bnb.functional.dequantize_4bit(layer.weight.data, state)

    def product(
        x: Any,
        packed: Any,
        shape: Any,
        scales: Any,
        block: int,
        kind: str,
        bias: Any = None,
        absmax_8bit: Any = None,
        absmax_code: Any = None,
        absmax_offset: Any = None,
    ) -> Any:
        if absmax_8bit is not None:
            scales = own.dequantize_blockwise.default(absmax_8bit, scales, absmax_code, OUTER, torch.float32)
            scales = scales + absmax_offset
        whole = own.dequantize_4bit.default(packed, scales, block, kind, list(shape), x.dtype)
        return nn.functional.linear(x, whole, bias)

    changes = [(dora, "dequantize_module_weight", whole_of)]
    with replaced(*changes, *([] if packet is None else [(packet, "default", product)])):
        yield
