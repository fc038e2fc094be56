"""The space of layouts: structures one by one, sizes as open (broadcast) arrays, what is not possible as named masks.

A *structure* is what changes the list of operations or the order of work: pipeline stages, schedule, ZeRO stage, sequence
parallelism, recomputation. Within one, the sizes `SIZES` are open arrays over a `Grid`. dp is what is left of the GPUs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from loadgauge.algebra import Size
from loadgauge.estimate.schedule_orders import violation
from loadgauge.layout import V_SHAPED, Layout, RecomputePolicy, Schedule
from loadgauge.lengths import Lengths
from loadgauge.model import Attention, ModelSpec, Moe
from loadgauge.search.split import balanced

COMBINED = ("tp", "cp", "ep", "etp", "micro_batch")
ELEMENTS = 100_000
"""Layouts of one grid, at most: their arrays stay in the processor's cache."""
SIZES = (*COMBINED, "replicas")
"""What the open arrays hold."""


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


class Grid:
    """Two open axes: combinations of `COMBINED`, and the replicas.

    Every other size follows from them, so an array has as many rows as it depends on combinations, and one column where
    the replicas do not matter. All layouts of a grid have the same operations.

    sizes: the open array of each of `SIZES`; a plain number where all have the same
    within: stages and sequence parallelism, to leave out the combinations that cannot exist with them
    """

    def __init__(
        self, space: Space, values: dict[str, tuple[int, ...]], within: tuple[int, bool] | None = None
    ) -> None:  # fmt: skip
        import numpy

        self.space, self.numpy = space, numpy
        self.replicas = numpy.array(values["replicas"], dtype="float64")
        columns = numpy.meshgrid(*(numpy.array(values[name], dtype="float64") for name in COMBINED), indexing="ij")
        self.columns = {name: column.reshape(-1) for name, column in zip(COMBINED, columns, strict=True)}
        if within is not None:
            chosen, of_replicas = self._possible(*within)
            self.columns = {name: column[chosen] for name, column in self.columns.items()}
            self.replicas = self.replicas[of_replicas]
        self._arrays()

    def _arrays(self) -> None:
        """The open arrays of its columns."""
        numpy, space = self.numpy, self.space
        self.shape = len(self.columns["tp"]), len(self.replicas)
        self.sizes: dict[str, Size] = {}
        for name, column in (*self.columns.items(), ("replicas", self.replicas)):
            alike = len(column) and (column == column[0]).all() and name != "micro_batch"
            open_array = column[None, :] if name == "replicas" else column[:, None]
            self.sizes[name] = int(column[0]) if alike else open_array
        self.ragged: dict[str, Size] = {}
        if space.lengths is not None:
            each = {int(n): batch_of(space.lengths, int(n), space.padded) for n in set(self.columns["micro_batch"])}
            for name in ("tokens", "pairs"):
                self.ragged[name] = numpy.array([each[int(n)][name] for n in self.columns["micro_batch"]])[:, None]

    def parts(self) -> Iterator[Grid]:
        """The grid in pieces of at most `ELEMENTS` layouts, so that a search needs little memory."""
        rows = max(1, ELEMENTS // max(1, self.shape[1]))
        for start in range(0, self.shape[0], rows):
            part = copy.copy(self)
            part.columns = {name: column[start : start + rows] for name, column in self.columns.items()}
            part._arrays()
            yield part

    def _possible(self, pp: int, sequence_parallel: bool) -> tuple[Any, Any]:
        """Combinations that can exist with so many stages, and the replicas that one of them can have."""
        numpy = self.numpy
        dp = self.space.gpus / (self.columns["tp"] * self.columns["cp"] * pp)
        batches = self.space.global_batch / numpy.maximum(dp, 1e-9) / self.columns["micro_batch"]
        own = dp * self.columns["cp"] * self.columns["tp"] / (self.columns["ep"] * self.columns["etp"])
        found = _whole(numpy, dp) & _whole(numpy, batches) & _whole(numpy, own) & self.valid(("ep", "etp"))
        found = found & self.valid(("tp", "cp"), sequence_parallel=sequence_parallel)
        most = dp[found].max() if found.any() else 0
        return found, self.replicas <= most

    def valid(self, names: tuple[str, str], **rest: Any) -> Any:
        """What `Layout.valid` says of two sizes, the batch and the schedule left out, for each combination."""
        numpy, space = self.numpy, self.space
        pairs = numpy.stack([self.columns[name] for name in names], axis=1).astype("int64")
        if not len(pairs):
            return numpy.zeros(0, dtype=bool)
        distinct, places = numpy.unique(pairs, axis=0, return_inverse=True)
        flags = []
        for pair in distinct.tolist():
            sizes = dict(zip(names, pair, strict=True))
            dp = math.prod(pair) if "ep" in names else 1
            balanced_routing = {} if "ep" in names else {"expert_imbalance": 1.0}
            layout = msgspec.structs.replace(
                space.base, dp=dp, global_batch=dp, seq_len=space.seq_len, **sizes, **rest, **balanced_routing
            )
            flags.append(not layout.valid(space.model))
        return numpy.array(flags)[places.reshape(-1)]

    @property
    def size(self) -> int:
        """Layouts of the grid, possible or not."""
        return self.shape[0] * self.shape[1]


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
    def size(self) -> int:
        """Combinations of all axes, possible or not."""
        return len(list(self.structures())) * math.prod(len(getattr(self, name)) for name in SIZES)

    def grids(self, within: tuple[int, bool] | None = None) -> Iterator[Grid]:
        """The grids: one for the values of tp that give the same operations, cut where it would be long."""
        by_tp: dict[object, list[int]] = {}
        for tp in self.tp:
            grouped = [
                -(-mixer.num_key_value_heads // tp) == mixer.num_attention_heads // tp
                for block in self.model.blocks
                if isinstance(mixer := block.attention, Attention)
            ]
            by_tp.setdefault(tuple(grouped), []).append(tp)
        values = {name: getattr(self, name) for name in SIZES}
        for alike in by_tp.values():
            yield from Grid(self, {**values, "tp": tuple(alike)}, within).parts()

    def layout(self, structure: Structure, sizes: dict[str, Size], ragged: dict[str, Size] | None = None) -> Layout:
        """A layout of ints, or of open arrays. ragged: the tokens and pairs of a micro-batch, where they are at hand."""
        within = sizes["tp"] * sizes["cp"] * structure.pp
        left = self.gpus // within if isinstance(within, int) else self.gpus / within
        if ragged is None:
            ragged = {} if self.lengths is None else batch_of(self.lengths, sizes["micro_batch"], self.padded)
        return msgspec.structs.replace(
            self.base, dp=left, pp=structure.pp, vpp=structure.vpp, schedule=structure.schedule,
            stage_layers=structure.stage_layers, zero=structure.zero, sequence_parallel=structure.sequence_parallel,
            recompute=structure.recompute, global_batch=self.global_batch, seq_len=self.seq_len,
            **sizes, **ragged,
        )  # fmt: skip


def batch_of(lengths: Lengths, micro_batch: int, padded: bool) -> dict[str, float]:
    """Expected tokens and query-key pairs of a micro-batch: of the sequences alone, or padded to the longest."""
    if not padded:
        return {"tokens": lengths.expected_sum(micro_batch), "pairs": lengths.expected_sum_square(micro_batch)}
    longest, square = lengths.expected_max(micro_batch), lengths.expected_max_square(micro_batch)
    return {"tokens": micro_batch * longest, "pairs": micro_batch * square}


class Constraints:
    """What keeps layouts of a space from existing, as masks over the arrays of a grid, each with a name.

    Where a rule is about a few small sizes it is `Layout.valid` itself that is asked, once for each value.
    """

    def __init__(self, grid: Grid) -> None:
        import numpy

        self.grid, self.space, self.sizes, self.numpy = grid, grid.space, grid.sizes, numpy
        self._of_blocks: dict[bool, Any] = {}
        self._of_schedules: dict[object, Any] = {}
        self._possible: dict[object, Any] = {}
        self.experts = any(isinstance(block.mlp, Moe) for block in self.space.model.blocks)

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
            yield "experts divide over ep and etp", self.grid.valid(("ep", "etp"))[:, None]
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
        """The places of the layouts of a structure that can exist."""
        key = (
            structure.pp, structure.vpp, structure.schedule, structure.sequence_parallel, structure.zero > 0
        )  # fmt: skip
        if key not in self._possible:
            found: Any = True
            for _, mask in self.masks(structure):
                found = found & mask
            self._possible[key] = self.numpy.flatnonzero(self.numpy.broadcast_to(found, self.grid.shape))
        return self._possible[key]

    def count(self, mask: Any) -> int:
        """Layouts of the grid for which a mask is true."""
        return int(self.numpy.broadcast_to(mask, self.grid.shape).sum())

    def of_blocks(self, sequence_parallel: bool) -> Any:
        """By `Layout.valid`, of tp and cp."""
        if sequence_parallel not in self._of_blocks:
            found = self.grid.valid(("tp", "cp"), sequence_parallel=sequence_parallel)
            self._of_blocks[sequence_parallel] = found[:, None]
        return self._of_blocks[sequence_parallel]

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


def _whole(numpy: Any, value: Any) -> Any:
    return numpy.asarray((numpy.floor(value) == value) & (value >= 1))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, rising.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
