"""Prediction beside measurement in the first steps of a training, and a warning before memory runs out.

A loop of one's own puts `Watch.step` around each optimizer step; `trainer_watch` and `lightning_watch` do so as callbacks.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, Self

import torch

from loadgauge.core.base import ConfigError, gib, in_gib, refuse, seconds
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.memory.phases import Phase
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.resolve.rescale import evidence_text
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.pytorch.measure.benchmarks import median
from loadgauge.pytorch.measure.train_steps import Recorder, States, recorder, watch_steps
from loadgauge.pytorch.record.allocations import OPTIMIZER, WEIGHTS
from loadgauge.pytorch.record.observe import Observer

__all__ = ["Counters", "Expected", "Watch"]

AROUND = {Phase.EVALUATION, Phase.GENERATION, Phase.SAVING}
"""What comes between training steps."""
NEAR = 0.04
"""The share of the card that, if it is all that is left at the peak, is worth a warning: fragmentation takes as much."""
GROWING = 4
"""Steps in a row after which memory that grows with each is worth a warning."""


class Counters(Protocol):
    """Memory counters of a device [bytes]; `cuda` reads PyTorch's."""

    def peak(self) -> int:
        """The most that was allocated since `reset`."""

    def allocated(self) -> int:
        """Return what is allocated now."""

    def reserved(self) -> int:
        """The most that was kept from the driver since `reset`."""

    def free(self) -> int:
        """Return what the driver could still give."""

    def reset(self) -> None:
        """Begin a step."""


def cuda() -> Counters:
    """Return the counters of the current CUDA device, as PyTorch has them."""
    counted: Any = SimpleNamespace(
        peak=torch.cuda.max_memory_allocated,
        allocated=torch.cuda.memory_allocated,
        reserved=torch.cuda.max_memory_reserved,
        free=lambda: int(torch.cuda.mem_get_info()[0]),
        reset=torch.cuda.reset_peak_memory_stats,
    )
    return counted  # type: ignore[no-any-return]


class Expected(NamedTuple):
    """A prediction for a step: the value, and the ends of its 80 % range. later: bytes by moment between steps."""

    memory: tuple[float, float, float]
    step: tuple[float, float, float] | None
    later: dict[str, float]

    @classmethod
    def of(cls, result: Estimate) -> Self:
        """Read them from an estimate: bytes that PyTorch's allocator has handed out, and seconds.

        >>> import loadgauge
        >>> found = Expected.of(loadgauge.estimate("gpt2", eval_batch=8))
        >>> found.memory[1] <= found.memory[0] < found.memory[2], found.step, list(found.later)
        (True, None, ['evaluation: loss'])
        """
        memory = result.memory
        inside = [(moment, moment.total - moment.parts["outside"] + memory.workspaces) for moment in memory.moments]
        value = max(nbytes for moment, nbytes in inside if moment.phase not in AROUND)
        around = {moment.name: nbytes for moment, nbytes in inside if moment.phase in AROUND}
        shown = memory.reading("allocated")
        low, high = (value * end / shown.value for end in (shown.low, shown.high))
        step = result.time
        later = {name: nbytes for name, nbytes in around.items() if nbytes == max(around.values())}
        return cls((value, low, high), None if step is None else (step.step, step.low, step.high), later)


