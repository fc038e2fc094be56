"""The space of layouts: structures one by one, sizes as open (broadcast) arrays, what is not possible as named masks.

A *structure* is what changes the list of operations or the order of work: pipeline stages, schedule, ZeRO stage, sequence
parallelism, recomputation. Within one, the sizes `SIZES` are open arrays over a `Grid`. dp is what is left of the GPUs.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import msgspec

from loadgauge.core.base.algebra import Size
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.layout.axes import STAGE_AXES
from loadgauge.core.definitions.layout.layout import V_SHAPED, Layout, RecomputePolicy, Schedule, of_lengths
from loadgauge.core.definitions.model.model import Attention, ModelSpec
from loadgauge.core.plan.space.stage_split import balanced

ROWS = STAGE_AXES
COMBINED = (*ROWS, "micro_batch")
ELEMENTS = 200_000
"""Layouts of one grid, at most: their arrays stay in the processor's cache."""
WORD = 32
"""Bits of a size."""
SMALL = 500_000
"""Combinations of a space that is not worth narrowing down."""
SIZES = (*COMBINED, "replicas")
"""Sizes that the open arrays hold."""


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that change the list of operations or the order of work."""

    pp: int = 1
    vpp: int = 1
    schedule: Schedule = "1f1b"
    stage_layers: tuple[int, ...] | None = None
    zero: int = 0
    sequence_parallel: bool = False
    recompute: RecomputePolicy = RecomputePolicy()

    @property
    def splits(self) -> bool:
        """Return whether the schedule splits the backward into input and weight gradients."""
        return self.schedule not in ("1f1b", "gpipe", "interleaved")


class Grid:
    """Three open axes: rows of `ROWS`, micro-batches and replicas.

    Every other size follows from them, so an array has only the axes that it depends on. All layouts of a grid have the same
    operations.

    dims: how long the axes are; shape: combinations of all but the replicas, and the replicas
    sizes: the open array of each of `SIZES`; a plain number where all have the same
    spread: with or without sequence parallelism, to leave out the rows that cannot exist with it; None: leaves none out
    """

    def __init__(self, space: Space, values: dict[str, tuple[int, ...]], spread: bool | None = None) -> None:
        import numpy

        self.space, self.numpy = space, numpy
        self.flags: dict[object, bool] = {}
        self.replicas, self.micro_batches = (
            numpy.array(values[name], dtype="float64") for name in ("replicas", "micro_batch")
        )
        columns = numpy.meshgrid(*(numpy.array(values[name], dtype="float64") for name in ROWS), indexing="ij")
        self.rows = {name: column.reshape(-1) for name, column in zip(ROWS, columns, strict=True)}
        if spread is not None:
            chosen, of_replicas = self._possible(spread)
            self.rows = {name: column[chosen] for name, column in self.rows.items()}
            self.replicas = self.replicas[of_replicas]
        self._arrays()

    @classmethod
    def listed(cls, space: Space, columns: dict[str, Any], replicas: Any) -> Grid:
        """A grid whose rows are listed combinations of `COMBINED`. columns: the value of each; replicas: open as ever"""
        import numpy

        grid = cls.__new__(cls)
        grid.space, grid.numpy, grid.replicas, grid.flags = space, numpy, replicas, {}
        grid.rows, grid.micro_batches = columns, numpy.ones(1)
        grid._arrays()
        return grid

    def _arrays(self) -> None:
        """The open arrays of its axes."""
        numpy, space = self.numpy, self.space
        self.dims = len(self.rows["tp"]), len(self.micro_batches), len(self.replicas)
        self.shape = self.dims[0] * self.dims[1], self.dims[2]
        self.sizes: dict[str, Size] = {"micro_batch": self.micro_batches[None, :, None]}
        for name, column in (*self.rows.items(), ("replicas", self.replicas)):
            alike = len(column) and (column == column[0]).all()
            open_array = column[None, None, :] if name == "replicas" else column[:, None, None]
            self.sizes[name] = int(column[0]) if alike and name != "micro_batch" else open_array
        self.ragged: dict[str, Size] = {}
        if space.lengths is not None:
            batches = [of_lengths(space.lengths, int(n), space.padded) for n in self.micro_batches]
            for name in ("tokens", "pairs"):
                several = [getattr(each["fullest"], name) if space.at_peak else each[name] for each in batches]
                self.ragged[name] = numpy.array(several)[None, :, None]

    @property
    def columns(self) -> dict[str, Any]:
        """The value of each of `COMBINED` at each combination of row and micro-batch."""
        numpy, (rows, batches, _) = self.numpy, self.dims
        if "micro_batch" in self.rows:
            return self.rows
        sizes = {name: numpy.repeat(column, batches) for name, column in self.rows.items()}
        return {**sizes, "micro_batch": numpy.tile(self.micro_batches, rows)}

    def at(self, index: int) -> dict[str, int]:
        """Return the sizes at a place of the flattened arrays, as whole numbers by the names in `SIZES`."""
        row, batch, replica = map(int, self.numpy.unravel_index(index, self.dims))
        sizes = {name: int(column[row]) for name, column in self.rows.items()}
        return {"micro_batch": int(self.micro_batches[batch]), **sizes, "replicas": int(self.replicas[replica])}

    def layout(self, structure: Structure, index: int) -> Layout:
        """The layout of a structure at a place of the arrays, in whole numbers."""
        return self.space.layout(structure, dict(self.at(index)))

    def parts(self) -> Iterator[Grid]:
        """The grid in pieces of at most `ELEMENTS` layouts, so that a search needs little memory."""
        rows = max(1, ELEMENTS // max(1, self.dims[1] * self.dims[2]))
        for start in range(0, self.dims[0], rows):
            yield self.some(slice(start, start + rows))

    def some(self, rows: Any) -> Grid:
        """The same grid with some of its rows."""
        part = copy.copy(self)
        part.rows = {name: column[rows] for name, column in self.rows.items()}
        part._arrays()
        return part

    @classmethod
    def marked(cls, parts: Sequence[Grid], marks: Sequence[Any]) -> list[Grid]:
        """Grids of the combinations of rows and micro-batches that are marked in the parts of a grid, as few as there can be.

        They are listed; a part alone is left as it is where most of it is marked.
        """
        first, numpy = parts[0], parts[0].numpy
        if len(parts) == 1 and 2 * marks[0].sum() > len(marks[0]):
            return [first]
        several = [part.columns for part in parts]
        columns = {
            name: numpy.concatenate([each[name][mark] for each, mark in zip(several, marks, strict=True)])
            for name in COMBINED
        }
        return list(cls.listed(first.space, columns, first.replicas).parts())

    def unreplicated(self) -> Grid:
        """The same rows and micro-batches without replicas, where a layout that is valid with some is valid and needs least."""
        other = copy.copy(self)
        other.replicas = self.numpy.ones(1)
        other._arrays()
        return other

    def _possible(self, spread: bool) -> tuple[Any, Any]:
        """Rows that can exist with some number of stages, and the replicas that one of them can have."""
        numpy, space, rows = self.numpy, self.space, self.rows
        valid = self.valid(("ep", "etp")) & self.valid(("tp", "cp"), sequence_parallel=spread)
        possible, most = numpy.zeros(len(valid), dtype=bool), 0
        for pp in space.pp:
            dp = space.gpus / (rows["tp"] * rows["cp"] * pp)
            own = space.gpus / pp / (rows["ep"] * rows["etp"])
            batches = space.global_batch / numpy.maximum(dp, 1e-9)
            these = valid & whole(numpy, dp) & whole(numpy, own) & whole(numpy, batches)
            most = max(most, dp[these].max() if these.any() else 0)
            possible |= these
        return possible, self.replicas <= most

    def valid(self, names: tuple[str, str], **rest: Any) -> Any:
        """Ask `Layout.valid` about two sizes of each row, batch and schedule left out; a mask [rows]."""
        numpy, space = self.numpy, self.space
        first, second = (self.rows[name].astype("int64") for name in names)
        distinct, places = numpy.unique(first << WORD | second, return_inverse=True)
        flags = []
        for pair in distinct.tolist():
            key = names, pair, *rest.values()
            if key not in self.flags:
                sizes = dict(zip(names, divmod(pair, 1 << WORD), strict=True))
                dp = math.prod(sizes.values()) if "ep" in names else 1
                balanced_routing = {} if "ep" in names else {"expert_imbalance": 1.0}
                layout = msgspec.structs.replace(
                    space.base, dp=dp, global_batch=dp, seq_len=space.seq_len, **sizes, **rest, **balanced_routing
                )
                self.flags[key] = not layout.valid(space.model)
            flags.append(self.flags[key])
        return numpy.array(flags, dtype=bool)[places.reshape(-1)]

    @property
    def size(self) -> int:
        """The number of layouts of the grid, valid or not."""
        return math.prod(self.dims)


class Space(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All layouts of a model on a number of GPUs: the values that each axis may have.

    lengths: a histogram of sequence lengths instead of `seq_len` alike ones; padded: whether batches of them are
    at_peak: arrays are of the fullest micro-batch, on which the memory rests
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
    at_peak: bool = False
    base: Layout = Layout(seq_len=1)

    # -- structures -----------------------------------------------------------------------------------------------------

    def splits(self, pp: int, parts: int) -> tuple[tuple[int, ...] | None, ...]:
        """Ways to split layers over pp stages of `parts` chunks: evenly (None), else by the best split; empty for no way."""
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
        """Yield all structures; those with the same split of layers are adjacent."""
        shared = self.model.partly or any(block.shares_weights for block in self.model.blocks)
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
                                    pp=pp,
                                    vpp=vpp,
                                    schedule=schedule,
                                    stage_layers=split,
                                    zero=zero,
                                    sequence_parallel=spread,
                                    recompute=again,
                                )

    def _schedules(self, pp: int) -> Iterator[tuple[Schedule, int]]:
        if pp == 1:
            # One stage has no schedule: locking another one asks for a pipeline.
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

    @cached_property
    def size(self) -> int:
        """The number of combinations of all axes, valid or not."""
        return len(list(self.structures())) * math.prod(len(getattr(self, name)) for name in SIZES)

    @property
    def narrowed(self) -> bool:
        """Return whether a search works out lower bounds of all layouts first, and little more of most."""
        return self.size >= SMALL and not self.model.own.states_splits

    def grids(self, spread: bool | None = None) -> Iterator[Grid]:
        """The grids: one for the values of tp and cp that give the same operations, cut where it would be long.

        spread: as in `Grid`
        """
        for values in self.alike():
            yield from Grid(self, values, spread).parts()

    def alike(self) -> Iterator[dict[str, tuple[int, ...]]]:
        """Yield values of all sizes that give the same operations."""
        by_tp: dict[object, list[int]] = {}
        for ranks in self.tp:
            grouped = [
                -(-mixer.num_key_value_heads // ranks) == mixer.num_attention_heads // ranks
                for block in self.model.blocks
                if isinstance(mixer := block.attention, Attention)
            ]
            by_tp.setdefault(tuple(grouped), []).append(ranks)
        values = {name: getattr(self, name) for name in SIZES}
        # Heads that were exchanged for tokens are put in order again, which is an operation of its own.
        apart = (
            [[1], [cp for cp in self.cp if cp > 1]] if self.base.cp_comm == "all_to_all" and 1 in self.cp else [self.cp]
        )
        if self.model.own.states_splits:
            yield from self._captured(values)
            return
        for tp in by_tp.values():
            for cp in filter(None, apart):
                yield {**values, "tp": tuple(tp), "cp": tuple(cp)}

    def _captured(self, values: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
        """Yield those of captured layers, whose operations were recorded for each number of ranks that split them."""
        own = self.model.own
        for tp, ep in itertools.product(self.tp, self.ep):
            etp = own.within_experts(tp, ep)
            if etp not in self.etp or list(own.splits.problems(tp=tp, ep=ep)):
                continue
            for batch in own.groups(self.micro_batch):
                yield {**values, "tp": (tp,), "ep": (ep,), "etp": (etp,), "micro_batch": tuple(batch)}

    def layout(self, structure: Structure, sizes: dict[str, Size], ragged: dict[str, Size] | None = None) -> Layout:
        """Return the layout of a structure with these sizes, by the names in `SIZES`: ints, or open arrays of many layouts.

        ragged: tokens and query-key pairs of a micro-batch; None: those of the job's sequence lengths, if it has any
        """
        within = sizes["tp"] * sizes["cp"] * structure.pp
        left = self.gpus // within if isinstance(within, int) else self.gpus / within
        if ragged is None:
            ragged = {} if self.lengths is None else of_lengths(self.lengths, sizes["micro_batch"], self.padded)
        return msgspec.structs.replace(
            self.base,
            dp=left,
            pp=structure.pp,
            vpp=structure.vpp,
            schedule=structure.schedule,
            stage_layers=structure.stage_layers,
            zero=structure.zero,
            sequence_parallel=structure.sequence_parallel,
            recompute=structure.recompute,
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            **sizes,
            **ragged,
        )


def whole(numpy: Any, value: Any) -> Any:
    """Return the mask of values that are whole numbers above 0."""
    return numpy.asarray((numpy.floor(value) == value) & (value >= 1))


def divisors(number: int) -> tuple[int, ...]:
    """Return all divisors of a number, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
