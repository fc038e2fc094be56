"""Training steps that really run, on a CPU or on CUDA: what they allocate, by module and phase, and how fast they are.

The steps that are timed run without any instrument; memory is taken from two others, FLOPs from one more.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from loadgauge.core.base.by_key import largest_first
from loadgauge.core.base.errors import refuse
from loadgauge.pytorch.device.patches import removing
from loadgauge.pytorch.measure.benchmarks import FlopCounter, elapsed, median
from loadgauge.pytorch.measure.cpu_allocator import (
    MODULE,
    PHASE,
    Event,
    Live,
    ModuleUse,
    Range,
    events,
    live,
    profiler,
    ranges,
    tensors,
    uses,
)
from loadgauge.pytorch.record.allocations import GRADIENTS, OPTIMIZER, WEIGHTS
from loadgauge.pytorch.record.observe import STEP, Observer
from loadgauge.pytorch.record.sizes import storage_bytes
from loadgauge.pytorch.trace.child import requested
from loadgauge.pytorch.trace.programs.training import Traceable
from loadgauge.pytorch.trace.subprocess import Request


class Held(msgspec.Struct, frozen=True):
    """An allocation that was live at the peak of the steps [bytes]."""

    op: str
    module: str
    nbytes: int


class MeasuredSteps(msgspec.Struct, frozen=True):
    """Memory, time and FLOPs of real steps. Bytes are the allocator's, of the whole job; seconds are those of plain steps.

    On a CPU no figure includes the scratch of kernels, which depends on the CPU's instructions and on the library that
    computes: `scratch` is how much higher the allocator's own peak was with it (None on CUDA, where the counters cannot
    tell), and `scratch_ops` the operations that held it then.
    `backward_peak` and `step_peak`: the highest outside and inside the optimizer's step. `states`: weights, gradients and
    optimizer states. `flops` are the hardware's in one step, `model_flops` those without recomputation. `held`: what was
    live at the peak (on a CPU). `reserved` and `device_total`: what CUDA's allocator and the whole process hold at most.
    `watched`: seconds of a step with the instruments that take memory.
    """

    target: str
    device: str
    torch: str
    peak: int
    backward_peak: int
    step_peak: int
    states: dict[str, int]
    modules: dict[str, ModuleUse]
    held: tuple[Held, ...]
    seconds: tuple[float, ...]
    flops: int
    model_flops: int
    uncounted: tuple[str, ...]
    reserved: int | None = None
    device_total: int | None = None
    watched: float | None = None
    scratch: int | None = None
    scratch_ops: tuple[str, ...] = ()

    @property
    def overhead(self) -> float | None:
        """The overhead of the memory instruments, as a share of a step without them."""
        return self.watched / self.step - 1 if self.watched and self.step else None

    def by_op(self) -> dict[str, int]:
        """Bytes at the peak by the operation that asked for them, largest first (on a CPU)."""
        return largest_first((block.op, block.nbytes) for block in self.held)

    @property
    def step(self) -> float | None:
        """The median of the timed steps [s]."""
        return median(self.seconds) if self.seconds else None

    @property
    def flops_per_second(self) -> float | None:
        """Achieved model FLOP/s: model FLOPs of a step over its median time."""
        return self.model_flops / self.step if self.step else None

    def mfu(self, peak_flops: float) -> float | None:
        """Model FLOPs utilisation (source: chowdhery2022), of a device with this peak [FLOP/s]."""
        return self.flops_per_second / peak_flops if self.flops_per_second else None


def measure_steps(job: Traceable, device: str = "cpu", timed: int = 3) -> MeasuredSteps:
    """Measures a job's training: two steps for memory, one for FLOPs, one to warm up and `timed` ones for time.

    Raises ConfigError for a device that is not there, and whatever the job raises.
    """
    refuse(device not in ("cpu", "cuda"), f"device: measures on cpu and cuda, not on {device}")
    refuse(device == "cuda" and not torch.cuda.is_available(), "device: there is no CUDA device here")
    observer = Observer(device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    memory = recorder(device, before)
    sizes = States()
    with contextlib.ExitStack() as running:
        with memory.recording():
            step = running.enter_context(job.prepared(None, device))
            job.introduce(observer)
            with watch_steps(observer, memory, sizes):
                for _ in range(2):
                    with memory.phase("training"):
                        watched_seconds = elapsed(lambda: step(observer), device)
        result = memory.result()
        with FlopCounter() as counter:
            step(observer)
        seconds = tuple(elapsed(lambda: step(observer), device) for _ in range(timed + 1))[1:] if timed else ()
    return MeasuredSteps(
        target=job.target,
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        torch=str(torch.__version__),
        peak=max(result.backward, result.step),
        backward_peak=result.backward,
        step_peak=result.step,
        states=sizes.highest,
        modules=result.modules,
        held=result.held,
        seconds=seconds,
        flops=counter.hardware,
        model_flops=counter.model,
        uncounted=tuple(counter.uncounted),
        reserved=result.reserved,
        device_total=result.device_total,
        watched=watched_seconds,
        scratch=result.scratch,
        scratch_ops=result.scratch_ops,
    )


def measure_request(request: Request, timed: int = 3) -> MeasuredSteps:
    """Measure the job of a request in this process; see `trace.subprocess.in_child`. timed: number of steps that are timed"""
    return measure_steps(requested(request), request.device, timed)


class States:
    """The largest sizes of weights, gradients and optimizer states, each storage once."""

    def __init__(self) -> None:
        self.highest: dict[str, int] = {}

    def note(self, optimizer: torch.optim.Optimizer, buffers: list[Any]) -> None:
        """Update the largest sizes [bytes] from an optimizer, its parameters and the model's buffers."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = [value for state in optimizer.state.values() for value in state.values()]
        for name, sized in (
            (WEIGHTS, [*parameters, *buffers]),
            (GRADIENTS, [parameter.grad for parameter in parameters]),
            (OPTIMIZER, states),
        ):
            nbytes = sum(storage_bytes([getattr(tensor, "_local_tensor", tensor) for tensor in sized]).values())
            self.highest[name] = max(self.highest.get(name, 0), nbytes)


