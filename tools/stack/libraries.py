"""What the libraries ask of CUDA that a simulated device has not: their kernels, by the shapes of their results."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import types
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from loadgauge.pytorch.device.fake import FakeMode
from loadgauge.pytorch.device.kernels import counters
from loadgauge.pytorch.device.patches import replaced
from loadgauge.pytorch.trace.programs import script

os.environ.setdefault("DS_ACCELERATOR", "cuda")  # DeepSpeed would ask PyTorch as it is imported
SEE_CUDA = (
    "transformers", "accelerate", "peft", "trl", "bitsandbytes", "liger_kernel", "deepspeed", "torchao", "galore_torch",
    "apollo_torch", "lomo_optim", "schedulefree", "adam_mini", "torch_optimizer",
)  # fmt: skip
"""Libraries that are to see the device under the name `cuda`."""
_THEIRS = re.compile(rf"-packages/({'|'.join(SEE_CUDA)})/")


@contextlib.contextmanager
def simulated_libraries(gpus: int) -> Iterator[None]:
    """The libraries run as on a node of `gpus` GPUs: they see `cuda`, and their kernels give tensors of the right shape."""
    own = script._is_own_file

    @functools.cache
    def sees(path: str) -> bool:
        return bool(_THEIRS.search(path)) or own(path)

    changes: list[tuple[Any, str, Any]] = [
        (script, "_is_own_file", sees), (counters, "DEVICES", gpus), (torch, "equal", _equal),
        (FakeTensor, "data_ptr", _address), (FakeTensor, "pin_memory", lambda tensor, *_: tensor),
        (FakeTensor, "record_stream", lambda *_: None), (FakeMode, "dispatch", _every_element(FakeMode.dispatch)),
        (torch.UntypedStorage, "data_ptr", _place_of),
        (torch.cuda.nvtx, "range_push", lambda *_: 0), (torch.cuda.nvtx, "range_pop", lambda *_: 0),
    ]  # fmt: skip
    if find_spec("trl") is not None:
        changes += _trl()
    if find_spec("bitsandbytes") is not None:
        changes += _bitsandbytes()
    if find_spec("triton") is not None:
        changes += _triton()
    if find_spec("deepspeed") is not None:
        changes += _deepspeed()
    with replaced(*changes):
        yield


def _address(tensor: Any) -> int:
    """Stands for the address of a tensor: accelerate finds an optimizer's parameters again by it."""
    return int(tensor.untyped_storage()._cdata) + int(tensor.storage_offset())


_REAL_PLACE = torch.UntypedStorage.data_ptr


def _place_of(storage: Any) -> int:
    """Stands for the address of a storage: fake ones are all at 0, and TRL would take every activation for the same one."""
    return _REAL_PLACE(storage) or int(storage._cdata)


def _trl() -> Iterator[tuple[Any, str, Any]]:
    """TRL's activation offloading asks PyTorch which accelerator there is, and leaves what is not on it."""
    from trl.models.activation_offloading import OffloadActivations

    made = OffloadActivations.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.accelerator_type = "cuda"

    yield OffloadActivations, "__init__", init


_REAL_EQUAL = torch.equal


def _equal(one: Any, other: Any) -> bool:
    """Whether tensors are equal; fake ones are (Liger asks whether the gradient of the loss is 1)."""
    return isinstance(one, FakeTensor) or _REAL_EQUAL(one, other)


def _every_element(original: Any) -> Any:
    """A mask of a fake tensor selects every element: rows here are not padded, and no label is left out."""
    nonzero, index = torch.ops.aten.nonzero.default, torch.ops.aten.index.Tensor

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nonzero:
            made = args[0].numel(), args[0].dim()
            return original(self, _EMPTY, (), (made,), {"dtype": torch.int64, "device": args[0].fake_device})
        if func is index and any(one is not None and one.dtype is torch.bool for one in args[1]):
            x, (mask, *_) = args
            made = (mask.numel(), *x.shape[mask.dim() :])
            return original(self, _EMPTY, (), (made,), {"dtype": x.dtype, "device": x.fake_device})
        return original(self, func, types, args, kwargs)

    return dispatch


