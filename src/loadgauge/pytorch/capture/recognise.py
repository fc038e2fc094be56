"""Matrices that tensor parallelism can split where the class states no plan, found in a recorded step.

A matrix is split by rows, and those that it follows by columns, where between them there are only operations on each element, on
each head, or attention; where nothing else reads what they make; and where every layer of a kind does the same.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from loadgauge.pytorch.capture.requests.sharding import any_number

PRODUCTS = ("mm", "addmm")
ELEMENTS = frozenset(
    (
        "add", "sub", "mul", "div", "neg", "pow", "exp", "tanh", "sigmoid", "silu", "gelu", "relu", "erf", "sin", "cos", "cat",
        "clone", "to_copy", "where", "masked_fill", "native_dropout", "hardtanh", "clamp", "clamp_min", "leaky_relu", "elu", "mish",
        "softplus", "hardswish", "rsub", "copy", "square", "bmm", "baddbmm",
    )
)  # fmt: skip
"""Operations whose result for a column or a head depends on that column or head alone, by their names in ATen."""
OVER_KEYS = ("softmax", "safe_softmax")
"""These too, where they run over the keys of scores."""


def recognised(lister: Any) -> dict[str, str]:
    """A plan, as transformers writes them, of the pairs of matrices in a recorded step. lister: `listing.Lister`"""
    finder = _Finder(lister)
    paths = map(finder.path, finder.linear)
    seen = Counter(any_number(path) for path in paths if lister.blocks.place(path) is not None)
    styles: dict[int, str] = {}
    for at, columns in finder.pairs():
        if not any(styles.get(column, "colwise") != "colwise" for column in columns):
            styles[at] = "rowwise"
            styles.update(dict.fromkeys(columns, "colwise"))
    votes = Counter((any_number(finder.path(at)), style) for at, style in styles.items())
    return {path: style for (path, style), count in votes.items() if count == seen[path]}


class _Finder:
    """Walks back from matrices to those that they follow."""

    def __init__(self, lister: Any) -> None:
        self.lister = lister
        self.linear = {at: data for at in range(len(lister.forward)) if (data := self._data(at)) is not None}
        """The place of each product with a module's own matrix, and the storage that it reads beside."""

    def _short(self, at: int) -> str:
        name: str = self.lister.forward[at][1].name
        return name.rpartition("::")[2].partition(".")[0].strip("_")

    def path(self, at: int) -> str:
        """The module of an operation."""
        module_path: str = self.lister.forward[at][1].module
        return module_path

    def _weights(self, at: int) -> list[Any]:
        lister, op = self.lister, self.lister.forward[at][1]
        return [weight for number in op.reads if (weight := lister.run.weights.get(lister.casts.get(number, number)))]

    def _others(self, at: int) -> list[int]:
        lister, op = self.lister, self.lister.forward[at][1]
        return [number for number in op.reads if lister.casts.get(number, number) not in lister.run.weights]

    def _data(self, at: int) -> int | None:
        if self._short(at) not in PRODUCTS:
            return None
        matrices = [weight.name for weight in self._weights(at) if len(weight.shape) == 2]
        others = self._others(at)
        return others[0] if matrices == [f"{self.path(at)}.weight"] and len(others) == 1 else None

    def pairs(self) -> Iterator[tuple[int, set[int]]]:
        """Each matrix that can be split by rows, with those to be split by columns."""
        lister = self.lister
        for at, data in self.linear.items():
            if lister.blocks.place(self.path(at)) is None:
                continue
            between: set[int] = set()
            columns: set[int] = set()
            if not self._back(data, between, columns) or not columns:
                continue
            if any(lister.segment[column] != lister.segment[at] for column in columns):
                continue
            results = {number for node in (*columns, *between) for number in lister.forward[node][1].makes}
            readers = {reader for number in results for reader in lister.readers.get(number, ())}
            if readers <= between | columns | {at} and not any(self.linear[column] in results for column in columns):
                yield at, columns

    def _back(self, start: int, between: set[int], columns: set[int]) -> bool:
        """Collect what lies behind a storage, up to products with matrices; False where that is not known to be split."""
        waiting, lister = [start], self.lister
        seen: set[int] = set()
        while waiting:
            number = waiting.pop()
            at = lister.made.get(number)
            if number in seen or at is None:
                continue
            seen.add(number)
            if at in self.linear:
                columns.add(at)
                continue
            if not self._weighted(number):
                continue  # a table or a mask, alike on every rank
            short = self._short(at)
            elementwise = short in ELEMENTS or "attention" in short or (short in OVER_KEYS and self._of_scores(at))
            if self._weights(at) or not elementwise:
                return False
            between.add(at)
            waiting += self._others(at)
        return True

    def _of_scores(self, at: int) -> bool:
        """Return whether what an operation reads comes of a product of two activations."""
        waiting, seen = self._others(at), set()
        while waiting:
            number = waiting.pop()
            maker = self.lister.made.get(number)
            if maker is None or number in seen:
                continue
            seen.add(number)
            if self._short(maker) in ("bmm", "baddbmm"):
                return True
            if maker not in self.linear:
                waiting += self._others(maker)
        return False

    def _weighted(self, number: int) -> bool:
        """Return whether a tensor depends on any parameter."""
        if not hasattr(self, "_known"):
            self._known: set[int] = set()
            for at, (_, op) in enumerate(self.lister.forward):
                if self._weights(at) or any(read in self._known for read in op.reads):
                    self._known.update(op.makes)
        return number in self._known
