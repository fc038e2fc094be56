"""Microbenchmarks of one device: matrix products, attention, copies, element-wise operations, optimizers, collectives."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch.nn import functional as F

from loadgauge.errors import ConfigError


class Timing(msgspec.Struct, frozen=True):
    """Seconds of one call, the median of several. `sizes` by letter: m n k of a product; b s a d of attention (sequences,
    tokens, heads, channels of each); elements; bytes and ranks of a collective."""

    kind: str
    sizes: dict[str, int]
    seconds: float
    flops: int = 0
    nbytes: int = 0

    @property
    def name(self) -> str:
        """Kind and sizes, as in `matmul m=128 n=128 k=64`."""
        return " ".join([self.kind, *(f"{letter}={size}" for letter, size in self.sizes.items())])


class Sizes(msgspec.Struct, frozen=True):
    """What to time. `matmul`: (m, n, k); `attention`: (b, s, a, d); `elements` of copies; `parameters` of an optimizer;
    `payloads` of collectives [bytes]."""

    matmul: tuple[tuple[int, int, int], ...]
    attention: tuple[tuple[int, int, int, int], ...]
    elements: tuple[int, ...]
    parameters: int
    payloads: tuple[int, ...]


ON_CUDA = Sizes(
    matmul=tuple((m, n, k) for m in (2048, 4096, 8192, 8208) for n, k in (
        (4096, 4096), (14336, 4096), (4096, 14336), (12288, 12288), (8192, 128), (8192, 512), (1024, 1024),
    )),
    attention=((1, 4096, 32, 128), (4, 2048, 32, 128), (1, 16384, 16, 128), (8, 1024, 16, 64)),
    elements=(2**26, 2**28), parameters=2**28, payloads=(2**14, 2**20, 2**24, 2**28),
)  # fmt: skip
ON_CPU = Sizes(
    matmul=((256, 256, 256), (512, 512, 512), (512, 256, 64), (1024, 512, 512)),
    attention=((1, 256, 4, 64), (2, 128, 4, 64)), elements=(2**20, 2**22), parameters=2**20,
    payloads=(2**10, 2**16, 2**20),
)  # fmt: skip
ENOUGH = 0.05
"""Seconds that the calls of one measurement take together, at least."""


def seconds(call: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Seconds of one call: the median of `repeats` rounds, each of as many calls as take long enough to be timed."""
    call()
    once = elapsed(call, device)
    count = max(1, min(1000, round(ENOUGH / max(once, 1e-7))))
    return median([elapsed(call, device, count) for _ in range(repeats)]) / count