_EMPTY = torch.ops.aten.empty.memory_format


def _triton() -> Iterator[tuple[Any, str, Any]]:
    """Kernels of Triton write into tensors that Python has made: there is nothing to do."""
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    for kind in (JITFunction, Autotuner, Heuristics):
        yield kind, "run", lambda *_, **__: None


def _deepspeed() -> Iterator[tuple[Any, str, Any]]:
    """DeepSpeed steps: it would ask whether gradients are infinite, and fake ones answer that they are."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    for kind in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        yield kind, "has_overflow", lambda *_, **__: False
    # Its optimizer of the host is a C++ extension, which would be compiled here.
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    for module in (stage_1_and_2, stage3):
        if hasattr(module, "is_invalid_grad_norm"):
            yield module, "is_invalid_grad_norm", lambda *_: False
    # The ranks compare what they hold; there is only this one.
    from deepspeed.runtime.zero import parameter_offload, partition_parameters, partitioned_param_coordinator

    for module in (stage3, parameter_offload, partition_parameters, partitioned_param_coordinator):
        for name in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
            if hasattr(module, name):
                yield module, name, lambda *_, **__: None
    nothing = types.SimpleNamespace(**dict.fromkeys(("create_adam", "adam_update", "destroy_adam"), lambda *_: 0))
    yield CPUAdamBuilder, "load", lambda *_, **__: nothing


def _bitsandbytes() -> Iterator[tuple[Any, str, Any]]:
    """`Params4bit` makes a tensor of its own class of its data, which a fake tensor cannot be; one that is a fake tensor
    takes its place."""
    from bitsandbytes import functional
    from bitsandbytes.nn import modules
    from bitsandbytes.nn.modules import Params4bit

    own = Params4bit.__new__
    fields = (
        "blocksize",
        "compress_statistics",
        "quant_type",
        "quant_state",
        "quant_storage",
        "bnb_quantized",
        "module",
    )

    def made(
        cls: Any, data: Any = None, requires_grad: bool = False, quant_state: Any = None, blocksize: Any = None,
        compress_statistics: bool = True, quant_type: str = "fp4", quant_storage: Any = torch.uint8, module: Any = None,
        bnb_quantized: bool = False, **_: Any,
    ) -> Any:  # fmt: skip
        if not isinstance(data, FakeTensor):
            return own(cls, data, requires_grad, quant_state, blocksize or 64, compress_statistics, quant_type,
                       quant_storage, module, bnb_quantized)  # fmt: skip
        result: Any = data.detach().requires_grad_(requires_grad)
        result.__class__ = fake
        result._is_param = True
        for name, value in (("blocksize", blocksize or 64), ("compress_statistics", compress_statistics),
                            ("quant_type", quant_type), ("quant_state", quant_state), ("module", module),
                            ("quant_storage", quant_storage), ("bnb_quantized", bnb_quantized)):  # fmt: skip
            setattr(result, name, value)
        return result

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type != "meta" and not self.bnb_quantized:
            return Params4bit._quantize(self, device)
        moved = torch.Tensor.to(self, device=device, dtype=dtype)
        return self if moved is self else made(fake, moved, **{name: getattr(self, name) for name in fields})

    namespace = {"_quantize": Params4bit._quantize, "to": to, "__module__": modules.__name__}
    fake: Any = type("Params4bit", (FakeTensor,), namespace)
    yield Params4bit, "__new__", made
    yield functional, "get_paged", _paged
    yield functional, "prefetch_tensor", lambda *_, **__: None
    yield functional, "fill", lambda *_, **__: None


def _paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Any:
    """A state in memory that the driver moves between host and card: PyTorch's allocator does not count it."""
    made: Any = torch.empty(shape, dtype=dtype, device="cpu")
    made.is_paged, made.page_deviceid = True, 0
    return made


def is_four_bit(parameter: nn.Parameter) -> bool:
    """Whether a parameter is one of bitsandbytes' 4-bit ones."""
    return type(parameter).__name__ == "Params4bit"