class _Result(msgspec.Struct):
    backward: int
    step: int
    modules: dict[str, ModuleUse]
    held: tuple[Held, ...] = ()
    reserved: int | None = None
    device_total: int | None = None
    scratch: int | None = None
    scratch_ops: tuple[str, ...] = ()


class _OnCpu:
    """The allocator's events, from the making of the model on, without the scratch of kernels."""

    def __init__(self) -> None:
        self.profiler = profiler()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        refuse(torch._C._autograd._profiler_enabled(), "another profiler is running")
        with self.profiler:
            yield

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(PHASE + name):
            yield

    def module(self, name: str) -> Any:
        return torch.profiler.record_function(MODULE + name)

    def result(self) -> _Result:
        everything, stretches = events(self.profiler), ranges(self.profiler)
        stream = tensors(everything)
        trained = [stretch for stretch in stretches if stretch.name == PHASE + "training"]
        steps = [stretch for stretch in stretches if stretch.name == PHASE + STEP]
        backward, step = _highest(stream, _between(trained, steps)), _highest(stream, steps)
        highest = max(backward, step, key=lambda moment: moment.peak)
        module_uses = uses(stream, [stretch for stretch in stretches if stretch.name.startswith(MODULE)])
        named = {name.removeprefix(MODULE): use for name, use in module_uses.items()}
        held = tuple(
            Held(block.op or "outside any operation", block.module, block.change)
            for block in highest.held
            if block.time >= trained[0].begin
        )
        whole = _highest(everything, trained)
        ops = tuple(dict.fromkeys(block.op for block in whole.held if block.scratch))
        return _Result(backward.peak, step.peak, named, held, scratch=whole.peak - highest.peak, scratch_ops=ops)


