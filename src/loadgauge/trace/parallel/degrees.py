"""How many ranks share what, and where each of them stands."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from loadgauge.errors import ConfigError, LayoutError, NotModelled


class Known(NamedTuple):
    """A schedule of PyTorch: `several` chunks on a stage (two, in the shape of a V) or one."""

    name: str
    several: bool = False
    v_shaped: bool = False

    def check(self, vpp: int) -> None:
        """Raises ConfigError for chunks that do not go with it."""
        if self.v_shaped and vpp != 2:
            raise ConfigError(f"{self.name}: two chunks on each stage (vpp=2), got {vpp}")
        if self.several != (vpp > 1):
            wanted = "more than one chunk" if self.several else "one chunk"
            raise ConfigError(f"{self.name}: {wanted} on each stage, got vpp={vpp}")


SCHEDULES = {
    "1f1b": Known("Schedule1F1B"),
    "gpipe": Known("ScheduleGPipe"),
    "interleaved": Known("ScheduleInterleaved1F1B", True),
    "zb-v": Known("ScheduleZBVZeroBubble", True, True),
    "dualpipev": Known("ScheduleDualPipeV", True, True),
}
"""By the names of `loadgauge estimate`."""


class Parallel(msgspec.Struct, frozen=True):
    """How many ranks share what. Data-parallel ranks are those that `tp` and `pp` leave.

    zero: 0, whole copies (DDP); 2, gradients and states are shared (FSDP2, layers stay gathered from forward to
    backward); 3, weights too (FSDP2). replicas: groups that hold the same shares (HSDP). vpp: chunks of each pipeline
    stage. stage_layers: layers of each chunk in order, where they are not equal.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    zero: int = 3
    replicas: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    stage_layers: tuple[int, ...] = ()

    def data(self, size: int) -> int:
        """Data-parallel ranks among `size`. Raises LayoutError, ConfigError or NotModelled.

        >>> Parallel(tp=8, pp=2).data(64)
        4
        """
        if min(self.tp, self.pp, self.vpp, self.replicas) < 1:
            raise ConfigError("tp, pp, vpp and replicas must be at least 1")
        if size % (self.tp * self.pp):
            raise LayoutError(f"a world of {size} does not divide by tp x pp = {self.tp * self.pp}")
        data = size // (self.tp * self.pp)
        if data % self.replicas:
            raise LayoutError(f"{data} data-parallel ranks do not divide by {self.replicas} replicas")
        if self.zero not in (0, 2, 3):
            raise NotModelled(f"zero={self.zero}: PyTorch's DDP is 0, its fully_shard 2 or 3")
        if self.zero == 0 and data > 1 and self.tp > 1:
            raise NotModelled("PyTorch's DDP does not take weights that tensor-parallel ranks share: use --zero 3")
        if self.replicas > 1 and self.zero == 0:
            raise ConfigError("replicas: of ranks that share weights (--zero 2 or 3)")
        if self.sequence_parallel and self.tp == 1:
            raise ConfigError("sequence_parallel: needs tp above 1")
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule: must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if self.pp == 1 and (self.vpp > 1 or self.stage_layers):
            raise ConfigError("vpp and stage_layers: need pp above 1")
        SCHEDULES[self.schedule].check(self.vpp)
        return data


class Place(NamedTuple):
    """A rank on each axis."""

    tp: int
    data: int
    pp: int


def place(rank: int, parallel: Parallel, size: int) -> Place:
    """Where a rank stands.

    >>> place(13, Parallel(tp=4, pp=2), 16)
    Place(tp=1, data=1, pp=1)
    """
    data = parallel.data(size)
    return Place(rank % parallel.tp, rank // parallel.tp % data, rank // (parallel.tp * data))
