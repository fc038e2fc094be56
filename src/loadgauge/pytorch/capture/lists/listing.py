"""From a recorded step to the list of operations: by block, with what each reads, makes, keeps and moves, and what is alive."""

import bisect
import itertools
import math
from collections import Counter
from typing import Any

from loadgauge.core.base.by_key import lists
from loadgauge.core.base.errors import NotModelled, refuse
from loadgauge.core.layers.operations.profile import Row
from loadgauge.pytorch.capture.lists.blocks import Blocks, Unordered
from loadgauge.pytorch.capture.lists.listed import ENTRY, EXIT, Listing, Segment, pack
from loadgauge.pytorch.capture.lists.segment_writer import (
    PRODUCTS,
    SegmentWriter,
    Terms,
    add,
    less,
    pruned,
    size_of,
    summed,
    terms_of,
    total_of,
)
from loadgauge.pytorch.capture.record import Recorded
from loadgauge.pytorch.capture.symbols.sizes import Formula, written
from loadgauge.pytorch.capture.symbols.symbolic import Symbols
from loadgauge.pytorch.record.allocations import GRADIENTS, INPUTS, OPTIMIZER, WEIGHTS
from loadgauge.pytorch.record.observe import BACKWARD, FORWARD, STEP
from loadgauge.pytorch.record.recording import Op


