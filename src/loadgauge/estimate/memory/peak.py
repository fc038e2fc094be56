"""Memory of the worst rank: its phases, its peak, and the peak of every pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from loadgauge.errors import ConfigError
from loadgauge.estimate.memory.overhead import FRAGMENTATION, non_pytorch_memory
from loadgauge.estimate.memory.phases import Moment, Phase, StageAtWork
from loadgauge.estimate.memory.rank_memory import MemoryModel
from loadgauge.estimate.schedule.stages import Stage

When = Literal["peak", "largest", "forward", "loss", "backward", "step"]
"""A moment of the step: of the rank's peak, at which a part is largest, or at which it is largest in a phase."""
STRETCHES: dict[Phase, When] = {Phase.FORWARD: "forward", Phase.LOSS: "loss", Phase.STEP: "step"}
"""What a phase counts as in `When`; all others are part of the backward."""


class Rank(msgspec.Struct, frozen=True):
    """The rank that needs the most memory: any rank of this pipeline stage."""

    stage: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the worst rank at its peak moment. `total` is the sum of `parts`; `low` and `high` bound it."""

    total: float
    low: float
    high: float
    capacity: float | None
    fits: bool | None
    rank: Rank
    moment: str
    parts: dict[str, float]
    moments: tuple[Moment, ...]
    """Every moment of the worst rank, in order."""
    stages: tuple[float, ...]
    """The peak of each pipeline stage."""
    host: float
    """Bytes offloaded to the host, for this rank."""
    workspaces: float = 0.0
    """Of the part outside: what the allocator hands out to the libraries of matrix products."""

    @property
    def peak(self) -> int:
        """Index in `moments` of the moment at which the rank holds the most."""
        return max(range(len(self.moments)), key=lambda index: self.moments[index].total)

    def index(self, part: str, when: When) -> int:
        """Return the index in `moments` of the moment that `when` asks for.

        Among moments at which a part is equally large, the one at which the rank holds the most. Raises `ConfigError` where the
        worst rank has no moment in that phase.
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
        return max(meant, key=lambda index: (self.moments[index].parts[part], self.moments[index].total))

    def largest(self, part: str) -> Moment:
        """Return the moment at which a part is largest."""
        return self.moments[self.index(part, "largest")]

    @property
    def allocated(self) -> float:
        """Bytes PyTorch's allocator has handed out at the peak, workspaces included."""
        return self.total - self.parts["outside"] + self.workspaces

    @property
    def verdict(self) -> Literal["fits", "tight", "does not fit", "unknown"]:
        """Whether the total fits the GPU; `tight` if it does and the upper end of the range does not."""
        if self.capacity is None:
            return "unknown"
        if self.total > self.capacity:
            return "does not fit"
        return "tight" if self.high > self.capacity else "fits"


class Worst(msgspec.Struct, frozen=True):
    """The rank that needs the most, the phases of its step, and the peak of each stage, all without the overhead [bytes]."""

    rank: StageAtWork
    phases: tuple[Moment, ...]
    stages: tuple[float, ...]

    @classmethod
    def of(cls, memory: MemoryModel, stages: Sequence[Stage]) -> Worst:
        """Find the rank with the highest peak among all stages; stages with equal needs are computed once."""
        worst: tuple[StageAtWork, tuple[Moment, ...]] | None = None
        most = 0.0
        peaks: dict[object, float] = {}
        by_stage = []
        for stage in stages:
            alike = memory.alike(stage)
            if alike not in peaks:
                rank = StageAtWork(memory, stage)
                phases = tuple(rank.moments())
                peaks[alike] = max(moment.total for moment in phases)
                if worst is None or peaks[alike] > most:
                    worst, most = (rank, phases), peaks[alike]
            by_stage.append(peaks[alike])
        assert worst is not None
        return cls(*worst, tuple(by_stage))

    def memory(self, capacity: float | None, workspaces: float) -> Memory:
        """Return the rank's memory including what is outside PyTorch's allocator [bytes].

        capacity: memory of the GPU [bytes], None where no GPU is given; workspaces: see `overhead.workspaces` [bytes]
        """
        outside = non_pytorch_memory(self.rank.layout)
        fixed = outside.value + workspaces
        peak = max(self.phases, key=lambda moment: moment.total)
        allocated = peak.total + workspaces
        total = allocated + outside.value
        return Memory(
            total=total,
            low=allocated + outside.low,
            high=allocated * (1 + FRAGMENTATION.high) + outside.high,
            capacity=capacity,
            fits=None if capacity is None else total <= capacity,
            rank=Rank(self.rank.stage.index),
            moment=peak.name,
            parts={**peak.parts, "outside": fixed},
            moments=tuple(
                Moment(each.name, each.phase, {**each.parts, "outside": fixed}, each.position) for each in self.phases
            ),
            stages=tuple(nbytes + fixed for nbytes in self.stages),
            host=self.rank.memory.host(self.rank.stage),
            workspaces=workspaces,
        )