@contextlib.contextmanager
def join_ranks(device: str) -> Iterator[int]:
    """A process group over the ranks of torchrun, by NCCL on CUDA and gloo on a CPU; gives the rank, 0 without one."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield 0
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield torch.distributed.get_rank()
    finally:
        torch.distributed.destroy_process_group()


def median(values: Sequence[float]) -> float:
    """The median; of an even number of values the upper of the two in the middle."""
    return sorted(values)[len(values) // 2]


def elapsed(call: Callable[[], Any], device: str, count: int = 1) -> float:
    """The time that `count` calls take together, with all that they put on the GPU [s]."""
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def timings(device: str, sizes: Sizes | None = None) -> list[Timing]:
    """Times everything, in bfloat16 on CUDA and in float32 on a CPU. Raises ConfigError where there is no such device."""
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device: calibrates cpu and cuda, not {device}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: there is no CUDA device here")
    chosen = sizes or (ON_CUDA if device == "cuda" else ON_CPU)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    parts: list[Iterator[Timing]] = [
        _matmul(chosen, device, dtype), _attention(chosen, device, dtype), _memory(chosen, device, dtype),
        _launch(device), _optimizer(chosen, device, dtype),
    ]  # fmt: skip
    if device == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        parts.append(_fp8(chosen))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        parts.append(_collectives(chosen, device))
    return [timing for part in parts for timing in part]


def _matmul(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Timing]:
    for m, n, k in sizes.matmul:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
        taken = seconds(functools.partial(F.linear, a, b), device)
        yield Timing("matmul", {"m": m, "n": n, "k": k}, taken, flops=2 * m * n * k)


def _fp8(sizes: Sizes) -> Iterator[Timing]:
    """Products in 8 bits with one scale a tensor; nothing where this GPU or release has none."""
    scaled: Any = getattr(torch, "_scaled_mm", None)
    unit = torch.ones((), device="cuda")
    for m, n, k in sizes.matmul:
        if scaled is None or m % 16 or n % 16 or k % 16:
            continue
        a, b = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        del a, b

        def call(a8: Any = a8, b8: Any = b8) -> Any:
            return scaled(a8, b8, scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16)

        try:
            yield Timing("matmul-fp8", {"m": m, "n": n, "k": k}, seconds(call, "cuda"), flops=2 * m * n * k)
        except RuntimeError:
            return


def _attention(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Timing]:
    """Causal, by FlashAttention-2 and on CUDA by cuDNN too. FLOPs are those of the pairs that are not masked."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {"flash2": SDPBackend.FLASH_ATTENTION}
    if device == "cuda":
        kernels["attention"] = SDPBackend.CUDNN_ATTENTION
    for name, kernel in kernels.items():
        for b, s, a, d in sizes.attention:
            q, k, v = (torch.randn(b, a, s, d, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
            pairs = b * a * s * (s + 1) // 2
            sized = {"b": b, "s": s, "a": a, "d": d}

            def forward(q: Any = q, k: Any = k, v: Any = v) -> Any:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

            try:
                with sdpa_kernel(kernel):
                    ahead = seconds(forward, device)
                    out = forward()
            except RuntimeError:  # this GPU or release has no such kernel
                break
            gradient = torch.randn_like(out)

            def backward(out: Any = out, inputs: Any = (q, k, v), gradient: Any = gradient) -> Any:
                return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

            yield Timing(name, sized, ahead, flops=4 * pairs * d)
            # Five products, one of them the scores again.
            yield Timing(f"{name}_backward", sized, seconds(backward, device), flops=10 * pairs * d)


def _memory(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Timing]:
    for count in sizes.elements:
        x, y = torch.randn(count, device=device, dtype=dtype), torch.empty(count, device=device, dtype=dtype)
        sized = {"elements": count}
        yield Timing("copy", sized, seconds(functools.partial(y.copy_, x), device), nbytes=2 * x.nbytes)
        z = torch.randn_like(x)
        calls: dict[str, tuple[Callable[[], Any], int]] = {
            "add": (functools.partial(torch.add, x, z), 3), "mul": (functools.partial(torch.mul, x, z), 3),
            "silu": (functools.partial(F.silu, x), 2), "gelu": (functools.partial(F.gelu, x), 2),
        }  # fmt: skip
        for name, (call, passes) in calls.items():
            yield Timing(name, sized, seconds(call, device), nbytes=passes * x.nbytes)


def _launch(device: str) -> Iterator[Timing]:
    """One element: nothing but the launch."""
    x = torch.ones(1, device=device)
    yield Timing("launch", {"elements": 1}, seconds(lambda: x.add_(1), device))


def _optimizer(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Timing]:
    """Fused AdamW reads weight, gradient and two moments, and writes all but the gradient."""
    weight = torch.zeros(sizes.parameters, device=device, dtype=dtype, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    taken = seconds(optimizer.step, device)
    yield Timing("adamw", {"elements": sizes.parameters}, taken, nbytes=7 * weight.nbytes)


def _collectives(sizes: Sizes, device: str) -> Iterator[Timing]:
    """All-reduce over all ranks; `nbytes` are what one rank sends around a ring."""
    ranks = torch.distributed.get_world_size()
    for payload in sizes.payloads:
        x = torch.zeros(payload // 4, device=device)

        def call(x: Any = x) -> None:
            torch.distributed.all_reduce(x)

        torch.distributed.barrier()
        for _ in range(2):
            call()
        # Every rank must make as many calls.
        taken = median([elapsed(call, device, 5) / 5 for _ in range(5)])
        wire = 2 * (ranks - 1) * payload // ranks
        yield Timing("all_reduce", {"bytes": payload, "ranks": ranks}, taken, nbytes=wire)