class Lister:
    """Reads the last step of a recording: storages, segments, and the moments of each."""

    def __init__(
        self, run: Recorded, blocks: Blocks, symbols: Symbols | None, compute: int, wide: bool = False
    ) -> None:
        self.run, self.blocks, self.compute = run, blocks, compute
        self.wide = {number for number, weight in run.weights.items() if weight.itemsize > compute or weight.wide}
        if wide:  # adapters that are held in float32, though what was run read them in 16 bits
            self.wide |= {
                number
                for number, weight in run.weights.items()
                if weight.trained and ".modules_to_save." not in weight.name
            }
        self.partly = not all(weight.trained for weight in run.weights.values())
        self.names, self.hints = ({}, {}) if symbols is None else (symbols.names, symbols.hints)
        self._sizes: dict[Any, Formula] = {}
        self.nbytes = [self.size(nbytes) for nbytes in run.nbytes]
        pairs = itertools.pairwise(range(len(run.ops)))
        starts = [end for start, end in pairs if run.ops[start].phase == STEP and run.ops[end].phase == FORWARD]
        refuse(not starts, "a step whose optimizer does nothing cannot be listed", NotModelled)
        start = max(
            (end for end in starts if end <= run.second), default=starts[0]
        )  # a step may have several optimizers
        ops = [(index, op) for index, op in enumerate(run.ops) if index >= start]
        self.forward = [(index, op) for index, op in ops if op.phase == FORWARD and not op.marks]
        self.backward = [(index, op) for index, op in ops if op.phase == BACKWARD]
        refuse(not self.backward, "a step without a backward cannot be listed", NotModelled)
        first, last = self.backward[0][0], self.backward[-1][0]
        self.several = any(first < index < last for index, _ in self.forward)
        """Of a step with several backward passes, as of two networks, or of a gradient in the loss."""
        if self.several and blocks.stacks:
            raise Unordered("", "runs again between two backward passes")
        self.forward = [(index, op) for index, op in self.forward if self.several or index < first]
        self._segments()
        self._storages()

    def size(self, expression: Any) -> Formula:
        """An expression as a formula, each converted once."""
        if expression not in self._sizes:
            self._sizes[expression] = Formula.of(expression, self.names)
        return self._sizes[expression]

    def grows(self, size: Formula) -> bool:
        """Return whether a change of so many bytes is an allocation: of one such as b*s - b it is not the first term that tells."""
        signs = {factor > 0 for _, factor in size.terms}
        return bool(size.at(self.hints) > 0) if len(signs) > 1 else signs == {True}

    # -- segments ------------------------------------------------------------------------------------------------------

    def _segments(self) -> None:
        """Number of the segment of each operation of the forward: 0 is the entry, blocks follow in the order in which they run."""
        self.order: list[str] = []
        of: list[int] = []
        for _, op in self.forward:
            block = self.blocks.place(op.module)
            if block is not None:
                path = self.blocks.stacks[block[0]].paths[block[1]]
                if not self.order or path != self.order[-1]:
                    if path in self.order:
                        raise Unordered(path, "runs more than once in a forward")
                    self.order.append(path)
            of.append(len(self.order))
        last = max((at for at, (_, op) in enumerate(self.forward) if self.blocks.place(op.module)), default=-1)
        if not self.order:  # a model without blocks that repeat is one block
            self.order, of = [""], [1] * len(self.forward)
            last = len(self.forward) - 1
        # What runs between two blocks belongs to the next one; what follows the last, to the exit.
        self.segment: list[int] = []
        for at, (_, op) in enumerate(self.forward):
            inside = self.blocks.place(op.module) is not None
            if at > last:
                self.segment.append(len(self.order) + 1)
            elif inside or not of[at] or self.order == [""]:
                self.segment.append(of[at])
            else:
                self.segment.append(of[at] + 1)
        self.count = len(self.order) + 2
        self.index: list[int] = []
        counted: Counter[int] = Counter()
        for number in self.segment:
            self.index.append(counted[number])
            counted[number] += 1
        self.orders: list[int] = []
        self.of_order: list[int] = []
        for at, (_, op) in enumerate(self.forward):
            if not self.orders or op.order > self.orders[-1]:
                self.orders.append(op.order)
                self.of_order.append(at)

    def maker_of(self, order: int) -> int:
        """The operation of the forward, by its place, whose backward a node of the graph is."""
        node = self.of_order[max(bisect.bisect_right(self.orders, order) - 1, 0)]
        while node in self.making:  # a product with 4 bits is one node, whose first operations make its matrix
            node += 1
        return node

    def source(self, number: int) -> int:
        """The parameter that a storage is a copy of, in 16 bits; else the storage itself."""
        return self.unpacked.get(number, self.casts.get(number, number))

    # -- storages ------------------------------------------------------------------------------------------------------

    def _storages(self) -> None:
        """Producer, readers and keepers of each storage of the step, and the segment that its bytes belong to."""
        run = self.run
        self.made: dict[int, int] = {}
        """Place in the forward of the operation that made a storage."""
        self.readers: dict[int, list[int]] = {}
        for at, (_, op) in enumerate(self.forward):
            for number in op.reads:
                self.readers.setdefault(number, []).append(at)
            for number in op.makes:
                if number not in op.reads and not self._given(number):
                    self.made.setdefault(number, at)
        self.casts = {
            op.makes[0]: op.reads[0]
            for _, op in self.forward
            if op.copies
            and len(op.reads) == 1
            and op.reads[0] in run.weights
            and op.makes
            and op.reads[0] not in self.wide
            and run.stream.records[op.makes[0]].dtype.itemsize < run.weights[op.reads[0]].itemsize
        }
        """Copies of parameters that autocast makes, and of which; those of adapters are tensors like others."""
        self._unpack()
        self.alive = self._alive_at_backward()
        self.held = self._held()
        keepers = lists((number, self.maker_of(order)) for number, order in run.keepers if number in self.alive)
        self.keepers = {number: sorted(set(keepers.get(number) or self._holders(number))) for number in self.alive}
        self.keeping = {at for places in keepers.values() for at in places}
        self.owner: dict[int, int] = {}
        self.inputs: dict[int, list[int]] = {}
        for number in sorted(set(self.made) | self.alive):
            own = self.segment[self.made[number]]
            read = {self.segment[at] for at in self.readers.get(number, ())} - {own}
            if read == {own + 1} and number not in self.casts:
                self.inputs.setdefault(own + 1, []).append(number)
                if number in self.alive and all(self.segment[at] > own for at in self.keepers[number]):
                    own += 1
            self.owner[number] = own

    def _unpack(self) -> None:
        """Dequantised copies of 4-bit matrices, forward and backward: alive while a product reads them."""
        self.unpacked: dict[int, int] = {}
        """Such a matrix, and the parameter that it is made of."""
        self.making: set[int] = set()
        """Places in the forward of what makes them and their scales."""
        for _, op in (*self.forward, *self.backward):
            source = next((read for read in op.reads if read in self.run.weights and self.run.weights[read].base), None)
            if op.packs and source is not None:
                self.unpacked[op.makes[0]] = source
            elif op.copies and op.makes and op.reads and op.reads[0] in self.unpacked:  # to the dtype of a gradient
                self.unpacked[op.makes[0]] = self.unpacked[op.reads[0]]
        read = {number for _, op in self.forward if op.name.rpartition("::")[2] in PRODUCTS for number in op.reads}
        waiting = [self.made[number] for number in self.unpacked if number in self.made and number in read]
        while waiting:
            at = waiting.pop()
            if at not in self.making:
                self.making.add(at)
                waiting += [self.made[number] for number in self.forward[at][1].reads if number in self.made]

    def _holders(self, number: int) -> list[int]:
        """Who holds what no node of the graph keeps: its maker. Below what is trained, a leaf is the input of who reads it."""
        node = self.made[number]
        later = [at for at in self.readers.get(number, ()) if self.segment[at] > self.segment[node]]
        return later[:1] if self.partly and later else [node]

    def _given(self, number: int) -> bool:
        return self.run.stream.category(number) in (WEIGHTS, INPUTS, OPTIMIZER) or number in self.run.weights

    def _alive_at_backward(self) -> set[int]:
        """Storages of the forward that are alive when backward begins."""
        end = [event for event, name in self.run.stream.phases if name == BACKWARD][-1]
        changes = zip(self.run.ids[:end], self.run.changes[:end], strict=True)
        last = {number: change for number, change in changes if number in self.made and number not in self.casts}
        return {number for number, change in last.items() if self.grows(self.size(change))}

    def _held(self) -> set[int]:
        """Storages that the module put aside in one step, which lie there until the next puts its own in its place."""
        first = self.forward[0][0]
        there = self._there(self.run.ops[first - 1].events if first else 0)
        recast = {op.makes[0] for op in self.run.ops if op.copies and op.makes and self.run.weights.keys() & op.reads}
        stream = self.run.stream
        held = {number for number in there if stream.records[number].op != "external"}
        held -= recast  # a parameter in another dtype is one still
        return {storage for storage in held if not self._given(storage) and stream.category(storage) != GRADIENTS}

    def _there(self, event: int) -> set[int]:
        """Storages that are alive at an event."""
        # Made, then let go: a formula such as b*s - b has no sign of its own.
        return {number for number, times in Counter(self.run.ids[:event]).items() if times % 2}

    # -- what is alive -------------------------------------------------------------------------------------------------

    def rows(self) -> tuple[dict[int, list[Row]], dict[int, list[Row]], dict[int, list[Row]]]:
        """The moments of each segment: of its forward, of a forward that keeps nothing, and of its backward."""
        forward: dict[int, list[Row]] = {}
        bare: dict[int, list[Row]] = {}
        backward: dict[int, list[Row]] = {}
        kept: list[Terms] = [{} for _ in range(self.count + 1)]
        for number in self.alive:
            add(kept[self.owner[number]], self.nbytes[number])
        before = list(itertools.accumulate(kept, summed, initial=Terms()))
        gone_after: dict[int, list[int]] = {}
        """Of each operation of the forward, what no later one of its block reads."""
        for number in self.alive:
            own = self.segment[self.made[number]]
            read = [at for at in self.readers.get(number, ()) if self.segment[at] == own]
            if self.owner[number] == own:
                gone_after.setdefault(max(read, default=self.made[number]), []).append(number)
        live: Terms = {}
        lying: Terms = {}  # gradients in the middle of a step with several backward passes
        counted: set[int] = set()
        there: set[int] = set()
        gradients: Counter[int] = Counter()
        pending = self._pending()
        droppable: dict[int, Terms] = {}

        def note(ahead: bool, at_work: int, index: int, latest: int) -> None:
            """Write down what is alive now."""
            now = summed(live, lying) if ahead else live
            row = Row(index, less(now, before[at_work]), gradients[at_work], latest)
            (forward if ahead else backward).setdefault(at_work, []).append(row)
            if ahead:
                own = Row(index, less(terms_of(row.live), droppable.get(at_work, {})))
                bare.setdefault(at_work, []).append(own)

        begin = self.run.ops[self.forward[0][0] - 1].events if self.forward[0][0] else 0
        steps = [(at, op, True) for at, (_, op) in enumerate(self.forward)]
        steps += [(self.maker_of(op.order), op, False) for _, op in self.backward]
        steps.sort(key=lambda step: step[1].events)
        event = begin
        if self.several:
            for number in self._there(begin):
                if self.run.stream.category(number) == GRADIENTS:
                    gradients[1] += self._elements(number)
                    add(lying, self.nbytes[number])
        self.first_backward: dict[int, Terms] = {}
        unpacked: set[int] = set()
        behind = self.count
        for at, op, ahead in steps:
            if ahead:
                at_work = self.segment[at]
            else:
                behind = min(behind, self.segment[at])
                at_work = behind
            # A checkpoint runs again for the first node that kept something; what came before has let go of what it used.
            begins = not ahead and at_work not in unpacked and at in self.keeping and self.segment[at] == at_work
            if begins:
                unpacked.add(at_work)
            begins = begins or (not ahead and at_work not in self.first_backward)
            latest = 0
            index = self.index[at] if self.segment[at] == at_work else 0
            for number, change in zip(
                self.run.ids[event : op.events], self.run.changes[event : op.events], strict=True
            ):
                terms = self.size(change)
                if not terms.terms or self._given(number) or number in self.casts:
                    continue
                grows = self.grows(terms)
                if begins and grows:
                    begins, self.first_backward[at_work] = False, dict(live)
                there |= {number} if self.several and grows and not ahead else set()
                if self.several and self.run.stream.category(number) == GRADIENTS:
                    elements = self._elements(number)
                    gradients[1] += elements if grows else -elements
                    latest += elements if grows and not ahead else 0
                    add(lying, terms)
                    continue
                whole = self.run.stream.category(number) == GRADIENTS and number not in self.run.rows
                if not ahead and (number in pending or whole):
                    if grows and number not in counted:
                        counted.add(number)
                        elements = pending.get(number) or self._elements(number)
                        if self.wide:  # elements of the gradients' usual dtype
                            dtype = self.run.stream.records[number].dtype
                            elements *= max(1, dtype.itemsize // (self.compute * (1 + dtype.is_complex)))
                        gradients[at_work] += elements
                        latest += elements
                    continue
                if number not in self.made and number not in self.held and ahead:
                    if not self.several or (number not in there and not grows):
                        continue  # of an earlier step
                    there ^= {number}
                add(live, terms)
                if grows:
                    note(ahead, at_work, index, latest)
            if begins:
                self.first_backward[at_work] = dict(live)
            if not ahead and latest:
                note(ahead, at_work, index, latest)
            event = op.events
            if ahead:
                # Where nothing is kept, what a later operation of the same block does not read is gone.
                gone = droppable.setdefault(at_work, {})
                for number in gone_after.get(at, ()):
                    add(gone, self.nbytes[number])
        self.kept, self.before = kept, before
        return forward, bare, backward

    def _elements(self, number: int) -> int:
        record = self.run.stream.records[number]
        return math.prod(int(size) for size in record.shape) * (2 if record.dtype.is_complex else 1)

    def _pending(self) -> dict[int, int]:
        """Parts of the gradient of a tied parameter, by their storage: elements of it, from when they are made."""
        owners: dict[int, set[int]] = {}
        for at, (_, op) in enumerate(self.forward):
            for number in op.reads:
                source = self.source(number)
                if source in self.run.weights:
                    owners.setdefault(source, set()).add(self.segment[at])
        tied = {math.prod(self.run.weights[number].shape) for number, places in owners.items() if len(places) > 1}
        pending = {}
        for _, op in self.backward:
            for number in op.makes:
                record = self.run.stream.records[number]
                if (
                    number not in op.reads
                    and number not in self.made
                    and all(isinstance(size, int) for size in record.shape)
                ):
                    elements = math.prod(record.shape)
                    if elements in tied and not record.category.startswith("optim"):
                        pending[number] = elements
        return pending

    # -- operations ----------------------------------------------------------------------------------------------------

    def listing(self, names: tuple[str, ...], sizes: dict[str, int], guards: tuple[str, ...]) -> Listing:
        """Put everything together."""
        forward, bare, backward = self.rows()
        owned: dict[int, int] = {}
        # The operations of backward, by the place of the operation of the forward.
        behind = lists((self.maker_of(op.order), op) for _, op in self.backward)
        segments = [self._segment(number, forward, bare, backward, behind, owned) for number in range(self.count)]
        held: Terms = {}
        for number, at in self.made.items():
            others = {self.segment[node] for node in self.readers.get(number, ())} - {self.segment[at]}
            inner = others - {self.count - 1}
            if len(inner) > 1 and number not in self.alive and number not in self.casts:
                add(held, self.nbytes[number])
        packed, table = pack(segments)
        return Listing(
            names=names,
            sizes=dict(sizes),
            guards=guards,
            packed=packed,
            table=table,
            held=size_of(held),
            places=tuple(self.order),
            values=self.run.values,
            seconds=self.run.seconds,
            unheard=self.run.unheard,
            of_sound=self.run.of_sound,
            assumed=self.run.assumed,
        )

    def _segment(
        self, number: int, forward: Any, bare: Any, backward: Any, behind: dict[int, list[Op]], owned: dict[int, int]
    ) -> Segment:
        places = [at for at, segment in enumerate(self.segment) if segment == number]
        base = self.order[number - 1] if 0 < number < self.count - 1 else ""
        word = ENTRY if number == 0 else EXIT if number == self.count - 1 else "block"
        behind_rows = backward.get(number, [])
        writer = SegmentWriter(self, word, base, number, owned, behind, bool(behind_rows))
        for at in places:
            writer.write(at, behind.get(at, []))
        writer.rest()
        if number == 0:
            always = writer.always()
            for rows in (forward, bare, backward):
                rows[0] = [
                    Row(row.at, size_of(summed(terms_of(row.live), always)), row.gradients, row.latest)
                    for row in rows.get(0, [])
                ]
        entering = self.inputs.get(number, [])
        extra = total_of(
            self.nbytes[storage]
            for storage in entering
            if self.owner.get(storage) != number or storage not in self.alive
        )
        first = self.first_backward.get(number)
        rerun: list[Row] = []
        keeping = [
            self.index[at]
            for storage in self.alive
            if self.owner[storage] == number
            for at in self.keepers[storage]
            if self.segment[at] == number
        ]
        if first is not None and keeping:
            beside = terms_of(less(terms_of(less(first, self.before[number])), self.kept[number]))
            rerun = [
                Row(row.at, size_of(summed(terms_of(row.live), beside)))
                for row in forward.get(number, [])
                if row.at < max(keeping)
            ]
        behind_rows = backward.get(number, [])  # of the entry with what is always there
        return Segment(
            name=word,
            operations=tuple(writer.operations),
            forward=pruned(forward.get(number, []), apart=False),
            bare=pruned(bare.get(number, []), apart=False),
            rerun=pruned(rerun, apart=False),
            backward=pruned(behind_rows, apart=False),
            each=pruned(behind_rows, apart=True),
            entering=size_of(extra),
            outside=frozenset(writer.outside),
        )


def guards_of(symbols: Symbols) -> tuple[str, ...]:
    """Return what a capture asked of its sizes, as text."""
    return tuple(dict.fromkeys(written(guard, symbols.names) for guard in symbols.guards))
