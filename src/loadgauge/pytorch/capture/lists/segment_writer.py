"""Writes the operations of one segment of a recorded step: with what each reads, makes, keeps, moves and exchanges."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from loadgauge.core.layers.operations.operations import (
    LYING,
    Collective,
    Gemm,
    Operation,
    OperationKind,
    Tensor,
    Weight,
)
from loadgauge.core.layers.operations.profile import Row
from loadgauge.pytorch.capture.lists.exchanges import exchange_of
from loadgauge.pytorch.capture.lists.listed import ENTRY, EXIT, RANKS
from loadgauge.pytorch.capture.symbols.sizes import Formula
from loadgauge.pytorch.record.allocations import INPUTS, WEIGHTS
from loadgauge.pytorch.record.recording import Op

ZERO = Formula(())
_KINDS: tuple[tuple[str, OperationKind], ...] = (
    ("attention", "attention"), ("embedding", "lookup"), ("conv", "convolution"), ("norm", "norm"), ("softmax", "elementwise"),
    ("nll_loss", "loss"), ("cross_entropy", "loss"),
)  # fmt: skip
_TWICE = ("batch_norm", "group_norm")
"""Norms of more than a kernel has at hand: their input is read for the statistics, and once more; so is what backward reads."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "mv", "dot")


class SegmentWriter:
    """Writes the operations of one segment."""

    def __init__(
        self,
        lister: Any,
        word: str,
        base: str,
        number: int,
        owned: dict[int, int],
        behind: dict[int, list[Op]],
        trains: bool,
    ) -> None:
        self.trains = trains
        self.lister, self.word, self.base, self.number, self.owned = lister, word, base, number, owned
        self.operations: list[Operation] = []
        self.outside: set[str] = set()
        self._tensor: dict[int, Tensor] = {}
        self._weight: dict[int, Weight] = {}
        self._names: Counter[str] = Counter()
        self.behind: Terms = {}
        """Bytes of kernels of backward beside those of what ran forward: sums of gradients, casts, biases."""
        places = [at for at, segment in enumerate(lister.segment) if segment == number]
        self.lowest = (
            0
            if not lister.partly
            else min((at for at in places if at in behind or at in lister.keeping), default=len(lister.forward))
        )
        """The first operation that runs backward or keeps something for it."""
        self.keeps: dict[int, list[int]] = {}
        for storage, owner in lister.owner.items():
            if storage in lister.alive and owner == number:
                own = [at for at in lister.keepers[storage] if lister.segment[at] == number] or [lister.made[storage]]
                if lister.segment[own[0]] != number:
                    own = [lister.segment.index(number)]
                for at in own:
                    self.keeps.setdefault(at, []).append(storage)
        entering = lister.inputs.get(number, [])
        self.main = max(entering, key=lambda storage: lister.made[storage], default=-1)

    def name(self, op: Op) -> str:
        """A name of its own: the module below the block, and the operation."""
        module = op.module[len(self.base) + 1 :] if self.base and op.module.startswith(self.base) else op.module
        short = op.name.rpartition("::")[2].strip("_")
        text = ".".join(part for part in (self.word if self.word != "block" else "", module, short) if part)
        self._names[text] += 1
        return text if self._names[text] == 1 else f"{text}.{self._names[text]}"

    def tensor(self, storage: int, name: str) -> Tensor:
        """The tensor that a storage is."""
        if storage not in self._tensor:
            lister = self.lister
            role: Any = "activation"
            category = lister.run.stream.category(storage)
            if category in (INPUTS, WEIGHTS):
                role, name = "index", f"given.{len(self._tensor)}"
                self.outside.add(name)
            elif storage == self.main:
                name = "input"
            elif storage in lister.made and lister.segment[lister.made[storage]] != self.number:
                name = f"from.{'block' if lister.segment[lister.made[storage]] else ENTRY}.{len(self._tensor)}"
                if storage not in lister.inputs.get(self.number, ()):
                    self.outside.add(name)
            dtype = lister.run.stream.records[storage].dtype
            if not (dtype.is_floating_point or dtype.is_complex):
                role = "index"
            self._tensor[storage] = tensor_of(name, lister.nbytes[storage], role, dtype.itemsize)
        return self._tensor[storage]

    def weight(self, storage: int, kind: str, name: str = "") -> Weight:
        """The weight that a parameter is."""
        if storage not in self._weight:
            lister = self.lister
            tensor = lister.run.weights[storage]
            shape = (int(tensor.shape[-2]), int(tensor.shape[-1])) if len(tensor.shape) >= 2 else None
            own = (
                tensor.name[len(self.base) + 1 :]
                if self.base and tensor.name.startswith(f"{self.base}.")
                else tensor.name
            )
            self._weight[storage] = Weight(
                name or own,
                math.prod(tensor.shape),
                tensor.shards,
                kind if shape else "vector",
                tensor.trained and not tensor.rows,
                tensor.base,
                tensor.expert,
                cast=storage in lister.casts.values(),
                shape=shape,
                copies=math.prod(tensor.shape[:-2]),
                wide=storage in lister.wide,
                rows=tensor.rows,
            )
        return self._weight[storage]

    def write(self, at: int, behind: list[Op]) -> None:
        """Write one operation, with its backward."""
        lister = self.lister
        op = lister.forward[at][1]
        name = self.name(op)
        short = op.name.rpartition("::")[2]
        exchange, product = exchange_of(op.name), short in PRODUCTS
        kind = "gemm" if product else "collective" if exchange is not None else kind_of(short)
        read = [lister.source(number) for number in op.reads]
        used = [number for number in read if number in lister.run.weights]
        head = product and self.word == EXIT and bool(used)
        weights, borrows = [], []
        returned: list[Collective] = []
        # The time of making 16 bits of 4 is that of the product that reads them (`roofline.dequantising`).
        casting = (bool(op.makes) and op.makes[0] in lister.casts) or at in lister.making
        for number in () if casting else used:
            label = "head" if head else "table" if kind == "lookup" else "matrix"
            owner = lister.run.weights[number]
            text = "head.logits.weight" if head and len(owner.shape) == 2 else ""
            weight = self.weight(number, label, text)
            if self.owned.setdefault(number, self.number) == self.number:
                if not any(weight is other for operation in self.operations for other in operation.weights):
                    weights.append(weight)
                    if owner.summed:
                        returned.append(Collective("all_reduce", "tp", lister.nbytes[number], RANKS["tp"]))
            else:
                borrows.append(weight)
        logits = head and bool(op.makes)
        results = [number for number in op.makes if number not in op.reads and number not in lister.casts]
        inputs = tuple(dict.fromkeys(self.tensor(read, name) for read in op.reads if self._tensorial(read)))
        outputs = tuple(
            self.tensor(number, ("head.logits" if logits else name) + (f":{index}" if index else ""))
            for index, number in enumerate(results)
            if number in lister.made
        )
        if any(tensor.name == "head.logits" for tensor in outputs):
            name = "head.logits"
        keeps = tuple(
            self.tensor(number, f"{name}.kept" + (f":{index}" if index else ""))
            for index, number in enumerate(self.keeps.get(at, ()))
        )
        gemms = self._gemms(op, short)
        flops = ZERO if op.flops is None else lister.size(op.flops)
        passes = 2 if any(part in short for part in _TWICE) else 1
        looked_up = {number for number in used if lister.run.weights[number].rows}
        inner: Terms = {}
        weighed: Terms = {}
        moved: Terms = {}
        for other in behind:
            if (sent := exchange_of(other.name)) is not None:
                returned.append(self._exchange(*sent, other))
            elif other.flops:
                sources = {lister.source(number) for number in other.reads}
                trains = bool(used) and not (sources & set(used))
                add(weighed if trains else inner, lister.size(other.flops))
            own = not gemms and (kind not in ("norm", "convolution") or kind_of(other.name) == kind)
            if own or not other.flops:  # a sum of gradients, a cast: not at the rate of the kernels of this kind
                for number in (*other.reads * (passes if own else 1), *other.makes):
                    if number not in looked_up:
                        add(moved if own else self.behind, lister.nbytes[number])
        again: Terms = {}
        if kind == "attention" and gemms and inner:  # else what is frozen has no backward
            doubled = summed(flops_terms := terms_of(flops), flops_terms)
            again, inner = terms_of(less(inner, doubled)), doubled
        moves = None
        if not gemms:
            ahead = total_of(
                lister.nbytes[number]
                for number in (*op.reads * passes, *(number for number in op.makes if number not in lister.casts))
                if not (kind == "lookup" and number in lister.run.weights)
            )
            for number in looked_up:  # rows are read, and where they are updated read and written
                for terms in (ahead, moved, moved):
                    add(terms, self._rows(op, lister.run.weights[number]))
            ahead = {} if casting or exchange is not None else ahead
            moves = (size_of(ahead), ZERO if casting else size_of(moved))
        elif kind not in ("gemm", "attention"):
            kind = "gemm"
        ahead_flops, behind_flops = size_of(inner), size_of(weighed)
        spared = bool(gemms) and not ahead_flops.terms and bool(behind_flops.terms)
        turns, counting = op.turns
        self.operations.append(
            Operation(
                name,
                kind,
                inputs,
                outputs,
                tuple(weights),
                keeps,
                gemms=gemms,
                forward_flops=flops,
                input_gradient_flops=ahead_flops,
                weight_gradient_flops=behind_flops,
                rerun_flops=size_of(again),
                forward_comm=() if exchange is None else (self._exchange(*exchange, op),),
                backward_comm=tuple(returned),
                borrows=tuple(borrows),
                computed_share=0.5 if op.causal else 1.0,
                moves=moves,
                spares=frozenset(tensor.name for tensor in inputs) if spared else frozenset(),
                gradients=at >= self.lowest and self.trains,
                implicit=self._implicit(op, flops),
                strided=op.strided,
                taps=math.prod(map(int, op.shapes[1][2:])) * (1 if op.groups > 0 else -1) if op.groups else 1,
                steps=op.steps,
                turns=lister.size(turns * (1 if counting < 0 else op.shapes[0][counting])) if turns else 0,
            )
        )

    def _rows(self, op: Op, table: Any) -> Formula:
        """Bytes of the rows that an operation looks up in a table: one for each id."""
        ids = max((self.tensor(read, "") for read in op.reads if self._tensorial(read)), key=lambda one: one.itemsize)
        return Formula(
            tuple((product, factor * table.shape[-1] * table.itemsize) for product, factor in ids.numel.terms)
        )

    def _exchange(self, kind: str, axis: str, op: Op) -> Collective:
        """An exchange; its bytes are those of the whole tensor: the larger of what goes in and what comes out."""
        sizes: list[Formula] = [self.lister.nbytes[number] for number in dict.fromkeys((*op.reads, *op.makes))]
        sent = max(sizes, key=lambda size: sum(factor for _, factor in size.terms))
        return Collective(kind, axis, sent, RANKS[axis])

    def _tensorial(self, number: int) -> bool:
        return (
            number not in self.lister.run.weights
            and number not in self.lister.casts
            and (number in self.lister.made or self.lister.run.stream.category(number) == INPUTS)
        )

    def _implicit(self, op: Op, flops: Formula) -> Gemm | None:
        """The product that a convolution is, of its places by their surroundings, which no tensor holds."""
        size, (turns, side) = self.lister.size, op.turns
        if turns:
            columns, inner = map(size, op.shapes[2])
            rows = divided(size(op.shapes[0][0]), turns) if side < 0 else size(op.shapes[0][1 - side])
            return Gemm(rows, columns, inner)
        if not op.groups or not flops.terms:
            return None
        weight, many = tuple(map(int, op.shapes[1])), abs(op.groups)
        first, rest = weight[0] // many, math.prod(weight[1:])
        columns, inner = (first, rest) if op.groups > 0 else (rest, first)
        return Gemm(divided(flops, 2 * math.prod(weight)), columns, inner, many)

    def _gemms(self, op: Op, short: str) -> tuple[Gemm, ...]:
        size, shapes = self.lister.size, [shape for shape in op.shapes if len(shape) > 1]
        if "attention" in short and len(shapes) >= 3 and len(shapes[0]) == 4:
            (b, heads, queries, width), keys, value = shapes[0], shapes[1][2], shapes[2][3]
            many = size(b * heads)
            queries, keys = size(queries), size(keys)
            return Gemm(queries, keys, size(width), many), Gemm(queries, size(value), keys, many)
        if short not in PRODUCTS or len(shapes) < 2:
            return ()
        left, right = shapes[-2:]
        if short == "_grouped_mm" and len(right) == 3:
            left, right = shapes[:2]
            many = right[0]
            return (Gemm(divided(size(left[0]), int(many)), size(right[2]), size(right[1]), size(many)),)
        if len(left) == 3:
            return (Gemm(size(left[1]), size(right[2]), size(left[2]), size(left[0])),)
        return (Gemm(size(left[0]), size(right[-1]), size(left[-1])),)

    def always(self) -> Terms:
        """Write what is there in the whole step beside weights and states, inputs and buffers, and return its bytes."""
        lister = self.lister
        total: Terms = {}
        # bitsandbytes' layers exchange a bias for one in another dtype when they first run.
        exchanged = lister.run.weights.keys() | {
            number
            for number, change in zip(lister.run.ids, lister.run.changes, strict=True)
            if (size := lister.size(change)).terms and not lister.grows(size)
        }
        stream = lister.run.stream
        there = {
            name: [
                number
                for number in range(len(lister.nbytes))
                if stream.category(number) == category and number not in exchanged and stream.records[number].phase == 0
            ]
            for name, category in ((LYING[0], INPUTS), (LYING[1], WEIGHTS))
        }
        there[LYING[2]] = sorted(lister.held)
        for name, numbers in there.items():
            if own := total_of(lister.nbytes[number] for number in numbers):
                lying = tensor_of(name.removeprefix("entry."), size_of(own), "index", 1)
                self.operations.insert(0, self._nothing(name, keeps=(lying,)))
                total = summed(total, own)
        sizes = [
            lister.nbytes[number]
            for number in {number for _, op in lister.backward for number in op.makes} & lister.run.rows
        ]
        if rows := total_of(sizes):
            largest = max(sizes, key=lambda size: size.at(lister.hints))
            more = {"workspace": largest, "backward_workspace": size_of(rows)}
            self.operations.insert(0, self._nothing(LYING[3], **more))
        return total

    def rest(self) -> None:
        """Write the parameters that no operation reads, and the end of the entry: what the first block takes."""
        lister = self.lister
        read = {lister.casts.get(number, number) for _, op in lister.forward for number in op.reads}
        for number, tensor in lister.run.weights.items():
            if number not in read and number not in self.owned:
                block = lister.blocks.place(tensor.name)
                own = (
                    0
                    if block is None
                    else lister.order.index(path) + 1
                    if (path := lister.blocks.stacks[block[0]].paths[block[1]]) in lister.order
                    else 0
                )
                if own == self.number:
                    self.owned[number] = own
                    unused = (self.weight(number, "vector"),)
                    self.operations.append(self._nothing(f"unused.{tensor.name}", weights=unused))
        if self.behind:
            moves = (ZERO, size_of(self.behind))
            self.operations.append(Operation("gradients.beside", "elementwise", (), (), moves=moves))
        entering = lister.inputs.get(self.number + 1, [])
        if self.word != EXIT and entering:
            last = max(entering, key=lambda storage: lister.made[storage])
            end = (self.tensor(last, "output"),)
            self.operations.append(self._nothing(f"{self.word}.output", end, end))
        if not self.operations or (self.word == ENTRY and not self.operations[-1].outputs):
            nothing = (Tensor(f"{self.word}.nothing", 0, 1),)
            self.operations.append(self._nothing(f"{self.word}.nothing", nothing, nothing))

    def _nothing(self, name: str, *tensors: tuple[Tensor, ...], **more: Any) -> Operation:
        """An operation that does nothing with its inputs and outputs."""
        inputs, outputs = tensors or ((), ())
        return Operation(name, "view", inputs, outputs, computed_share=1.0, gradients=self.trains, **more)


