"""Microbenchmarks of one device: matrix products, attention, copies, element-wise operations, optimizers, collectives."""

import contextlib
import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from loadgauge.core.base.errors import refuse
from loadgauge.pytorch.record.flops import formula


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
    """Shapes to time. `matmul`: (m, n, k); `attention`: (b, s, a, d); `elements` of copies; `parameters` of an optimizer;
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
ATTENTION = ("fa2", "cudnn")
"""Kernels of attention that are timed, each also backward (`_backward`)."""
STREAMS = ("copy", "add", "mul", "silu", "gelu")
NORM = "norm"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LONG = {"cuda": 4.0, "cpu": 0.2}
"""Seconds that one product runs over and over, until power and heat have settled."""
REST = 0.2
"""Seconds that a GPU rests before a product, so that it starts cool."""
ENOUGH = 0.05
"""Seconds that the calls of one measurement take together, at least."""


def seconds(call: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Return the seconds of one call: the median of `repeats` rounds, each of as many calls as take long enough to be timed.

    device: `cuda` or `cpu`; on CUDA each round is waited for
    """
    call()
    once = elapsed(call, device)
    count = max(1, min(1000, round(ENOUGH / max(once, 1e-7))))
    return median([elapsed(call, device, count) for _ in range(repeats)]) / count


@contextlib.contextmanager
def join_ranks(device: str) -> Iterator[int]:
    """A context with a process group over the ranks of torchrun, by NCCL on CUDA and gloo on a CPU. Yields the rank; 0 alone."""
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


BUSY = 2 * 2**30
"""Bytes in use on a card above which something else runs there."""


def refuse_busy(device: str, used: float | None = None) -> None:
    """Raise `ConfigError` where another process holds memory of the card: its times would be of two programs.

    used: bytes in use, as the driver counts them; None: asked for
    """
    if used is None:
        if device != "cuda":
            return
        free, whole = torch.cuda.mem_get_info()
        used = whole - free - torch.cuda.memory_reserved()
    refuse(used > BUSY, f"device: {used / 2**30:.1f} GiB of the card are in use; nothing else may run on it meanwhile")


class Saved:
    """The parts of a calibration that are measured already, in a file beside the one that is written: a run goes on from there.

    A file of another device or release of PyTorch is begun anew.
    """

    def __init__(self, path: Path | None, device: str) -> None:
        self.path, self.parts = path, dict[str, list[Timing]]()
        card = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else ""
        self.made = f"{device} {card} {torch.__version__}"
        if path is not None and path.exists():
            try:
                version, parts = msgspec.json.decode(path.read_bytes(), type=tuple[str, dict[str, list[Timing]]])
            except msgspec.DecodeError:
                return
            if version == self.made:
                self.parts = parts

    def add(self, part: str, taken: list[Timing]) -> list[Timing]:
        """Keep what a part took, and return it."""
        self.parts[part] = taken
        if self.path is not None:
            self.path.write_bytes(msgspec.json.encode((self.made, self.parts)))
        return taken

    def done(self) -> None:
        """Remove the file: everything is measured."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def timings(device: str, sizes: Sizes | None = None, saved: Saved | None = None) -> list[Timing]:
    """Time matrix products, attention, copies, norms, launches and updates, in bfloat16 on CUDA and in float32 on a CPU.

    With a process group also collectives, which are measured anew in each run. sizes: of what is timed; None: those of the
    device; saved: where parts are kept that need not be measured again.
    Raises ConfigError where there is no such device, or something else runs on it.
    """
    refuse(device not in ("cpu", "cuda"), f"device: calibrates cpu and cuda, not {device}")
    refuse(device == "cuda" and not torch.cuda.is_available(), "device: there is no CUDA device here")
    refuse_busy(device)
    chosen = sizes or (ON_CUDA if device == "cuda" else ON_CPU)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    parts: dict[str, Callable[[], Iterator[Timing]]] = {
        "products": lambda: _matmul(chosen, device, dtype),
        "sustained": lambda: _sustained(chosen, device, dtype),
        "attention": lambda: _attention(chosen, device, dtype),
        "memory": lambda: _memory(chosen, device, dtype),
        "norms": lambda: _norm(chosen, device, dtype),
        "launch": lambda: _launch(device),
        "optimizer": lambda: _optimizer(chosen, device, dtype),
    }
    if device == "cuda" and torch.cuda.get_device_capability() >= (8, 9):
        parts["fp8"] = lambda: _fp8(chosen)
    kept = saved or Saved(None, device)
    taken = []
    for name, part in parts.items():
        taken += kept.parts[name] if name in kept.parts else kept.add(name, list(part()))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        taken += list(_collectives(chosen, device))
    return taken


def _matmul(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Timing]:
    for m, n, k in sizes.matmul:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
        call = functools.partial(F.linear, a, b)
        call()
        if device == "cuda":
            time.sleep(REST)
            taken = median([elapsed(call, device) for _ in range(9)])
        else:
            taken = seconds(call, device)
        yield Timing("matmul", {"m": m, "n": n, "k": k}, taken, flops=2 * m * n * k)


def _sustained(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Timing]:
    """The largest product, for as long as power and heat take to settle; of that the last half."""
    m, n, k = max(sizes.matmul, key=lambda size: size[0] * size[1] * size[2])
    a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
    call = functools.partial(F.linear, a, b)
    call()
    count = max(2, min(5000, round(LONG[device] / 2 / max(elapsed(call, device), 1e-7))))
    elapsed(call, device, count)
    yield Timing("sustained", {"m": m, "n": n, "k": k}, elapsed(call, device, count) / count, flops=2 * m * n * k)


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
        call = functools.partial(scaled, a8, b8, scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16)
        try:
            yield Timing("matmul-fp8", {"m": m, "n": n, "k": k}, seconds(call, "cuda"), flops=2 * m * n * k)
        except RuntimeError:
            return


def _attention(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Timing]:
    """Causal, by FlashAttention-2 and on CUDA by cuDNN too. FLOPs are those of the pairs that are not masked."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {"fa2": SDPBackend.FLASH_ATTENTION}
    if device == "cuda":
        kernels["cudnn"] = SDPBackend.CUDNN_ATTENTION
    for name, kernel in kernels.items():
        for b, s, a, d in sizes.attention:
            q, k, v = (torch.randn(b, a, s, d, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
            pairs = b * a * s * (s + 1) // 2
            sized = {"b": b, "s": s, "a": a, "d": d}
            forward = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
            try:
                with sdpa_kernel(kernel):
                    ahead = seconds(forward, device)
                    out = forward()
            except RuntimeError:  # this GPU or release has no such kernel
                break
            gradient = torch.randn_like(out)
            backward = functools.partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True)
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
            "add": (functools.partial(torch.add, x, z), 3),
            "mul": (functools.partial(torch.mul, x, z), 3),
            "silu": (functools.partial(F.silu, x), 2),
            "gelu": (functools.partial(F.gelu, x), 2),
        }
        for name, (call, passes) in calls.items():
            yield Timing(name, sized, seconds(call, device), nbytes=passes * x.nbytes)


