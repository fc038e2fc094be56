"""Memory of the worst rank: its phases, its peak, and the peak of every pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from loadgauge.core.base import ConfigError, Verdict, judge
from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.definitions.training.memory_range import Counter
from loadgauge.core.estimate.memory.around import host_for_saving
from loadgauge.core.estimate.memory.counters import Margins, Reading
from loadgauge.core.estimate.memory.phases import Moment, Phase, StageAtWork
from loadgauge.core.estimate.memory.question import Question, Unsaid, ask
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.schedule.stages import Stage
from loadgauge.core.estimate.states.host import off_card
from loadgauge.core.estimate.states.overhead import non_pytorch_memory
from loadgauge.core.estimate.states.pools import pools

When = Literal["peak", "largest", "forward", "loss", "backward", "step", "evaluation", "saving", "setup"]
"""A moment of the step: of the rank's peak, at which a part is largest, or at which it is largest in a phase."""
STRETCHES: dict[Phase, When] = {
    Phase.FORWARD: "forward", Phase.LOSS: "loss", Phase.STEP: "step", Phase.EVALUATION: "evaluation",
    Phase.GENERATION: "evaluation", Phase.SAVING: "saving", Phase.SETUP: "setup",
}  # fmt: skip
"""Phases and the `When` that each counts as; a phase that is missing here counts as backward."""


class Rank(msgspec.Struct, frozen=True):
    """The rank that needs the most memory: any rank of this pipeline stage."""

    stage: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the worst rank at its peak moment. `total` is the sum of `parts`.

    Between `low` and `high` lies what a card shows, in 80 % of published runs that the range was not made from (docs/accuracy.md),
    from what it must have where the rest is beyond it (`Margins.needed`); `margins` are what it is made of.
    """

    total: float
    low: float
    high: float
    capacity: float | None
    rank: Rank
    moment: str
    parts: dict[str, float]
    moments: tuple[Moment, ...]
    """Every moment of the worst rank, in order."""
    stages: tuple[float, ...]
    """The peak of each pipeline stage."""
    host: float
    """Bytes in host memory, for this rank."""
    pinned: float = 0.0
    """Of these, page-locked."""
    nvme: float = 0.0
    """Bytes on NVMe, for this rank."""
    saving: float = 0.0
    """Bytes of host memory while a checkpoint is saved: of the first rank for a full one, of each for a sharded one."""
    margins: Margins
    unsaid: tuple[Unsaid, ...] = ()
    """Open choices of the job whose other outcome is far from the assumed one; the range is that of the run as assumed."""
    nearby: dict[str, float] = {}
    """Width that each small unspecified choice adds to the range [bytes], by its flag, or its key in a job file."""
    workspaces: float = 0.0
    """Of the part outside: what the allocator hands out to the libraries of matrix products."""
    idle: float = 0.0
    """Of the part outside: what the allocator usually holds and has not handed out; a full card has less."""

    @property
    def peak(self) -> int:
        """Index in `moments` of the moment at which the rank holds the most."""
        return max(range(len(self.moments)), key=lambda index: self.moments[index].total)

    def index(self, part: str | None, when: When) -> int:
        """Return the index in `moments` of the moment that `when` asks for.

        part: whose largest moment it is, and of equal ones that at which the rank holds the most; None: all together.
        Raises `ConfigError` where the worst rank has no moment in that phase.
        """
        if when == "peak":
            return self.peak
        meant: Sequence[int] = range(len(self.moments))
        if when != "largest":
            meant = [index for index in meant if STRETCHES.get(self.moments[index].phase, "backward") == when]
        if not meant:
            names = ", ".join(moment.name for moment in self.moments)
            where = f"the worst rank, of stage {self.rank.stage},"
            raise ConfigError(f"{where} has no moment in the phase {when!r} (its moments: {names})", key="at")
        return max(meant, key=lambda index: (self.moments[index].parts.get(part or "", 0), self.moments[index].total))

    def largest(self, part: str) -> Moment:
        """Return the moment at which a part is largest."""
        return self.moments[self.index(part, "largest")]

    @property
    def allocated(self) -> float:
        """Bytes PyTorch's allocator has handed out at the peak, workspaces included."""
        return self.total - self.parts["outside"] + self.workspaces

    def reading(self, counter: Counter) -> Reading:
        """Return the reading of a counter at the peak [bytes]; none is above the total, which `nvidia-smi` shows."""
        shown = self.margins.reading(counter, self.allocated, self.capacity)
        return Reading(min(shown.low, self.low), min(shown.value, self.total), min(shown.high, self.high))

    def widened(self, fewer: float, more: float, flag: str) -> Memory:
        """Return the memory of a run that may need `fewer` or `more` bytes. flag: of what, or the key of a job file"""
        margins = self.margins.widened(fewer, more)
        needed = margins.needed(self.allocated, self.capacity)
        nearby = {**self.nearby, flag: fewer + more}
        return msgspec.structs.replace(self, margins=margins, low=needed.low, high=needed.high, nearby=nearby)

    def up_to(self, worst: Memory, flag: str) -> Memory:
        """Return the memory of a run that may need as much as another one. flag: of what"""
        most, own = (memory.allocated + memory.margins.pools.further for memory in (worst, self))
        return self.widened(0.0, max(0.0, most - own), flag)

    @property
    def widths(self) -> dict[str, float]:
        """Return the width of the range that each cause adds [bytes], by flag or key, or by a cause outside the job."""
        outside = self.margins.outside
        others = outside.high - outside.low
        return {**self.nearby, "spread": self.high - self.low - others - sum(self.nearby.values()), "outside": others}

    def range_with(self, change: float) -> Reading:
        """Return the memory a card must have where the peak is higher by `change` [bytes]."""
        return self.margins.needed(self.allocated + change, self.capacity)

    @property
    def widest(self) -> Reading:
        """Return the memory a card must have whatever is unspecified: each open choice at its least and at its most [bytes]."""
        fewer, more = (sum(getattr(each, end) for each in self.unsaid) for end in ("fewer", "more"))
        return self.margins.widened(fewer, more).needed(self.allocated, self.capacity)

    @property
    def verdict(self) -> Verdict:
        """Return whether the GPU holds the run (see `loadgauge.core.base.verdict`)."""
        fewer = sum(thing.fewer for thing in self.unsaid if thing.eases)
        low, least = (self.margins.widened(less, 0.0).needed(self.allocated).low for less in (0.0, fewer))
        widest = math.inf if any(thing.endless for thing in self.unsaid) else self.widest.high
        return judge(low, self.high, self.capacity, widest, least)

    @property
    def fits(self) -> bool | None:
        """Return whether it surely fits, whatever is unsaid; None without a GPU."""
        return None if self.capacity is None else self.verdict == "fits"

    def exceeds(self, times: float) -> bool:
        """Return whether even what is needed at least is more than so many times what the card holds."""
        return self.capacity is not None and self.margins.needed(self.allocated).low > times * self.capacity

    @property
    def roomy(self) -> bool:
        """Return whether the card holds all that the allocator may leave idle of what is predicted, as a careful user sizes it."""
        idle, outside = self.margins.fragmentation.needed.high, self.margins.outside.high
        return self.capacity is not None and self.allocated * (1 + idle) + outside <= self.capacity

    @property
    def question(self) -> Question | None:
        """The unsaid thing that decides the verdict, with each of its answers; None where none does."""
        return ask(self.unsaid, self.verdict, self.range_with, self.capacity)