def _highest(stream: Sequence[Event], stretches: Iterable[Range]) -> Live:
    """The allocations at the highest peak of several stretches of time."""
    peaks = (live(stream, stretch.begin, stretch.end) for stretch in stretches)
    return max(peaks, key=lambda moment: moment.peak, default=Live(0, 0, ()))


def _between(whole: list[Range], holes: list[Range]) -> Iterator[Range]:
    """The stretches of `whole` that are in none of the `holes`."""
    for stretch in whole:
        begin = stretch.begin
        for hole in holes:
            if stretch.begin <= hole.begin <= stretch.end:
                yield Range(stretch.name, begin, hole.begin)
                begin = hole.end
        yield Range(stretch.name, begin, stretch.end)


class _OnCuda:
    """The caching allocator's counters, read at the ends of modules and phases; nothing waits for the GPU."""

    def __init__(self, before: int) -> None:
        self.before = before
        self.frames: list[list[Any]] = []
        self.modules: dict[str, ModuleUse] = {}
        self.phases: dict[str, int] = {}
        self.reserved = self.total = 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        torch.cuda.empty_cache()
        yield
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        self.reserved, self.total = torch.cuda.memory_reserved(), total - free

    def _mark(self) -> int:
        """Tells all open frames what the highest was since the last mark; what is allocated now."""
        highest = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for frame in self.frames:
            frame[2] = max(frame[2], highest)
        return torch.cuda.memory_allocated()

    @contextlib.contextmanager
    def _frame(self, name: str) -> Iterator[list[Any]]:
        now = self._mark()
        frame = [name, now, now]
        self.frames.append(frame)
        try:
            yield frame
        finally:
            frame.append(self._mark())
            self.frames.remove(frame)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        # The peak before the optimizer's step is not that of the step.
        around = next((frame for frame in self.frames if frame[0] == PHASE + "training"), None)
        if around is not None:
            self._mark()
            self.phases["backward"] = max(self.phases.get("backward", 0), around[2])
        with self._frame(PHASE + name) as frame:
            yield
        self.phases[name] = max(self.phases.get(name, 0), frame[2])
        if around is not None:
            around[2] = frame[3]
        elif name == "training":
            self.phases["backward"] = max(self.phases.get("backward", 0), frame[2])

    @contextlib.contextmanager
    def module(self, name: str) -> Iterator[None]:
        with self._frame(name) as frame:
            yield
        use = ModuleUse(frame[2] - frame[1], frame[3] - frame[1])
        self.modules[name] = use.widest(self.modules.get(name))

    def result(self) -> _Result:
        return _Result(
            self.phases["backward"] - self.before,
            max(0, self.phases.get(STEP, 0) - self.before),
            self.modules,
            reserved=self.reserved,
            device_total=self.total,
        )


Recorder = _OnCpu | _OnCuda


def recorder(device: str, before: int = 0) -> Recorder:
    """The memory recorder of a device. `before`: bytes allocated before the job."""
    return _OnCuda(before) if device == "cuda" else _OnCpu()


@contextlib.contextmanager
def watch_steps(observer: Observer, memory: Recorder, sizes: States) -> Iterator[None]:
    """A context that reports each module's forward and each optimizer step in its body to the recorder and the observer."""
    open_: list[Any] = []
    steps: list[Any] = []
    buffers: list[Any] = []

    def enter(module: nn.Module, arguments: Any) -> None:
        observer._enter(module, arguments)
        if len(observer._stack) == 1:
            buffers[:] = list(module.buffers())
        open_.append(memory.module(observer._stack[-1] or type(module).__name__))
        open_[-1].__enter__()

    def leave(module: nn.Module, *rest: Any) -> None:
        if open_:
            open_.pop().__exit__(None, None, None)
        observer._leave(module, *rest)

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        sizes.note(optimizer, buffers)
        steps.append(memory.phase(STEP))
        steps[-1].__enter__()

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        steps.pop().__exit__(None, None, None)
        sizes.note(optimizer, buffers)

    handles = [
        modules.register_module_forward_pre_hook(enter),
        modules.register_module_forward_hook(leave, always_call=True),
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ]
    with removing(handles):
        yield