def kind_of(name: str) -> OperationKind:
    return next((kind for part, kind in _KINDS if part in name), "elementwise")


Terms = dict[str, int]
"""A formula as factors by product."""


def divided(size: Formula, by: int) -> Formula:
    if all(factor % by == 0 for _, factor in size.terms):
        return Formula(tuple((product, factor // by) for product, factor in size.terms))
    inner = " + ".join(f"{factor}*{product}" for product, factor in size.terms)
    return Formula(((f"(({inner})//{by})", 1),))


def tensor_of(name: str, nbytes: Formula, role: Any, itemsize: int) -> Tensor:
    """A storage of so many bytes in elements of a dtype, where it has whole ones."""
    if any(factor % itemsize for _, factor in nbytes.terms):
        return Tensor(name, nbytes, 1, role)
    return Tensor(name, divided(nbytes, itemsize), itemsize, role)


def add(total: Terms, size: Formula) -> None:
    for product, factor in size.terms:
        value = total.get(product, 0) + factor
        if value:
            total[product] = value
        else:
            total.pop(product, None)


def total_of(sizes: Iterable[Formula]) -> Terms:
    """The sum of formulas, as terms."""
    total: Terms = {}
    for size in sizes:
        add(total, size)
    return total


def terms_of(size: Formula) -> Terms:
    return dict(size.terms)


def size_of(terms: Terms) -> Formula:
    return Formula(tuple(sorted((product, factor) for product, factor in terms.items() if factor)))


def less(total: Terms, other: Terms) -> Formula:
    left = dict(total)
    for product, factor in other.items():
        left[product] = left.get(product, 0) - factor
    return size_of(left)


def summed(first: Terms, second: Terms) -> Terms:
    total = dict(first)
    for product, factor in second.items():
        total[product] = total.get(product, 0) + factor
    return total


def pruned(rows: Iterable[Row], *, apart: bool) -> tuple[Row, ...]:
    """Rows without those that another one is never below. apart: rows of several operations are compared with their own alone"""
    kept: dict[int, list[tuple[Row, Terms]]] = {}
    for row in rows:
        terms, others = terms_of(row.live), kept.setdefault(row.at if apart else 0, [])
        if not any(_covers(other, more, row, terms) for other, more in others):
            others[:] = [(other, more) for other, more in others if not _covers(row, terms, other, more)]
            others.append((row, terms))
    return tuple(row for others in kept.values() for row, _ in others)


def _covers(row: Row, more: Terms, other: Row, terms: Terms) -> bool:
    if row.gradients < other.gradients or row.latest < other.latest:
        return False
    return all(more.get(product, 0) >= factor for product, factor in terms.items()) and all(
        factor >= 0 or product in terms for product, factor in more.items()
    )
