"""A callback for transformers' Trainer: step time, FLOP/s and MFU of a real training, memory by module of one step of it."""

import contextlib
import time
from typing import Any

import msgspec
import torch
from transformers import TrainerCallback

from loadgauge.core.base.errors import refuse
from loadgauge.pytorch.measure.benchmarks import FlopCounter, median
from loadgauge.pytorch.measure.cpu_allocator import ModuleUse
from loadgauge.pytorch.measure.train_steps import Recorder, States, recorder, watch_steps
from loadgauge.pytorch.record.observe import Observer


class Measured(msgspec.Struct, frozen=True):
    """Time, FLOPs and memory of a training. `seconds`: of each step without an instrument; FLOPs are those of one step of one rank.

    `peak` is that of the step that was watched, on a CPU beside what was there before it, on CUDA in all [bytes].
    """

    seconds: tuple[float, ...]
    model_flops: int
    hardware_flops: int
    peak: int
    states: dict[str, int]
    modules: dict[str, ModuleUse]
    reserved: int | None = None
    mfu: float | None = None

    @property
    def step(self) -> float | None:
        """The median step [s]."""
        return median(self.seconds) if self.seconds else None

    @property
    def flops_per_second(self) -> float | None:
        """Model FLOP/s of this rank."""
        return self.model_flops / self.step if self.step else None


class MeasureCallback(TrainerCallback):
    """Measures a training from inside. `peak_flops`: of one device, for MFU [FLOP/s].

    Two steps are slower and do not count as time: FLOPs are counted in step `count_at`, memory is taken in step
    `watch_at`, both from 0. In all others the callback reads the clock twice and nothing waits for the GPU, so that a
    step's time is that from the end of the one before it to its own end.

    `trainer.add_callback(MeasureCallback(989e12))`; afterwards `.result`, and in `log_history` `step_seconds`, `tflops`
    and `mfu`.
    """

    def __init__(self, peak_flops: float | None = None, count_at: int = 1, watch_at: int = 2) -> None:
        refuse(count_at == watch_at, "FLOPs and memory are taken in different steps: count_at and watch_at differ")
        self.peak_flops, self.count_at, self.watch_at = peak_flops, count_at, watch_at
        self.counter: FlopCounter | None = None
        self.seconds: list[float] = []
        self._recorder: Recorder | None = None
        self._states = States()
        self._open = contextlib.ExitStack()
        self._before: float | None = None

    @property
    def result(self) -> Measured:
        """The measurements so far."""
        memory = None if self._recorder is None else self._recorder.result()
        step = median(self.seconds) if self.seconds else None
        model = 0 if self.counter is None else self.counter.model
        return Measured(
            seconds=tuple(self.seconds),
            model_flops=model,
            hardware_flops=0 if self.counter is None else self.counter.hardware,
            peak=0 if memory is None else max(memory.backward, memory.step),
            states=self._states.highest,
            modules={} if memory is None else memory.modules,
            reserved=None if memory is None else memory.reserved,
            mfu=model / step / self.peak_flops if step and model and self.peak_flops else None,
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the FLOP counter or the memory recorder if this step is to be measured; called by transformers' Trainer."""
        if state.global_step == self.count_at:
            self.counter = self._open.enter_context(FlopCounter())
        elif state.global_step == self.watch_at:
            device = "cuda" if torch.cuda.is_available() and args.device.type == "cuda" else "cpu"
            self._recorder = recorder(device)
            self._open.enter_context(self._recorder.recording())
            self._open.enter_context(watch_steps(Observer(device), self._recorder, self._states))
            self._open.enter_context(self._recorder.phase("training"))
        if self._before is None:
            self._before = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the instruments, and count the time of a step that ran without any; called by transformers' Trainer."""
        done = state.global_step - 1
        self._open.close()
        now = time.perf_counter()
        if self._before is not None and done and done not in (self.count_at, self.watch_at):
            self.seconds.append(now - self._before)
        self._before = now

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add `step_seconds` [s], `tflops` and `mfu` to the log and its history (callbacks called earlier do not see them)."""
        measured = self.result
        if measured.step is None:
            return
        rate = (measured.flops_per_second or 0) / 1e12
        figures = {"step_seconds": measured.step, "tflops": rate, "mfu": measured.mfu}
        more = {name: value for name, value in figures.items() if value}
        for log in (logs, state.log_history[-1] if state.log_history else None):
            if log is not None:
                log.update(more)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stops the instruments if the training ends early."""
        self._open.close()
