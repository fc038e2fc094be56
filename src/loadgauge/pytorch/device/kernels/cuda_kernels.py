"""CUDA's attention, RMSNorm and autocast, where PyTorch decides by the name of the device.

Registered at the dispatcher, so that the recomputation of a checkpoint inside backward takes the same way. Sources: the
choice of attention kernel is that of ATen/native/transformers/cuda/sdp_utils.cpp, the lists of autocast are those of
ATen/autocast_mode.h, both of PyTorch 2.13.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from loadgauge.pytorch.device.facts.sparse_rows import register_sparse_rows
from loadgauge.pytorch.device.kernels.cuda_ctc import register_cuda_ctc
from loadgauge.pytorch.device.kernels.cuda_packed import register_packed
from loadgauge.pytorch.device.kernels.cuda_rnn import register_cuda_rnn
from loadgauge.pytorch.device.kernels.vision_ops import register_vision

ATTENTION: Counter[str] = Counter()
"""How often each attention kernel was chosen; a trace clears it at its start."""
LARGEST_FLASH_HEAD = 256
HALF = (torch.float16, torch.bfloat16)

LOWER = (
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution"
    " prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot"
    " scaled_dot_product_attention"
)
SINGLE = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor"
    " pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim cosine_similarity"
    " poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss"
    " huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss"
    " multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp"
)
SINGLE_UNLESS_TOLD = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm sum sum.dim_IntList"
)
ONE_KERNEL = ("silu_backward", "mish_backward")
"""Operations that CPU and CUDA have a kernel for, and that PyTorch writes out in several for any other device."""
_KEPT: list[torch.library.Library] = []


def register_cuda_kernels(device: str) -> None:
    """Give a device CUDA's kernels of attention, RMSNorm and activations, and its autocast. Call it once in a process.

    device: its name, registered with PyTorch as PrivateUse1
    """
    library = torch.library.Library("aten", "IMPL")
    _KEPT.append(library)
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", attention, key)
        library.impl("rms_norm", rms_norm, key)
        library.impl("one_hot", one_hot, key)
    for name in ONE_KERNEL:
        library.impl(name, _like_the_gradient, "PrivateUse1")
    register_cuda_rnn(library)
    register_packed(library)
    register_cuda_ctc(library)
    register_sparse_rows(library)
    register_vision(device)
    _register_autocast(library, device)


def _like_the_gradient(grad: Any, x: Any) -> Any:
    """The gradient of an activation's input, by one kernel: it needs no memory but its result's."""
    return torch.empty_like(grad)


def chosen(q: Any, k: Any, v: Any, mask: Any, grouped: bool) -> str:
    """The kernel that CUDA takes for attention: flash, efficient or math.

    Flash wants 16-bit queries, keys and values with one head size up to 256 and no mask; the memory-efficient kernel
    wants as many key heads as query heads and aligned head sizes; both want as many batches of each,
    and that the program has not turned them off (`torch.nn.attention.sdpa_kernel`). (cuDNN, which some GPUs prefer, keeps
    as much as flash to within 100 bytes.)
    """
    heads = q.dim() == 4 and not grouped and {q.shape[1]} != {k.shape[1], v.shape[1]}
    if heads or (q.dim() == 4 and not (q.shape[0] == k.shape[0] == v.shape[0])):  # of which one is repeated
        return "math"
    half = q.dtype in HALF
    sizes = {q.shape[-1], k.shape[-1], v.shape[-1]}
    flash, efficient = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    if flash and half and mask is None and len(sizes) == 1 and q.shape[-1] <= LARGEST_FLASH_HEAD and q.dim() == 4:
        return "flash"
    aligned = all(size % (8 if half else 4) == 0 for size in sizes)
    if efficient and aligned and not grouped and q.dim() == 4 and q.dtype in (*HALF, torch.float32):
        return "efficient"
    return "math"


def attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute `scaled_dot_product_attention` by the kernel that CUDA would choose: flash, efficient or math.

    q, k, v: (batch, heads, positions, head_dim); the other arguments and the result are PyTorch's. Which kernel it was is
    counted in `ATTENTION`. Source: see the top of this file.
    """
    aten = torch.ops.aten
    kernel = chosen(q, k, v, attn_mask, enable_gqa and q.shape[-3] != k.shape[-3])
    ATTENTION[kernel] += 1
    if kernel == "flash":
        width = q.shape[-1]
        short = -width % 8
        if short:
            scale = width**-0.5 if scale is None else scale
            q, k, v = (torch.nn.functional.pad(tensor, (0, short)) for tensor in (q, k, v))
        out = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if short else out
    if kernel == "efficient":
        needs_grad = any(tensor.requires_grad for tensor in (q, k, v))
        mask = None if attn_mask is None else _bias(attn_mask, q, k)
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, mask, needs_grad, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _bias(mask: Any, q: Any, k: Any) -> Any:
    """A mask as the memory-efficient kernel takes it: added to the scores, its rows aligned to 16 elements."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    width = mask.shape[-1]
    short = -width % 16
    if short:
        mask = torch.nn.functional.pad(mask, (0, short))[..., :width]
    return mask.expand(q.size(0), q.size(1), q.size(2), k.size(2))


def one_hot(ids: Any, num_classes: int = -1) -> Any:
    """Compute `torch.nn.functional.one_hot` as CUDA does: zeros, and a 1 for each; on fake tensors PyTorch compares.

    Source: ATen/native/Onehot.cpp.
    """
    size = int(ids.max().item()) + 1 if num_classes < 0 else num_classes
    return ids.new_zeros((*ids.shape, size)).scatter_(-1, ids.unsqueeze(-1), 1)


class FusedRmsNorm(torch.autograd.Function):
    """CUDA's RMSNorm kernel: keeps its input, its weight and one reciprocal root per row, in single precision."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, dims: int) -> torch.Tensor:
        """Return x of any shape, normalized over its last `dims` dimensions; keeps x, the weight and one float32 a row."""
        rows = x.shape[: x.dim() - dims]
        rstd = x.new_empty((*rows, *(1,) * dims), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Return the gradients of x and of the weight, of their shapes and dtypes, and None for `dims`."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def rms_norm(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """Compute `torch.nn.functional.rms_norm` as one kernel, as CUDA does; arguments and result are PyTorch's."""
    return FusedRmsNorm.apply(x, weight, len(normalized_shape))


def fall_through(key: str) -> None:
    """Make operations without a kernel for a dispatch key go on to the next key. key: by PyTorch's name"""
    fallback = torch.library.Library("_", "IMPL", key)
    _KEPT.append(fallback)
    if hasattr(fallback, "fallback"):
        fallback.fallback(torch.library.fallthrough_kernel, key)
    else:  # before PyTorch 2.6 only what it is made of has it
        fallback.m.fallback_fallthrough()  # type: ignore[union-attr]


def _register_autocast(library: torch.library.Library, device: str) -> None:
    fall_through("AutocastPrivateUse1")
    lower = functools.partial(_cast_all, dtype_now=lambda: torch.get_autocast_dtype(device))
    single = functools.partial(_cast_all, dtype_now=lambda: torch.float32)
    for names, policy in ((LOWER, lower), (SINGLE, single), (SINGLE_UNLESS_TOLD, _single_unless_told)):
        for name in names.split():
            packet, _, overload = name.partition(".")
            try:
                op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            except AttributeError:
                continue
            library.impl(name, policy(op, device), "AutocastPrivateUse1")
    _forget_casts(device)


_CASTS: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Weights that autocast has copied to 16 bit; it keeps the copies until its outermost region ends."""


def _forget_casts(device: str) -> None:
    leave = torch.amp.autocast_mode.autocast.__exit__

    def left(self: Any, *error: Any) -> Any:
        result = leave(self, *error)
        if not torch.is_autocast_enabled(device):
            _CASTS.clear()
        return result

    torch.amp.autocast_mode.autocast.__exit__ = left  # type: ignore[method-assign]


def _cast(value: Any, dtype: torch.dtype, device: str) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != device or not value.is_floating_point():
        return value
    if value.dtype in (dtype, torch.float64):
        return value
    weight = value.is_leaf and value.requires_grad and not value._is_view()
    if weight and value.dtype == torch.float32 and torch.is_autocast_cache_enabled():
        if id(value) not in _CASTS:
            _CASTS[id(value)] = (value, value.to(dtype))
        return _CASTS[id(value)][1]
    return value.to(dtype)


def _excluded() -> Any:
    key: Any = torch._C._parse_dispatch_key("AutocastPrivateUse1")
    keys = torch._C.DispatchKeySet(key)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def _cast_all(op: Any, device: str, dtype_now: Callable[[], torch.dtype]) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _excluded():
            dtype = dtype_now()
            args, kwargs = tree_map(lambda value: _cast(value, dtype, device), (args, kwargs))
            return op(*args, **kwargs)

    return kernel


def _single_unless_told(op: Any, device: str) -> Any:
    names = [argument.name for argument in op._schema.arguments]
    position = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _excluded():
            dtype = kwargs.get("dtype") if len(args) <= position else args[position]
            first = args[0]
            if dtype is None and first.is_floating_point() and first.dtype != torch.float64:
                if len(args) > position:
                    args = (*args[:position], torch.float32, *args[position + 1 :])
                else:
                    kwargs = {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    return kernel