class Worst(msgspec.Struct, frozen=True):
    """The rank that needs the most, the phases of its step, and the peak of each stage, all without the overhead [bytes]."""

    rank: StageAtWork
    phases: tuple[Moment, ...]
    stages: tuple[float, ...]

    @classmethod
    def of(
        cls,
        memory: MemoryModel,
        stages: Sequence[Stage],
        around: Callable[[StageAtWork], Iterable[Moment]] = lambda rank: (),
    ) -> Worst:
        """Find the rank with the highest peak among all stages; stages with equal needs are computed once.

        around: the moments between the steps of a rank
        """
        worst: tuple[StageAtWork, tuple[Moment, ...]] | None = None
        most = 0.0
        peaks: dict[object, float] = {}
        by_stage = []
        for stage in stages:
            alike = memory.alike(stage)
            if alike not in peaks:
                rank = StageAtWork(memory, stage)
                phases = (*rank.moments(), *around(rank))
                peaks[alike] = max(moment.total for moment in phases)
                if worst is None or peaks[alike] > most:
                    worst, most = (rank, phases), peaks[alike]
            by_stage.append(peaks[alike])
        assert worst is not None
        return cls(*worst, tuple(by_stage))

    def memory(self, gpu: Gpu | None, workspaces: float) -> Memory:
        """Return the rank's memory including what is outside PyTorch's allocator [bytes].

        gpu: None where none is given; workspaces: see `overhead.workspaces` [bytes]
        """
        layout = self.rank.layout
        outside = non_pytorch_memory(layout, gpu)
        peak = max(self.phases, key=lambda moment: moment.total)
        framework = self.rank.memory.training.framework
        margins = Margins.of(
            outside,
            framework,
            ragged=layout.tokens is not None,
            adapters=self.rank.memory.training.lora is not None,
            split=layout.tp > 1,
            expandable=framework.expandable and (gpu is None or gpu.vendor == "nvidia"),
            pools=pools(self.rank, self.phases, peak),
        )
        needed = margins.needed(peak.total + workspaces, None if gpu is None else gpu.capacity)
        fixed = needed.value - peak.total
        elsewhere = off_card(self.rank.memory, self.rank.stage)
        return Memory(
            total=needed.value,
            low=needed.low,
            high=needed.high,
            capacity=None if gpu is None else gpu.capacity,
            rank=Rank(self.rank.stage.index),
            moment=peak.name,
            parts={**peak.parts, "outside": fixed},
            moments=tuple(
                Moment(each.name, each.phase, {**each.parts, "outside": fixed}, each.position) for each in self.phases
            ),
            stages=tuple(nbytes + fixed for nbytes in self.stages),
            host=elsewhere.host,
            pinned=elsewhere.pinned,
            nvme=elsewhere.nvme,
            saving=host_for_saving(self.rank),
            margins=margins,
            workspaces=workspaces,
            idle=fixed - workspaces - outside.value,
        )
