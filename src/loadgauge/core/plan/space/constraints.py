"""Valid layouts of a grid: a named mask for each constraint, and the places that satisfy all of them."""

from collections.abc import Iterator, Mapping
from typing import Any

from loadgauge.core.base.algebra import Size
from loadgauge.core.estimate.schedule.orders import violation
from loadgauge.core.plan.batch.memo import ByIdentity, Memo
from loadgauge.core.plan.space.space import Grid, Structure, whole


class Places:
    """Some layouts of a grid, by their places in the flattened array of all.

    flat: the places, rising; dims: the length of each axis: rows, micro-batches, replicas
    """

    def __init__(self, flat: Any, dims: tuple[int, int, int]) -> None:
        import numpy

        self.numpy, self.flat, self.dims = numpy, flat, dims
        self._indices, self._read = Memo(), Memo()

    def __len__(self) -> int:
        return len(self.flat)

    def of(self, value: Size) -> Any:
        """The values of an open array at these places [places]; a one-dimensional array is returned as it is."""
        numpy = self.numpy
        array = numpy.asarray(value, dtype="float64")
        if array.ndim == 1:
            return array
        if array.size == 1:
            return numpy.full(len(self.flat), float(array.reshape(-1)[0]))
        return array.reshape(-1)[self.index(tuple(length > 1 for length in array.shape))]

    def read_once(self, value: Size) -> Any:
        """Return what `of` returns, cached by array: do not write into it."""
        return self._read.once(ByIdentity(value), self.of, value)

    def index(self, axes: tuple[bool, ...]) -> Any:
        """The places in a flattened array that has only some of the three axes."""
        return self._indices.once(axes, self._index, axes)

    def _index(self, axes: tuple[bool, ...]) -> Any:
        index: Any = 0
        places_on_axes = self.numpy.unravel_index(self.flat, self.dims)
        for has, places, length in zip(axes, places_on_axes, self.dims, strict=True):
            if has:
                index = index * length + places
        return index

    @property
    def combinations(self) -> Any:
        """The combination of row and micro-batch at each place."""
        return self.index((True, True, False))