def _norm(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Timing]:
    """PyTorch's own RMSNorm; bytes are the least it can move: forward two tensors, backward three."""
    if not hasattr(F, "rms_norm"):
        return
    width = 4096 if device == "cuda" else 256
    for count in sizes.elements:
        x = torch.randn(count // width, width, device=device, dtype=dtype, requires_grad=True)
        weight = torch.ones(width, device=device, dtype=dtype, requires_grad=True)
        call = functools.partial(F.rms_norm, x, (width,), weight)
        out = call()
        gradient = torch.randn_like(out)
        back = functools.partial(torch.autograd.grad, out, (x, weight), gradient, retain_graph=True)
        sized = {"elements": count}
        yield Timing(NORM, sized, seconds(call, device), nbytes=2 * x.nbytes)
        yield Timing(f"{NORM}_backward", sized, seconds(back, device), nbytes=3 * x.nbytes)


def _launch(device: str) -> Iterator[Timing]:
    """One element: nothing but the launch."""
    call = functools.partial(torch.ones(1, device=device).add_, 1)
    yield Timing("launch", {"elements": 1}, seconds(call, device))


def _optimizer(sizes: Sizes, device: str, dtype: torch.dtype) -> Iterator[Timing]:
    """Fused AdamW reads weight, gradient and two moments, and writes all but the gradient."""
    weight = torch.zeros(sizes.parameters, device=device, dtype=dtype, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    taken = seconds(optimizer.step, device)
    yield Timing("adamw", {"elements": sizes.parameters}, taken, nbytes=7 * weight.nbytes)


def _collectives(sizes: Sizes, device: str) -> Iterator[Timing]:
    """NCCL's (gloo's) collectives over all ranks; `bytes` are of the full tensor, `nbytes` what one rank sends around a ring."""
    ranks = torch.distributed.get_world_size()
    for kind in COLLECTIVES:
        for payload in sizes.payloads:
            count = max(1, payload // 4 // ranks) * ranks
            whole, part = torch.zeros(count, device=device), torch.zeros(count // ranks, device=device)
            other = torch.empty_like(whole)
            calls: dict[str, Callable[[], Any]] = {
                "all_reduce": functools.partial(torch.distributed.all_reduce, whole),
                "all_gather": functools.partial(torch.distributed.all_gather_into_tensor, whole, part),
                "reduce_scatter": functools.partial(torch.distributed.reduce_scatter_tensor, part, whole),
                "all_to_all": functools.partial(torch.distributed.all_to_all_single, other, whole),
            }
            torch.distributed.barrier()
            try:
                for _ in range(2):
                    calls[kind]()
                # Every rank must make as many calls.
                taken = median([elapsed(calls[kind], device, 5) / 5 for _ in range(5)])
            except RuntimeError:  # gloo has not all of them
                break
            wire = (2 if kind == "all_reduce" else 1) * (ranks - 1) * 4 * count // ranks
            yield Timing(kind, {"bytes": 4 * count, "ranks": ranks}, taken, nbytes=wire)


RERUN = 4 / 5
"""Of the five products that PyTorch counts in the backward of fused attention, the one that makes the scores again is
no model FLOPs."""


class FlopCounter(TorchDispatchMode):
    """Counts what runs in its body, backward included; costs a few microseconds an operation (measured on a CPU: 2 % of a
    step of 0.45 s).

    `hardware`: everything; `model`: without recomputation. What runs in backward with gradients enabled is a checkpoint
    that runs again. `uncounted`: operations that should count, but have no formula.

    >>> a, b = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4)
    >>> with FlopCounter() as counter:
    ...     (a @ b).sum().backward()
    >>> counter.hardware, counter.model
    (96, 96)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hardware = 0
        self.model = 0
        self.uncounted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation and counts it."""
        for kind in types:
            if kind.__name__ == "DTensor":
                return NotImplemented  # its local tensors come by next
        out = func(*args, **(kwargs or {}))
        count = formula(func)
        if isinstance(count, str):
            self.uncounted[count] += 1
        elif count is not None:
            flops = count(args, kwargs, out)
            self.hardware += flops
            if torch._C._current_autograd_node() is None:
                self.model += flops
            elif not torch.is_grad_enabled():
                attention = "attention" in func._opname and "backward" in func._opname
                self.model += round(flops * RERUN) if attention else flops
        return out
