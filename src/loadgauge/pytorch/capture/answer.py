"""The answer of a capture: formulas, where they hold, and numbers at some sizes, with the verdict of a GPU."""

from typing import Any

import msgspec

from loadgauge.core.base.verdict import Verdict, judge, needs
from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.memory.counters import Margins
from loadgauge.core.estimate.states.overhead import context, workspaces
from loadgauge.pytorch.capture.captured import Captured
from loadgauge.pytorch.capture.inputs.target import SOUND
from loadgauge.pytorch.capture.symbols.sizes import SAMPLES
from loadgauge.pytorch.device.untraced import NOT_COUNTED


class Formula(msgspec.Struct, frozen=True):
    """A quantity as a formula of the sizes, and at the sizes asked for."""

    formula: str
    value: int


class Needed(msgspec.Struct, frozen=True):
    """Memory that a card must have [bytes], with the 80 % range of measured runs, and what it has."""

    gpu: str
    low: float
    value: float
    high: float
    capacity: float
    verdict: Verdict

    @property
    def total(self) -> float:
        """The same as `value`, under the name that other answers have."""
        return self.value


class Answer(msgspec.Struct, frozen=True):
    """A captured training step at some sizes [bytes, FLOP, elements].

    `peak` is in the tensors' own bytes, `allocated` with each storage rounded as CUDA's allocator does. `numbers_only`: why
    there are no formulas, empty where there are; `holds`: where they hold; `values`: lines of the program that asked for a value
    of a tensor; `branches`: those that decide by it, and where they went on; `cached`: whether the code was not run again.
    """

    target: str
    sizes: dict[str, int]
    parameters: int
    kept: Formula
    flops: Formula
    holds: tuple[str, ...]
    numbers_only: str
    peak: int
    allocated: int
    phases: dict[str, int]
    at_peak: dict[str, int]
    values: tuple[str, ...]
    assumed: tuple[str, ...]
    not_counted: tuple[str, ...]
    operations: int
    torch: str
    seconds: float
    cached: bool
    needed: Needed | None = None
    pictures: tuple[tuple[str, int], ...] = ()
    """Width and height of each picture of a sequence, and how many tokens stand for it."""
    sound: tuple[float, int] | None = None
    """Length of the sound of a sequence [s], and how many of its tokens stand for it."""
    branches: tuple[str, ...] = ()
    subject: str = ""
    """What a model with towers ran on, such as "text alone"."""

    def to_dict(self) -> dict[str, Any]:
        """The document of `loadgauge capture --json`, as plain values. Without a GPU the memory is that of the tensors alone."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        alone = {
            "total": self.allocated,
            "low": None,
            "high": None,
            "capacity": None,
            "fits": None,
            "verdict": "unknown",
        }
        assumed = dict(line.partition(": ")[::2] for line in self.assumed)
        return document | {"assumed": assumed, "memory": alone if self.needed is None else needs(self.needed)}


def answer(
    captured: Captured,
    sizes: dict[str, int],
    seconds: float,
    *,
    cached: bool,
    gpu: Gpu | None = None,
    assumed: tuple[str, ...] = (),
) -> Answer:
    """Return what a capture says at some sizes. Raises NotModelled outside its guards. seconds: that it took"""
    allocated = captured.allocated(**sizes)
    lines = [f"FLOPs of {name}: no formula is known" for name in captured.uncounted]
    if any(recorded.name.startswith("aten::_cudnn_rnn") for recorded in captured.operations):
        lines.append(NOT_COUNTED)
    if gpu is None:
        lines.append("memory beside tensors: CUDA's context, idle blocks of the allocator (--gpu adds them)")
    return Answer(
        target=captured.target,
        sizes=sizes,
        parameters=sum(captured.parameters.values()),
        kept=Formula(str(captured.kept_formula), captured.kept_bytes(**sizes)),
        flops=Formula(str(captured.flops_formula), captured.flops(**sizes)),
        holds=captured.where,
        numbers_only=captured.plain,
        peak=captured.peak(**sizes),
        allocated=allocated,
        phases=captured.by_phase(**sizes),
        at_peak=captured.at_peak(**sizes),
        values=captured.values,
        branches=captured.branches,
        assumed=(*assumed, *captured.assumed),
        not_counted=tuple(lines),
        operations=len(captured.operations) - captured.second,
        torch=captured.torch,
        seconds=seconds,
        cached=cached,
        needed=None if gpu is None else _needed(allocated, gpu),
        pictures=captured.pictures,
        subject=captured.subject.replace("one picture", f"{len(captured.pictures)} pictures")
        if captured.pictures[1:]
        else captured.subject,
        sound=(sizes[SOUND] / SAMPLES, captured.of_sound) if captured.of_sound else None,
    )


def _needed(allocated: int, gpu: Gpu) -> Needed:
    """Return what the step needs on a GPU, as an estimate of plain PyTorch would say of the same tensors."""
    kind = training("huggingface", "bf16-pure", "adamw", "flash")
    own = Margins.of(context(gpu), kind.framework, ragged=False).needed(
        allocated + workspaces(gpu, kind, grouped=False), gpu.capacity
    )
    return Needed(gpu.id, own.low, own.value, own.high, gpu.capacity, judge(own.low, own.high, gpu.capacity))
