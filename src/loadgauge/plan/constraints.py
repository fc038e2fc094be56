"""What keeps layouts of a space from existing, as masks over the arrays of a grid, each with a name; and what is left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loadgauge.algebra import Size
from loadgauge.estimate.schedule.orders import violation
from loadgauge.plan.space import ByIdentity, Grid, Structure, whole
from loadgauge.spec.model import Moe


class Places:
    """Some layouts of a grid, by their places in the flattened array of all.

    flat: the places, rising; dims: the length of each axis: rows, micro-batches, replicas
    """

    def __init__(self, flat: Any, dims: tuple[int, int, int]) -> None:
        import numpy

        self.numpy, self.flat, self.dims = numpy, flat, dims
        self._indices: dict[tuple[bool, ...], Any] = {}
        self._kept: dict[ByIdentity, Any] = {}

    def __len__(self) -> int:
        return len(self.flat)

    def of(self, value: Size) -> Any:
        """What an open array has at these places; an array of one axis has just them."""
        numpy = self.numpy
        array = numpy.asarray(value, dtype="float64")
        if array.ndim == 1:
            return array
        if array.size == 1:
            return numpy.full(len(self.flat), float(array.reshape(-1)[0]))
        return array.reshape(-1)[self.index(tuple(length > 1 for length in array.shape))]

    def known(self, value: Size) -> Any:
        """The same, worked out once for each array; not to be written into."""
        key = ByIdentity(value)
        if key not in self._kept:
            self._kept[key] = self.of(value)
        return self._kept[key]

    def index(self, axes: tuple[bool, ...]) -> Any:
        """The places in an array that has only these axes."""
        if axes not in self._indices:
            found: Any = 0
            for has, own, length in zip(axes, self._own, self.dims, strict=True):
                if has:
                    found = found * length + own
            self._indices[axes] = found
        return self._indices[axes]

    @property
    def _own(self) -> tuple[Any, ...]:
        """The places on each axis."""
        return tuple(self.numpy.unravel_index(self.flat, self.dims))

    @property
    def combinations(self) -> Any:
        """Which row and micro-batch they have."""
        return self.index((True, True, False))


class Constraints:
    """The masks of a grid. Where a rule is about a few small sizes it is `Layout.valid` itself that is asked, once a value."""

    def __init__(self, grid: Grid) -> None:
        import numpy

        self.grid, self.space, self.sizes, self.numpy = grid, grid.space, grid.sizes, numpy
        self._of_blocks: dict[bool, Any] = {}
        self._of_schedules: dict[object, Any] = {}
        self._possible: dict[object, Any] = {}
        self.experts = any(isinstance(block.mlp, Moe) for block in self.space.model.blocks)

    def masks(self, structure: Structure) -> Iterator[tuple[str, Any]]:
        """Name and mask (true: possible) of each constraint on the layouts of a structure."""
        yield from self.of_sizes(structure)
        yield f"{structure.schedule} runs so many micro-batches", self.of_schedule(structure)

    def of_sizes(self, structure: Structure) -> Iterator[tuple[str, Any]]:
        """Those that do not look at the order of work."""
        space, sizes, numpy = self.space, self.sizes, self.numpy
        dp, batches = self._split(structure.pp)
        yield "the GPUs divide over tp x cp x pp", whole(numpy, dp)
        each = whole(numpy, batches) & whole(numpy, batches * sizes["micro_batch"])
        yield "the global batch divides over dp x micro-batch", each
        yield "attention heads, widths and sequence divide over tp and cp", self.of_blocks(structure.sequence_parallel)
        if self.experts:
            if "experts" not in self._possible:
                self._possible["experts"] = self.grid.valid(("ep", "etp"))[:, None, None]
            yield "experts divide over ep and etp", self._possible["experts"]
            own = space.gpus / structure.pp / (sizes["ep"] * sizes["etp"])
            yield "dp x cp x tp divides over ep x etp", whole(numpy, own)
            yield "ranks with the same experts divide over the replicas", whole(numpy, own / sizes["replicas"])
        yield "dp divides over the replicas", whole(numpy, dp / sizes["replicas"])
        if structure.zero == 0:
            yield "replicas of shards need ZeRO", numpy.asarray(sizes["replicas"] == 1)
        else:
            yield "ZeRO has several ranks to shard over", numpy.asarray(dp / sizes["replicas"] * sizes["cp"] > 1)

    def possible(self, structure: Structure) -> Places:
        """The layouts of a structure that can exist."""
        within = structure.pp, structure.sequence_parallel, structure.zero > 0
        runs = self.of_schedule(structure)
        key = within, runs if runs is True else runs.tobytes()
        if key not in self._possible:
            if within not in self._possible:
                found: Any = True
                for _, mask in self.of_sizes(structure):
                    found = found & mask
                flat = self.numpy.flatnonzero(self.numpy.broadcast_to(found, self.grid.dims))
                self._possible[within] = Places(flat, self.grid.dims)
            places = self._possible[within]
            if runs is not True and not runs.all():
                kept = self.numpy.broadcast_to(runs, (*self.grid.dims[:2], 1)).reshape(-1)[places.combinations]
                places = places if kept.all() else Places(places.flat[kept], self.grid.dims)
            self._possible[key] = places
        found_places: Places = self._possible[key]
        return found_places

    def forget(self) -> None:
        """Gives back what `possible` remembers."""
        self._possible.clear()
        self._of_schedules.clear()

    def count(self, mask: Any) -> int:
        """Layouts of the grid for which a mask is true."""
        return int(self.numpy.broadcast_to(mask, self.grid.dims).sum())

    def of_blocks(self, sequence_parallel: bool) -> Any:
        """By `Layout.valid`, of tp and cp."""
        if sequence_parallel not in self._of_blocks:
            found = self.grid.valid(("tp", "cp"), sequence_parallel=sequence_parallel)
            self._of_blocks[sequence_parallel] = found[:, None, None]
        return self._of_blocks[sequence_parallel]

    def of_schedule(self, structure: Structure) -> Any:
        """What the order of work asks of the number of micro-batches."""
        if structure.pp == 1 or structure.schedule in ("1f1b", "gpipe"):
            return True
        numpy, p = self.numpy, structure.pp
        key = structure.pp, structure.vpp, structure.schedule
        if key not in self._of_schedules:
            batches = self._split(p)[1]
            counted = numpy.where((batches >= 1) & (batches % 1 == 0), batches, 0)
            chunks = structure.vpp if structure.schedule == "interleaved" else None
            numbers, places = numpy.unique(counted, return_inverse=True)
            flags = [n >= 1 and not violation(structure.schedule, p, int(n), chunks) for n in numbers]
            self._of_schedules[key] = numpy.array(flags)[places].reshape(numpy.shape(batches))
        return self._of_schedules[key]

    def _split(self, pp: int) -> tuple[Any, Any]:
        """Data-parallel ranks, and micro-batches of each."""
        dp = self.space.gpus / (self.sizes["tp"] * self.sizes["cp"] * pp)
        return dp, self.space.global_batch / self.numpy.maximum(dp, 1e-9) / self.sizes["micro_batch"]
