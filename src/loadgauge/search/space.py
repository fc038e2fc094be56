"""The space of layouts: structures one by one, sizes as open (broadcast) arrays, what is not possible as named masks.

A *structure* is what changes the list of operations or the order of work: pipeline stages, schedule, ZeRO stage, sequence
parallelism, recomputation. Within one, the sizes `SIZES` are axes of open arrays, in that order: an array that depends on
`tp` and `micro_batch` alone has one row for each pair of them, whatever the other axes hold. dp is what is left of the GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from loadgauge.algebra import Size
from loadgauge.errors import LayoutError
from loadgauge.estimate.schedule_orders import violation
from loadgauge.layout import V_SHAPED, Layout, RecomputePolicy, Schedule
from loadgauge.lengths import Lengths
from loadgauge.model import ModelSpec, Moe
from loadgauge.search.split import balanced

SIZES = ("tp", "cp", "ep", "etp", "micro_batch", "replicas")
"""Axes of the open arrays."""
AXIS = {name: index for index, name in enumerate(SIZES)}


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """What changes the list of operations or the order of work."""

    pp: int = 1
    vpp: int = 1
    schedule: Schedule = "1f1b"
    stage_layers: tuple[int, ...] | None = None
    zero: int = 0
    sequence_parallel: bool = False
    recompute: RecomputePolicy = RecomputePolicy()

    @property
    def splits(self) -> bool:
        """Whether the gradients of the weights are made apart."""
        return self.schedule not in ("1f1b", "gpipe", "interleaved")


class Kind(NamedTuple):
    """Axes of a grid that are alike in structure: `tp` and `cp` are 1 throughout, or above 1 throughout."""

    tp: tuple[int, ...]
    cp: tuple[int, ...]


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """Every layout of a model on so many GPUs: for each axis the values it may have.

    lengths: a histogram of sequence lengths (padding-free batches) instead of `seq_len` alike ones
    base: what is the same for all layouts (how keys and values travel, the order of the axes)
    """

    model: ModelSpec
    gpus: int
    global_batch: int
    seq_len: int
    tp: tuple[int, ...] = (1,)
    pp: tuple[int, ...] = (1,)
    vpp: tuple[int, ...] = (1,)
    cp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)
    etp: tuple[int, ...] = (1,)
    zero: tuple[int, ...] = (0, 1, 2, 3)
    sequence_parallel: tuple[bool, ...] = (False, True)
    micro_batch: tuple[int, ...] = (1,)
    recompute: tuple[RecomputePolicy, ...] = (RecomputePolicy(),)
    schedule: tuple[Schedule, ...] = ("1f1b",)
    replicas: tuple[int, ...] = (1,)
    stage_layers: tuple[int, ...] | None = None
    lengths: Lengths | None = None
    padded: bool = False
    base: Layout = Layout()

    # -- structures -----------------------------------------------------------------------------------------------------

    def splits(self, pp: int, parts: int) -> tuple[tuple[int, ...] | None, ...]:
        """How the layers may be split over pp stages of so many parts: evenly, else the best split there is."""
        if self.stage_layers is not None:
            return (self.stage_layers,) if len(self.stage_layers) == pp else ()
        layers = self.model.num_hidden_layers
        if layers % (pp * parts) == 0:
            return (None,)
        if layers < pp or pp * parts > layers + 2:
            return ()
        split = balanced(self.model, pp, self.seq_len)
        # The chunk that an end takes the place of may be empty; no other one.
        return (split,) if parts == 1 or (max(split) % parts == 0 and min(split) >= parts - 1) else ()

    def structures(self) -> Iterator[Structure]:
        """All of them, those of one split of the layers together."""
        shared = any(block.shares_weights for block in self.model.blocks)
        for pp in self.pp:
            if pp > 1 and shared:
                continue
            for schedule, vpp in self._schedules(pp):
                parts = 2 if schedule in V_SHAPED else vpp
                for split in self.splits(pp, parts):
                    for again in self.recompute:
                        for spread in self.sequence_parallel:
                            for zero in self.zero:
                                yield Structure(
                                    pp=pp, vpp=vpp, schedule=schedule, stage_layers=split, zero=zero,
                                    sequence_parallel=spread, recompute=again,
                                )  # fmt: skip

    def _schedules(self, pp: int) -> Iterator[tuple[Schedule, int]]:
        if pp == 1:
            # One stage has no schedule; whoever asks for one asks for a pipeline.
            if "1f1b" in self.schedule and 1 in self.vpp:
                yield "1f1b", 1
            return
        for schedule in self.schedule:
            if schedule != "interleaved":
                if 1 in self.vpp:
                    yield schedule, 1
                continue
            for vpp in self.vpp:
                if vpp > 1 and pp * vpp <= self.model.num_hidden_layers + 2:
                    yield schedule, vpp

    # -- sizes ----------------------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The grids: values of tp and cp that change the operations alike."""
        by_tp: dict[object, list[int]] = {}
        for tp in self.tp:
            alone = [
                -(-mixer.num_key_value_heads // tp) == mixer.num_attention_heads // tp
                for block in self.model.blocks
                if (mixer := block.attention) is not None and hasattr(mixer, "num_key_value_heads")
            ]
            by_tp.setdefault((tp == 1, tuple(alone)), []).append(tp)
        by_cp: dict[bool, list[int]] = {}
        for cp in self.cp:
            by_cp.setdefault(cp == 1, []).append(cp)
        return tuple(Kind(tuple(tp), tuple(cp)) for tp in by_tp.values() for cp in by_cp.values())

    def axes(self, kind: Kind) -> dict[str, Size]:
        """The open array of each axis, float64; a plain 1 where tp or cp is 1."""
        import numpy

        values = {**{name: getattr(self, name) for name in SIZES}, "tp": kind.tp, "cp": kind.cp}
        found: dict[str, Size] = {}
        for name, numbers in values.items():
            if numbers == (1,) and name != "micro_batch":
                found[name] = 1
                continue
            shape = [1] * len(SIZES)
            shape[AXIS[name]] = len(numbers)
            found[name] = numpy.array(numbers, dtype="float64").reshape(shape)
        return found

    def ragged(self) -> dict[str, Size]:
        """Expected tokens and query-key pairs of a micro-batch, for each size of it; nothing where all are alike."""
        if self.lengths is None:
            return {}
        import numpy

        shape = [1] * len(SIZES)
        shape[AXIS["micro_batch"]] = len(self.micro_batch)
        each = [batch_of(self.lengths, micro_batch, self.padded) for micro_batch in self.micro_batch]
        return {name: numpy.array([one[name] for one in each], dtype="float64").reshape(shape) for name in each[0]}

    def layout(self, structure: Structure, sizes: dict[str, Size]) -> Layout:
        """A layout of ints or of open arrays."""
        within = sizes["tp"] * sizes["cp"] * structure.pp
        left = self.gpus // within if isinstance(within, int) else self.gpus / within
        raggedness: dict[str, Size] = {}
        if self.lengths is not None:
            whole = isinstance(sizes["micro_batch"], int)
            raggedness = batch_of(self.lengths, sizes["micro_batch"], self.padded) if whole else self.ragged()
        return msgspec.structs.replace(
            self.base, dp=left, pp=structure.pp, vpp=structure.vpp, schedule=structure.schedule,
            stage_layers=structure.stage_layers, zero=structure.zero, sequence_parallel=structure.sequence_parallel,
            recompute=structure.recompute, global_batch=self.global_batch, seq_len=self.seq_len,
            **sizes, **raggedness,
        )  # fmt: skip


def batch_of(lengths: Lengths, micro_batch: int, padded: bool) -> dict[str, float]:
    """Expected tokens and query-key pairs of a micro-batch: of the sequences alone, or padded to the longest."""
    if not padded:
        return {"tokens": lengths.expected_sum(micro_batch), "pairs": lengths.expected_sum_square(micro_batch)}
    longest, square = lengths.expected_max(micro_batch), lengths.expected_max_square(micro_batch)
    return {"tokens": micro_batch * longest, "pairs": micro_batch * square}


class Constraints:
    """What keeps layouts of a space from existing, as masks over its open arrays, each with a name.

    Where a rule is about a few small axes it is `Layout.valid` itself that is asked, once for each value.
    """

    def __init__(self, space: Space, kind: Kind) -> None:
        import numpy

        self.space, self.kind, self.numpy = space, kind, numpy
        self.sizes = space.axes(kind)
        self._of_blocks: dict[bool, Any] = {}
        self._of_schedules: dict[object, Any] = {}
        self.experts = any(isinstance(block.mlp, Moe) for block in space.model.blocks)

    def masks(self, structure: Structure) -> Iterator[tuple[str, Any]]:
        """Name and mask (true: possible) of each constraint on the layouts of a structure."""
        space, sizes, numpy = self.space, self.sizes, self.numpy
        dp = space.gpus / (sizes["tp"] * sizes["cp"] * structure.pp)
        yield "the GPUs divide over tp x cp x pp", _whole(numpy, dp)
        batches = space.global_batch / numpy.maximum(dp, 1e-9) / sizes["micro_batch"]
        each = _whole(numpy, batches) & _whole(numpy, batches * sizes["micro_batch"])
        yield "the global batch divides over dp x micro-batch", each
        yield "attention heads, widths and sequence divide over tp and cp", self.of_blocks(structure.sequence_parallel)
        if self.experts:
            yield "experts divide over ep and etp", self.of_experts()
            own = dp * sizes["cp"] * sizes["tp"] / (sizes["ep"] * sizes["etp"])
            yield "dp x cp x tp divides over ep x etp", _whole(numpy, own)
            yield "ranks with the same experts divide over the replicas", _whole(numpy, own / sizes["replicas"])
        yield "dp divides over the replicas", _whole(numpy, dp / sizes["replicas"])
        if structure.zero == 0:
            yield "replicas of shards need ZeRO", numpy.asarray(sizes["replicas"] == 1)
        else:
            yield "ZeRO has several ranks to shard over", numpy.asarray(dp / sizes["replicas"] * sizes["cp"] > 1)
        yield f"{structure.schedule} runs so many micro-batches", self.of_schedule(structure, batches)

    def possible(self, structure: Structure) -> Any:
        """The layouts of a structure that can exist, over all axes."""
        found: Any = True
        for _, mask in self.masks(structure):
            found = found & mask
        return self.numpy.broadcast_to(found, self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each axis."""
        lengths = {**{name: len(getattr(self.space, name)) for name in SIZES}}
        lengths.update(tp=len(self.kind.tp), cp=len(self.kind.cp))
        return tuple(lengths[name] for name in SIZES)

    @property
    def size(self) -> int:
        """Places in the open arrays."""
        return math.prod(self.shape)

    def count(self, mask: Any) -> int:
        """Places at which a mask is true."""
        return int(self.numpy.broadcast_to(mask, self.shape).sum())

    def of_blocks(self, sequence_parallel: bool) -> Any:
        """tp x cp, by `Layout.valid`."""
        if sequence_parallel not in self._of_blocks:
            flags = [
                [
                    not self.problems(tp=tp, cp=cp, sequence_parallel=sequence_parallel, expert_imbalance=1.0)
                    for cp in self.kind.cp
                ]
                for tp in self.kind.tp
            ]
            self._of_blocks[sequence_parallel] = self.numpy.array(flags).reshape(self._shape("tp", "cp"))
        return self._of_blocks[sequence_parallel]

    def of_experts(self) -> Any:
        """ep x etp, by `Layout.valid`."""
        flags = [[not self.problems(dp=ep * etp, ep=ep, etp=etp) for etp in self.space.etp] for ep in self.space.ep]
        return self.numpy.array(flags).reshape(self._shape("ep", "etp"))

    def of_schedule(self, structure: Structure, batches: Any) -> Any:
        """What the order of work asks of the number of micro-batches."""
        if structure.pp == 1 or structure.schedule in ("1f1b", "gpipe"):
            return True
        numpy, p = self.numpy, structure.pp
        key = structure.pp, structure.vpp, structure.schedule
        if key not in self._of_schedules:
            whole = numpy.where((batches >= 1) & (batches % 1 == 0), batches, 0)
            chunks = structure.vpp if structure.schedule == "interleaved" else None
            numbers, places = numpy.unique(whole, return_inverse=True)
            flags = [n >= 1 and not violation(structure.schedule, p, int(n), chunks) for n in numbers]
            self._of_schedules[key] = numpy.array(flags)[places].reshape(numpy.shape(batches))
        return self._of_schedules[key]

    def problems(self, **sizes: Any) -> list[str]:
        """What `Layout.valid` says of a layout of these sizes, batch and schedule left out."""
        dp = sizes.get("dp", 1)
        layout = msgspec.structs.replace(self.space.base, seq_len=self.space.seq_len, global_batch=dp, **sizes)
        return layout.valid(self.space.model)

    def _shape(self, *names: str) -> tuple[int, ...]:
        return tuple(length if name in names else 1 for name, length in zip(SIZES, self.shape, strict=True))


def _whole(numpy: Any, value: Any) -> Any:
    return numpy.asarray((numpy.floor(value) == value) & (value >= 1))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, rising.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def only(space: Space, layout: Layout) -> list[str]:
    """Why a layout is not of a space, a line each; empty where it is."""
    found = []
    for name in ("tp", "pp", "cp", "ep", "etp", "vpp", "zero", "sequence_parallel", "micro_batch", "recompute", "schedule"):
        if getattr(layout, name) not in getattr(space, name):
            found.append(f"{name} = {getattr(layout, name)}")
    if space.gpus != layout.gpus:
        raise LayoutError(f"the space is of {space.gpus} GPUs, the layout of {layout.gpus}")
    return found
