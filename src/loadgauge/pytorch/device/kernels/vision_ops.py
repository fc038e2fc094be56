"""torchvision's own operators on the simulated device: non-maximum suppression, pooling of regions, deformable convolution.

What each allocates and keeps for backward is that of its CUDA kernel. How many boxes non-maximum suppression leaves is data,
and so stated (`stated_rows`). The operators' names and arguments are torchvision's; where its compiled part cannot be loaded, such
as that of a CUDA build beside PyTorch for CPUs, they are declared here: nothing is computed.
Sources: torchvision/csrc/ops/cuda and torchvision/csrc/ops/autograd of torchvision 0.28.
"""

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from loadgauge.core.base.errors import ConfigError, first_line

_REGIONS = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_OF_INPUT = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_POOLED = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_DEFORMED = (
    "SymInt stride_h, SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups,"
    " SymInt offset_groups, bool use_mask"
)
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_REGIONS}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_POOLED}, {_OF_INPUT}, int sampling_ratio, bool aligned) -> Tensor",
    f"roi_pool({_REGIONS}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_POOLED}, {_OF_INPUT}) -> Tensor",
    f"ps_roi_align({_REGIONS}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOLED}, int sampling_ratio, {_OF_INPUT})"
    " -> Tensor",
    f"ps_roi_pool({_REGIONS}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor channel_mapping, {_POOLED}, {_OF_INPUT}) -> Tensor",
    f"deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, {_DEFORMED}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, {_DEFORMED})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
WORD = 64
"""Boxes whose overlaps with another are one number of non-maximum suppression's mask."""
AT_ONCE = 32
"""Pictures that a deformable convolution unfolds at once, at most."""
_KEPT: list[torch.library.Library] = []


def torchvision() -> ModuleType:
    """The package, also where its compiled part cannot be loaded. Raises ConfigError where it cannot be imported.

    The operators that it then lacks are declared in this process, without anything that could compute them.
    """
    try:
        library = importlib.import_module("torchvision")
    except (ImportError, RuntimeError, AttributeError) as error:
        if "torchvision::" not in str(error):
            raise ConfigError(f"torchvision cannot be imported: {first_line(error)[:200]}") from None
        for name in [
            module_name for module_name in sys.modules if module_name.partition(".")[0] == "torchvision"
        ]:  # half imported
            del sys.modules[name]
        _declare()
        try:
            library = importlib.import_module("torchvision")
        except (ImportError, RuntimeError, AttributeError) as second:
            raise ConfigError(f"torchvision cannot be imported: {first_line(second)[:200]}") from None
    if hasattr(library, "extension") and not library.extension._has_ops():
        _declare()
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "torchvision" and hasattr(module, "_has_ops"):
                module._has_ops = lambda: True  # type: ignore[attr-defined]
    return library


def operators() -> None:
    """Have `torch.ops.torchvision`: its own where it is installed, else declared here. Raises ConfigError as `torchvision`."""
    if find_spec("torchvision") is None:
        _declare()
    else:
        torchvision()


def _declare() -> None:
    """Declare torchvision's operators, and the shapes of what they make."""
    if hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    _KEPT.append(library)
    for schema in SCHEMAS:
        library.define(schema)
    for name, shapes in _SHAPES.items():
        library.impl(name, shapes, "Meta")


def _pooled(input: Any, rois: Any, scale: Any, height: Any, width: Any, *_: Any) -> Any:
    return input.new_empty((rois.shape[0], input.shape[1], height, width))


def _with_places(input: Any, rois: Any, scale: Any, height: Any, width: Any, *_: Any) -> Any:
    pooled = _pooled(input, rois, scale, height, width)
    return pooled, pooled.new_empty(pooled.shape, dtype=torch.int32)