class Watch:
    """Watches a training of which something is predicted. `warnings`: those that were given.

    predicted: an `Estimate`, a `Job`, or a MODEL as `loadgauge.estimate` takes it, with the flags of the job
    steps: how many are reported; say: what prints a line
    counters: of the device's memory; by default CUDA's, where there is CUDA. On a CPU, whose allocator counts nothing, the
    memory of the third step is recorded, which takes longer than the others.

    Raises `ConfigError` for flags that cannot be read.
    """

    def __init__(
        self,
        predicted: Estimate | Job | str | Path,
        *,
        steps: int = 5,
        say: Callable[[str], object] = print,
        counters: Counters | None = None,
        **flags: Any,
    ) -> None:
        refuse(
            isinstance(predicted, Estimate | Job) and flags,
            f"{', '.join(flags)}: already said by the job; change it with job.replace(...)",
        )
        if not isinstance(predicted, Estimate):
            job = predicted if isinstance(predicted, Job) else Job.of(str(predicted), flags)
            predicted = resolve_job(job).estimate()
        self.predicted, self.expected, self.steps, self._say = predicted, Expected.of(predicted), steps, say
        self.counters = counters or (cuda() if torch.cuda.is_available() else None)
        self.warnings: list[str] = []
        self.seconds: list[float] = []
        self.peak: int | None = None
        """The most that was allocated in a step so far [bytes]."""
        self._done = 0
        self._left: list[int] = []
        self._begun: float | None = None
        self._open = contextlib.ExitStack()
        self._recorder: Recorder | None = None
        self._states = States()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Stand around one step of the optimizer, with all its micro-batches."""
        self.begin()
        try:
            yield
        finally:
            self._open.close()
        self.end()

    def begin(self) -> None:
        """Begin a step of the optimizer."""
        if not self._done and self._begun is None:
            self._say(f"loadgauge: predicted {self._predicted()}")
        if self.counters is not None:
            self.counters.reset()
        elif self._done == 2:
            self._recorder = recorder("cpu")
            self._open.enter_context(self._recorder.recording())
            self._open.enter_context(watch_steps(Observer("cpu"), self._recorder, self._states))
            self._open.enter_context(self._recorder.phase("training"))
        if self._begun is None:
            self._begun = time.perf_counter()

    def end(self) -> None:
        """End a step: report it, if it is one of the first, and warn if there is reason to."""
        self._open.close()
        now, recorded = time.perf_counter(), self._recorder is not None
        self._done += 1
        # A GPU is not waited for: a step takes from the end of the one before to its own. The first makes everything ready.
        if self._begun is not None and self._done > 1 and not recorded:
            self.seconds.append(now - self._begun)
        self._read_memory()
        if self._done <= self.steps and self._done > 1:
            self._say(f"loadgauge: step {self._done}: {self._measured()}")
        self._warn()
        self._begun = time.perf_counter() if recorded else now

    def close(self, evidence: str | Path | None = None) -> None:
        """Stop the instruments, where the training ended within a step. evidence: where to write the run as measured and as
        predicted (`loadgauge evidence`)"""
        self._open.close()
        if evidence is None or not self.seconds:
            return
        measured = {"step": f"{median(self.seconds):.4g}s"}
        if self.peak is not None:
            measured["allocated"] = gib(self.peak, 3)
        try:
            text = evidence_text(self.predicted, measured, torch.__version__)
        except ConfigError as error:
            self._say(f"loadgauge: no evidence is written: {error}")
            return
        Path(evidence).write_text(text, encoding="utf-8")
        self._say(f"loadgauge: {evidence} is written, and sent nowhere")

    def _read_memory(self) -> None:
        peak = None
        if self.counters is not None:
            peak = self.counters.peak()
            self._left = [*self._left, self.counters.allocated()][-GROWING - 1 :]
        elif self._recorder is not None:
            peaks, before = self._recorder.result(), self._states.highest
            # The recorder sees what the step adds to what was there: weights, and the optimizer's states.
            peak = max(peaks.backward, peaks.step) + before.get(WEIGHTS, 0) + before.get(OPTIMIZER, 0)
            self._recorder = None
        if peak is not None:
            self.peak = max(self.peak or 0, peak)

    def _predicted(self) -> str:
        value, low, high = self.expected.memory
        text = f"{gib(value)} allocated ({in_gib(low)} to {in_gib(high)})"
        if self.expected.step is not None:
            text += f", {seconds(self.expected.step[0])} a step ({' to '.join(map(seconds, self.expected.step[1:]))})"
        return text

    def _measured(self) -> str:
        parts = []
        if self.peak is not None:
            parts.append(f"{gib(self.peak)} allocated ({self.peak / self.expected.memory[0] - 1:+.1%})")
        if self.seconds:
            step = median(self.seconds)
            beside = "" if self.expected.step is None else f" ({step / self.expected.step[0] - 1:+.1%})"
            parts.append(f"{seconds(step)} a step{beside}")
        return ", ".join(parts) or "nothing measured yet"

    def _warn(self) -> None:
        """Give each warning once."""
        if self.peak is None:
            return
        value, _, high = self.expected.memory
        if self.peak > high:
            text = f"{gib(self.peak)} allocated is over the predicted range: what runs is not what was predicted"
            self._once("over", text)
        if self.counters is None:
            return
        # What the driver could give, and what the allocator kept beyond the peak.
        room = max(0, self.counters.free() + self.counters.reserved() - self.peak)
        for name, nbytes in self.expected.later.items():
            # What comes later is taken to be as far off as what was seen.
            more = nbytes * self.peak / value - self.peak
            if more > room:
                self._once(name, f"{name} will need {gib(more)} more than a step, of which {gib(room)} are left")
        whole = self.counters.free() + self.counters.reserved()
        if room < NEAR * whole:
            text = f"only {gib(room)} of {gib(whole)} are left at the peak: a smaller micro-batch, or recomputation"
            self._once("near", text)
        growth = [after - before for before, after in zip(self._left, self._left[1:], strict=False)]
        if self._done > GROWING + 1 and len(growth) == GROWING and min(growth) > 0:
            each = sum(growth) / GROWING
            text = f"what stays allocated grows by {gib(each, 3)} a step and takes what is left in {room / each:,.0f} steps"
            self._once("grows", f"{text} (often a loss that is kept with its graph: `loss.item()`)")

    def _once(self, kind: str, text: str) -> None:
        if not any(warning.startswith(f"{kind}: ") for warning in self.warnings):
            self.warnings.append(f"{kind}: {text}")
            self._say(f"loadgauge: WARNING: {text}")