class Constraints:
    """The constraints on the layouts of a grid. Rules about few small sizes are `Layout.valid` itself, asked once per value."""

    def __init__(self, grid: Grid) -> None:
        import numpy

        self.grid, self.space, self.sizes, self.numpy = grid, grid.space, grid.sizes, numpy
        self._of_blocks, self._of_schedules, self._possible = Memo(), Memo(), Memo()
        self.experts = self.space.model.has_experts

    def masks(self, structure: Structure) -> Iterator[tuple[str, Any]]:
        """Yield name and mask (true: satisfied) of each constraint on the layouts of a structure."""
        yield from self.of_sizes(structure)
        yield f"{structure.schedule} runs so many micro-batches", self.of_schedule(structure)

    def of_sizes(self, structure: Structure) -> Iterator[tuple[str, Any]]:
        """Yield the constraints that do not depend on the schedule."""
        space, sizes, numpy = self.space, self.sizes, self.numpy
        dp, batches = self._split(structure.pp)
        yield "the GPUs divide over tp x cp x pp", whole(numpy, dp)
        divides = whole(numpy, batches) & whole(numpy, batches * sizes["micro_batch"])
        yield "the global batch divides over dp x micro-batch", divides
        yield "attention heads, widths and sequence divide over tp and cp", self.of_blocks(structure.sequence_parallel)
        if self.experts:
            divides = self._possible.once("experts", lambda: self.grid.valid(("ep", "etp"))[:, None, None])
            yield "experts divide over ep and etp", divides
            own = space.gpus / structure.pp / (sizes["ep"] * sizes["etp"])
            yield "dp x cp x tp divides over ep x etp", whole(numpy, own)
            yield "ranks with the same experts divide over the replicas", whole(numpy, own / sizes["replicas"])
        yield "dp divides over the replicas", whole(numpy, dp / sizes["replicas"])
        if structure.zero == 0:
            yield "replicas of shards need ZeRO", numpy.asarray(sizes["replicas"] == 1)
        else:
            yield "ZeRO has several ranks to shard over", numpy.asarray(dp / sizes["replicas"] * sizes["cp"] > 1)

    def possible(self, structure: Structure) -> Places:
        """Return the places of the grid at which the layouts of a structure are valid; cached until `forget`."""
        within = structure.pp, structure.sequence_parallel, structure.zero > 0
        runs = self.of_schedule(structure)

        def of_sizes() -> Places:
            return Places(self.numpy.flatnonzero(self.mask(structure)), self.grid.dims)

        def make() -> Places:
            places = self._possible.once(within, of_sizes)
            if runs is True or runs.all():
                return places
            kept = self.numpy.broadcast_to(runs, (*self.grid.dims[:2], 1)).reshape(-1)[places.combinations]
            return places if kept.all() else Places(places.flat[kept], self.grid.dims)

        return self._possible.once((within, runs if runs is True else runs.tobytes()), make)

    def halves(self, structure: Structure) -> tuple[Any, Any]:
        """Masks of rows and micro-batches, and of rows and replicas: no rule binds these to one another. Cached until `forget`."""

        def make() -> tuple[Any, Any]:
            numpy, (rows, batches, replicas) = self.numpy, self.grid.dims
            of_batches, of_replicas = (numpy.ones((rows, width, 1), dtype=bool) for width in (batches, 1))
            for _, mask in self.of_sizes(structure):
                if mask.ndim == 3 and mask.shape[2] > 1:
                    of_replicas = of_replicas & mask
                else:
                    of_batches &= mask
            return of_batches, numpy.broadcast_to(of_replicas, (rows, 1, replicas))

        within = structure.pp, structure.sequence_parallel, structure.zero > 0
        return self._possible.once(("halves", within), make)

    def mask(self, structure: Structure) -> Any:
        """The mask of valid layouts, whatever the schedule runs."""
        of_batches, of_replicas = self.halves(structure)
        return of_batches & of_replicas

    def valid(self, structure: Structure) -> int:
        """Return the number of valid layouts of a structure; what is shared is cached until `forget`."""
        within = structure.pp, structure.sequence_parallel, structure.zero > 0
        of_batches, of_replicas = self.halves(structure)
        numbers = self._possible.once(
            ("numbers", within), lambda: of_batches[..., 0] * of_replicas.sum(axis=2, dtype="int64")
        )
        runs = self.of_schedule(structure)
        return int(
            numbers.sum() if runs is True else numbers[self.numpy.broadcast_to(runs[..., 0], numbers.shape)].sum()
        )

    def numbers(self, structures: Mapping[int, list[Structure]]) -> Iterator[tuple[Structure, int]]:
        """Yield structures, by their numbers of stages, with their number of valid layouts."""
        for several in structures.values():
            for structure in several:
                yield structure, self.valid(structure)
            self.forget()

    def forget(self) -> None:
        """Drop what `possible` has cached."""
        self._possible.clear()
        self._of_schedules.clear()

    def count(self, mask: Any) -> int:
        """The number of layouts of the grid for which a mask is true."""
        return int(self.numpy.broadcast_to(mask, self.grid.dims).sum())

    def of_blocks(self, sequence_parallel: bool) -> Any:
        """The mask of valid tp and cp, by `Layout.valid`."""
        make = lambda: self.grid.valid(("tp", "cp"), sequence_parallel=sequence_parallel)[:, None, None]  # noqa: E731
        return self._of_blocks.once(sequence_parallel, make)

    def of_schedule(self, structure: Structure) -> Any:
        """The mask of numbers of micro-batches that the schedule can run; True where it runs any."""
        if structure.pp == 1 or structure.schedule in ("1f1b", "gpipe"):
            return True
        return self._of_schedules.once((structure.pp, structure.vpp, structure.schedule), self._runs, structure)

    def _runs(self, structure: Structure) -> Any:
        numpy, batches = self.numpy, self._split(structure.pp)[1]
        counted = numpy.where((batches >= 1) & (batches % 1 == 0), batches, 0)
        chunks = structure.vpp if structure.schedule == "interleaved" else None
        numbers, places = numpy.unique(counted, return_inverse=True)
        # A search keeps to groups that every framework runs without being told.
        flags = [
            n >= 1
            and not (chunks and n % structure.pp)
            and not violation(structure.schedule, structure.pp, int(n), chunks)
            for n in numbers
        ]
        return numpy.array(flags)[places].reshape(numpy.shape(batches))

    def _split(self, pp: int) -> tuple[Any, Any]:
        """Data-parallel ranks, and micro-batches of each."""
        dp = self.space.gpus / (self.sizes["tp"] * self.sizes["cp"] * pp)
        return dp, self.space.global_batch / self.numpy.maximum(dp, 1e-9) / self.sizes["micro_batch"]