def _by_position(input: Any, rois: Any, scale: Any, height: Any, width: Any, *_: Any) -> Any:
    pooled = input.new_empty((rois.shape[0], input.shape[1] // (height * width), height, width))
    return pooled, pooled.new_empty(pooled.shape, dtype=torch.int32)


def _deformed(input: Any, weight: Any, offset: Any, *_: Any) -> Any:
    return input.new_empty((input.shape[0], weight.shape[0], *offset.shape[-2:]))


def _deformed_backward(grad: Any, *arguments: Any) -> Any:
    return tuple(tensor.new_empty(tensor.shape) for tensor in arguments[:5])


def _gradient_of_input(first: int) -> Any:
    """The shape of a gradient of four sizes, of which `first` is the place among the arguments."""
    return lambda grad, *arguments: grad.new_empty(tuple(arguments[first : first + 4]))


_SHAPES: dict[str, Any] = {
    "roi_align": _pooled,
    "_roi_align_backward": _gradient_of_input(4),
    "roi_pool": _with_places,
    "_roi_pool_backward": _gradient_of_input(5),
    "ps_roi_align": _by_position,
    "_ps_roi_align_backward": _gradient_of_input(6),
    "ps_roi_pool": _by_position,
    "_ps_roi_pool_backward": _gradient_of_input(5),
    "deform_conv2d": _deformed,
    "_deform_conv2d_backward": _deformed_backward,
}


def nms(dets: Any, scores: Any, iou_threshold: float) -> Any:
    """Compute `torchvision.ops.nms` as CUDA's kernel does: the places of the boxes that are left.

    It sorts, compares every box with every other one, a bit for each pair, and takes out what is left. dets: (boxes, 4), scores:
    (boxes,)
    """
    order = scores.sort(stable=True, dim=0, descending=True)[1]
    ordered = dets.index_select(0, order)
    boxes = dets.shape[0]
    overlaps = dets.new_empty((boxes * ((boxes + WORD - 1) // WORD),), dtype=torch.int64)
    left = torch.empty_like(scores, dtype=torch.bool)  # of unknown values
    kept = order.masked_select(left)
    del ordered, overlaps
    return kept


class Pool(torch.autograd.Function):
    """Any pooling of regions: keeps the boxes, and where there is one its second result, which says what was taken."""

    @staticmethod
    def forward(ctx: Any, input: Any, rois: Any, name: str, arguments: tuple[Any, ...]) -> Any:
        """Return what the operator `name` does. input: (pictures, channels, height, width), rois: (boxes, 5)"""
        with torch._C._AutoDispatchBelowAutograd():
            result = getattr(torch.ops.torchvision, name)(input.contiguous(), rois.contiguous(), *arguments)
        several = isinstance(result, tuple | list)
        ctx.save_for_backward(rois, *(result[1:] if several else ()))
        ctx.sizes, ctx.operator, ctx.given = tuple(input.shape), name, arguments
        if not several:
            return result
        ctx.mark_non_differentiable(result[1])
        return tuple(result)

    @staticmethod
    def backward(ctx: Any, grad: Any, *_: Any) -> Any:
        """Return the gradient of the input."""
        scale, height, width, *more = ctx.given
        last = (*more, *ctx.sizes) if ctx.operator == "ps_roi_align" else (*ctx.sizes, *more)
        backward = getattr(torch.ops.torchvision, f"_{ctx.operator}_backward")
        return backward(grad, *ctx.saved_tensors, scale, height, width, *last), None, None, None


class Deform(torch.autograd.Function):
    """Deformable convolution: keeps all that it reads."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """Return the convolution; arguments: as `torchvision.ops.deform_conv2d`'s operator takes them."""
        tensors, ctx.given = arguments[:5], arguments[5:]
        ctx.save_for_backward(*tensors)
        input, weight, offset = tensors[:3]
        columns = _columns(input, weight, offset)
        with torch._C._AutoDispatchBelowAutograd():
            result = torch.ops.torchvision.deform_conv2d(*(tensor.contiguous() for tensor in tensors), *ctx.given)
        beside = [torch.empty_like(result) for _ in range(2)]  # the bias is added to a copy of a copy
        del columns, beside
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Return the gradients of the input, the weight, the offsets, the mask and the bias."""
        input, weight, offset, *more = ctx.saved_tensors
        columns = _columns(input, weight, offset)
        gradients = torch.ops.torchvision._deform_conv2d_backward(grad, input, weight, offset, *more, *ctx.given)
        del columns
        return (*gradients, *(None for _ in ctx.given))


def _columns(input: Any, weight: Any, offset: Any) -> Any:
    """The unfolded inputs of as many pictures as are unfolded at once: the greatest divisor of all that is at most `AT_ONCE`."""
    pictures = input.shape[0]
    together = next((number for number in range(min(AT_ONCE, int(pictures)), 0, -1) if int(pictures) % number == 0), 1)
    return input.new_empty(
        (input.shape[1] * weight.shape[2] * weight.shape[3], together * offset.shape[2] * offset.shape[3])
    )


def register_vision(device: str) -> None:
    """Give the simulated device torchvision's operators, whether it is imported yet or never. Call it once in a process."""
    library = torch.library.Library("torchvision", "IMPL")
    _KEPT.append(library)
    key, cast = "AutogradPrivateUse1", "AutocastPrivateUse1"
    library.impl("nms", nms, key)
    for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"):
        library.impl(name, _pool(name), key)
        library.impl(name, _in_single(name, device), cast)
    library.impl("deform_conv2d", lambda *arguments: Deform.apply(*arguments), key)
    for name in ("nms", "deform_conv2d"):
        library.impl(name, _in_single(name, device), cast)


def _pool(name: str) -> Any:
    return lambda input, rois, *arguments: Pool.apply(input, rois, name, arguments)


def _in_single(name: str, device: str) -> Any:
    """Under autocast: in single precision, and back to the precision of the first argument."""

    def run(first: Any, *arguments: Any) -> Any:
        keys = torch._C.DispatchKeySet(torch._C._parse_dispatch_key("AutocastPrivateUse1"))  # type: ignore[arg-type]
        with torch._C._ExcludeDispatchKeyGuard(keys):
            result = getattr(torch.ops.torchvision, name)(*(_single(argument) for argument in (first, *arguments)))
            if name == "nms":
                return result
            return (
                result.to(first.dtype)
                if isinstance(result, torch.Tensor)
                else tuple(tensor.to(first.dtype) for tensor in result)
            )

    return run


def _single(value: Any) -> Any:
    cast = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    return value.float() if cast else value
