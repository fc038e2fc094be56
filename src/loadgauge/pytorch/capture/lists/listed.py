"""Captured operations as those of `layers`: formulas of the sizes, which a view turns into a `Layer`.

One `Listing` holds where its guards do; a `Family` is a model's listings, of which a view finds the one that holds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from loadgauge.core.base.algebra import Size as Number, same
from loadgauge.core.base.errors import NotModelled
from loadgauge.core.definitions.model.own_code import Written
from loadgauge.core.layers.operations.operations import (
    Collective,
    Gemm,
    Layer,
    Operation,
    OperationKind,
    Role,
    Tensor,
    Weight,
)
from loadgauge.core.layers.operations.profile import Profile, Row
from loadgauge.core.layers.operations.rank_view import View
from loadgauge.pytorch.capture.symbols.sizes import Size, compiled
from loadgauge.pytorch.capture.symbols.splits import Splits

ENTRY, EXIT = "entry", "exit"
"""What lies before the first block and after the last."""


class ListedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A storage: its name in the segment, its elements and what it is for."""

    name: str
    numel: Size
    role: Role = "activation"
    itemsize: int = 1


class ListedWeight(msgspec.Struct, frozen=True, array_like=True):
    """A parameter [elements], as `layers.operations.Weight`."""

    name: str
    numel: int
    kind: str
    trainable: bool
    cast: bool
    wide: bool
    shape: tuple[int, int] | None = None
    copies: int = 1
    expert: bool = False
    shards: int = 1
    base: bool = False


class ListedExchange(msgspec.Struct, frozen=True, array_like=True):
    """A collective: one of `layers.operations.Collective`, with bytes as a formula."""

    kind: str
    axis: str
    nbytes: Size


class ListedOperation(msgspec.Struct, frozen=True, array_like=True):
    """An operation: indices of the segment's tensors and weights, FLOPs, bytes moved and exchanges forward and backward.

    implicit: the product that a convolution is, or one turn of a recurrence, as of `gemms`; strided: its channels do not lie
        together; turns: how many wait for one another
    """

    name: str
    kind: OperationKind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    keeps: tuple[int, ...]
    weights: tuple[int, ...]
    borrows: tuple[int, ...]
    gemms: tuple[tuple[Size, Size, Size, Size], ...]
    forward: Size
    input_gradient: Size
    weight_gradient: Size
    rerun: Size
    moves: tuple[Size, Size] | None
    share: float = 1.0
    ahead: tuple[ListedExchange, ...] = ()
    behind: tuple[ListedExchange, ...] = ()
    gradients: bool = True
    implicit: tuple[Size, Size, Size, Size] | None = None
    strided: bool = False
    turns: Size = Size(())

    @property
    def spared(self) -> bool:
        """Return whether its backward makes gradients of weights alone: nothing before it is trained."""
        return bool(self.gemms) and not self.input_gradient.terms and bool(self.weight_gradient.terms)


class ListedRow(msgspec.Struct, frozen=True, array_like=True):
    """A row of `layers.profile`."""

    at: int
    live: Size
    gradients: int = 0
    latest: int = 0


class Segment(msgspec.Struct, frozen=True):
    """The operations of one block, or of what lies before or after all of them."""

    name: str
    operations: tuple[ListedOperation, ...]
    tensors: tuple[ListedTensor, ...]
    weights: tuple[ListedWeight, ...]
    forward: tuple[ListedRow, ...]
    bare: tuple[ListedRow, ...]
    rerun: tuple[ListedRow, ...]
    backward: tuple[ListedRow, ...]
    each: tuple[ListedRow, ...]
    """Of the backward of each operation."""
    entering: Size
    outside: tuple[str, ...] = ()

    def layer(
        self,
        sizes: Mapping[str, Any],
        ranks: Mapping[str, int] | None = None,
        ragged: Ragged | None = None,
        *,
        own: bool = False,
    ) -> Layer:
        """Write the segment's operations at some sizes, by name; ints or arrays.

        ranks: of each axis that it is split over; ragged: sequences of unequal lengths, in place of `sizes`
        own: without what is trained, which was added
        """
        known: dict[str, Any] = {}

        def value(size: Size) -> Any:
            total: Any = 0
            for product, factor in size.terms:
                if product not in known:
                    known[product] = compiled(product)(sizes) if ragged is None else ragged.of(product)
                total = total + factor * known[product]
            return total

        tensors = [Tensor(one.name, value(one.numel), one.itemsize, one.role) for one in self.tensors]
        weights = [
            Weight(
                one.name,
                one.numel,
                one.shards,
                one.kind,
                one.trainable,
                expert=one.expert,
                cast=one.cast,
                shape=one.shape,
                copies=one.copies,
                wide=one.wide,
                base=one.base,
            )
            for one in self.weights
        ]
        behind = bool(self.backward)

        def sent(given: tuple[ListedExchange, ...]) -> tuple[Collective, ...]:
            return tuple(Collective(one.kind, one.axis, value(one.nbytes), (ranks or {})[one.axis]) for one in given)

        operations = tuple(
            Operation(
                one.name,
                one.kind,
                tuple(tensors[place] for place in one.inputs),
                tuple(tensors[place] for place in one.outputs),
                tuple(weights[place] for place in one.weights if not (own and weights[place].trainable)),
                keeps=tuple(tensors[place] for place in one.keeps),
                gemms=tuple(Gemm(*map(value, gemm)) for gemm in one.gemms),
                forward_flops=value(one.forward),
                input_gradient_flops=value(one.input_gradient),
                weight_gradient_flops=value(one.weight_gradient),
                rerun_flops=value(one.rerun),
                borrows=tuple(weights[place] for place in one.borrows),
                computed_share=one.share,
                moves=None if one.moves is None else (value(one.moves[0]), value(one.moves[1])),
                forward_comm=sent(one.ahead),
                backward_comm=sent(one.behind),
                spares=frozenset(tensors[place].name for place in one.inputs) if one.spared else frozenset(),
                gradients=one.gradients and behind,
                implicit=None if one.implicit is None else Gemm(*map(value, one.implicit)),
                strided=one.strided,
                turns=value(one.turns),
            )
            for one in self.operations
        )

        def rows(given: tuple[ListedRow, ...]) -> tuple[Row, ...]:
            return tuple(Row(row.at, value(row.live), row.gradients, row.latest) for row in given)

        profile = Profile(
            rows(self.forward),
            rows(self.bare),
            rows(self.rerun),
            rows(self.backward),
            value(self.entering),
            frozenset(self.outside),
            lambda: rows(self.each),
        )
        return Layer(self.name, operations, profile)


class Listing(msgspec.Struct, frozen=True):
    """One captured training step as segments in the order in which they run: entry, blocks, exit.

    blocks: one for each place of the recorded model; held: what entry makes that checkpoints of blocks hold, beside what is kept
    """

    names: tuple[str, ...]
    sizes: dict[str, int]
    guards: tuple[str, ...]
    entry: Segment
    blocks: tuple[Segment, ...]
    exit: Segment
    held: Size
    places: tuple[str, ...] = ()
    """The path of each recorded block."""
    values: tuple[str, ...] = ()
    seconds: float = 0.0
    plain: str = ""
    unheard: str = ""
    """The argument by which the model takes a sound, where it ran on tokens alone."""
    of_sound: int = 0
    """Tokens of each sequence that stand for its sound."""
    assumed: tuple[str, ...] = ()
    """Lines where sizes hang on data, the loss, and what was taken for granted of each."""

    def formulas(self) -> Iterator[Size]:
        """Every formula in it."""
        yield self.held
        for segment in (self.entry, *self.blocks, self.exit):
            yield segment.entering
            yield from (tensor.numel for tensor in segment.tensors)
            for rows in (segment.forward, segment.bare, segment.rerun, segment.backward, segment.each):
                yield from (row.live for row in rows)
            for one in segment.operations:
                yield from (
                    one.turns,
                    one.forward,
                    one.input_gradient,
                    one.weight_gradient,
                    one.rerun,
                    *(one.moves or ()),
                )
                yield from (size for gemm in (*one.gemms, *([one.implicit] if one.implicit else ())) for size in gemm)
                yield from (sent.nbytes for sent in (*one.ahead, *one.behind))

    @property
    def squares(self) -> str:
        """The first tensor with as many elements as the length squared, or more; "" where there is none."""
        for segment in (self.entry, *self.blocks, self.exit):
            for tensor in segment.tensors:
                if any((found := degrees(product)) is not None and found[1] > 1 for product, _ in tensor.numel.terms):
                    return tensor.name
        return ""

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether its formulas hold for some sizes, by name."""
        sides = all((value == 1) == (sizes[name] == 1) for name, value in self.sizes.items())
        return sides and all(compiled(guard)(sizes) for guard in self.guards)


class Family(Written):
    """The listings of a model, and which recorded block stands for which of its kinds of blocks.

    chosen: for each kind, the place of a block in `Listing.blocks`
    """

    rewritten, states_splits, around, framework = False, True, False, "huggingface"

    def __init__(self, name: str, listings: list[Listing], chosen: tuple[int, ...]) -> None:
        self.name, self.listings, self.chosen = name, listings, chosen
        self.beside: dict[str, int] = {}
        """Sizes by name that no layout has: `t`, tokens of the second text (else as many as of the first), `n`, samples of a
        sound."""
        self.seconds = 0.0
        """Of each sound."""
        self.adapted = False
        """Whether what is trained lies beside the model's own parameters."""
        self._made: dict[Any, Layer] = {}
        self.left_out: dict[str, str] = {}
        """Ranks over which a search could not split it, and why."""

    def sizes(self, view: View) -> dict[str, Any]:
        """The sizes of a micro-batch by name: b, s or, of sounds alone, n, and those of `beside`.

        Raises NotModelled for what a captured list cannot be asked, such as context and sequence parallelism.
        """
        for name, value in (("cp", view.cp), ("sequence parallelism", view.token_shards)):
            if not same(value, 1):
                raise NotModelled(f"{self.name} is captured, and how {name} splits its layers is not known")
        within = self.splits.within_experts(view.tp, view.ep)
        if self.splits.experts and not same(view.etp, within):
            raise NotModelled(f"{self.name} is captured: an expert is divided over {within} ranks, which --etp must be")
        if not same(view.imbalance, 1):
            raise NotModelled(f"{self.name} is captured with experts that are equally busy: --expert-imbalance 1")
        b, s = view.sequences, view.positions
        if view.cached is not None:
            raise NotModelled(f"{self.name} is captured in training; inference is not captured")
        if view.kernel_tokens is not None:
            raise NotModelled(
                f"{self.name} is captured without padding, and what its attention does with padding around it is not"
            )
        return {"b": b, "s": s, "t": s, **self.beside}

    def ragged(self, view: View, listing: Listing) -> Ragged | None:
        """The micro-batch of a view whose sequences are of unequal lengths, else None.

        Raises NotModelled where the code has two lengths, or writes a mask that such batches do not have.
        """
        b, s = view.sequences, view.positions
        if same(view.tokens, b * s) and same(view.pairs, b * s * s):
            return None
        if "t" in listing.names:
            raise NotModelled(f"{self.name} is captured with two lengths, of encoder and decoder: --lengths has one")
        if "n" in listing.names:
            raise NotModelled(f"{self.name} is captured with sounds that are equally long: --lengths is of text")
        if listing.plain:
            raise NotModelled(
                f"{self.name} is captured as numbers of one length, for want of formulas: {listing.plain}"
            )
        if view.kernels.attention == "flash" and (where := listing.squares):
            raise NotModelled(
                f"{self.name} is captured with a tensor of length x length ({where}), such as a mask, which batches of"
                " unequal lengths do not have"
            )
        return Ragged(view.tokens, view.pairs, b, s, listing.sizes["b"] == 1)

    def find(self, view: View, sizes: Mapping[str, Any]) -> Listing:
        """The listing for a view that holds at some sizes. Raises NotModelled where there is none."""
        if all(isinstance(value, int) for value in sizes.values()):
            for one in self.listings:
                if one.holds(sizes):
                    return one
            shown = ", ".join(f"{name}={sizes[name]}" for name in self.listings[0].names)
            raise NotModelled(f"{self.name} is not captured for {shown}")
        return self.listings[0]

    def groups(self, batches: Sequence[int]) -> list[tuple[int, ...]]:
        """Micro-batches by the listing that holds for them: one sequence is apart; where there are numbers alone, each size."""
        if any(one.plain for one in self.known):
            return [(batch,) for batch in batches]
        parts = tuple(one for one in batches if one == 1), tuple(one for one in batches if one != 1)
        return [part for part in parts if part]

    @property
    def known(self) -> list[Listing]:
        """All listings so far."""
        return self.listings

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of its sizes."""
        return self.any_listing.names

    @property
    def labels(self) -> tuple[str, ...]:  # type: ignore[override]
        """The paths of the blocks that stand for its kinds."""
        return tuple(self.any_listing.places[place] for place in self.chosen)

    @property
    def unit(self) -> str:  # type: ignore[override]
        """Return the unit of a sequence's length: tokens, or samples of sound."""
        return "tokens" if "s" in self.names or "n" not in self.names else "samples of sound"

    def besides(self, length: int) -> str:
        """Return what a sequence has beside its first text, in words; "" where there is nothing. length: tokens of that text"""
        found = [f"{self.beside.get('t', length):,} of the second text"] if "t" in self.names else []
        if "s" in self.names and "n" in self.names:
            tokens = self.any_listing.of_sound
            found.append(f"{self.seconds:g} s of sound" + (f", in place of {tokens:,} of its tokens" if tokens else ""))
        return " and ".join(found)

    @property
    def splits(self) -> Splits:
        """Over which ranks it may be split."""
        return Splits()

    @property
    def has_experts(self) -> bool:  # type: ignore[override]
        """Return whether any of its layers has routed experts that are known as such."""
        return self.splits.experts > 0

    def problems(self, layout: Any) -> Iterator[str]:
        """Why a layout (`spec.layout.Layout`) cannot be that of captured layers, one line each."""
        if layout.cp > 1:
            yield f"cp = {layout.cp}: the layers were captured from their code, and how cp splits them is not known"
        if layout.sequence_parallel:
            yield "sequence parallelism: the layers were captured from their code, whose plan does not state it"
        if layout.pp > 1 and "t" in self.names:
            yield f"pp = {layout.pp}: what the first layers send to all of a decoder's is not modelled"
        yield from self.splits.problems(tp=layout.tp, ep=layout.ep)

    def within_experts(self, tp: int, ep: int) -> int:
        """Ranks that one expert is divided over."""
        return int(self.splits.within_experts(tp, ep))

    @property
    def notes(self) -> list[str]:  # type: ignore[override]
        """Return what an answer must say: values that the code reads, and where there are no formulas."""
        found = [
            f"what hangs on a value that the code reads ({line}): it got 1" for one in self.known for line in one.values
        ]
        found += [
            f"sizes other than these, of which each is captured apart ({one.plain})" for one in self.known if one.plain
        ]
        found += [f"sound: the model takes {one.unheard}, and ran on tokens alone" for one in self.known if one.unheard]
        found += [f"layouts with {ranks}, which cannot be captured ({why})" for ranks, why in self.left_out.items()]
        return list(dict.fromkeys(found))

    @property
    def any_listing(self) -> Listing:
        """One of the listings, whose parameters are those of all."""
        return self.listings[0]

    def _layer(self, view: View, which: str, place: int = 0) -> Layer:
        sizes, own = self.sizes(view), self.adapted and view.lora is None
        alone = same(view.tokens, 1)  # of 1 token: parameters alone
        listing = self.any_listing if alone else self.find(view, sizes)
        sizes, ragged = (dict(listing.sizes), None) if alone else (sizes, self.ragged(view, listing))
        found = {ENTRY: listing.entry, EXIT: listing.exit}.get(which) or listing.blocks[place]
        ranks = {"tp": view.tp, "ep": view.ep}
        if ragged is not None or not all(isinstance(one, int) for one in sizes.values()):
            return found.layer(sizes, ranks, ragged, own=own)
        key = id(found), own, tuple(sizes.values())
        if key not in self._made:
            self._made[key] = found.layer(sizes, ranks, own=own)
        return self._made[key]

    def embedding(self, view: View) -> Layer:
        """Return the recorded operations before the first block."""
        return self._layer(view, ENTRY)

    def head(self, view: View) -> Layer:
        """Return the recorded operations after the last block, loss included."""
        return self._layer(view, EXIT)

    def block(self, kind: int, view: View) -> Layer:
        """The operations of a kind of block."""
        return self._layer(view, "block", self.chosen[kind])

    def held(self, view: View) -> Number:
        """Bytes that checkpoints of blocks hold together beside what is kept anyhow, such as masks."""
        sizes = self.sizes(view)
        listing = self.find(view, sizes)
        ragged = self.ragged(view, listing)
        if ragged is None:
            return listing.held.at(sizes)
        return sum(factor * ragged.of(product) for product, factor in listing.held.terms)


class Kind:
    """One kind of block of a family, as `spec.model.Block` has it."""

    def __init__(self, family: Family, kind: int) -> None:
        self.family, self.kind = family, kind

    def layer(self, view: View) -> Layer:
        """Its operations."""
        return self.family.block(self.kind, view)


BATCH, LENGTH = "b", "s"


@functools.cache
def degrees(product: str) -> tuple[int, int] | None:
    """How often the batch and the length are factors of a term; None where it has another factor, such as a rounded quotient.

    >>> degrees("b*s*s"), degrees("1"), degrees("b*((s)//(2))")
    ((1, 2), (0, 0), None)
    """
    factors = [] if product == "1" else product.split("*")
    if any(one not in (BATCH, LENGTH) for one in factors):
        return None
    return factors.count(BATCH), factors.count(LENGTH)


class Ragged(msgspec.Struct, frozen=True):
    """A micro-batch of unequal lengths: its tokens, query-key pairs and sequences, and the longest of them (source: padfree2024).

    single: whether the formulas are those of one sequence, in which the batch is no letter
    """

    tokens: Any
    pairs: Any
    sequences: Any
    longest: Any
    single: bool = False

    def of(self, product: str) -> Any:
        """The value of a term. Raises NotModelled for one that is linear in none of these.

        >>> Ragged(30, 500, 2, 20).of("b*s"), Ragged(30, 500, 2, 20).of("b*s*s"), Ragged(30, 500, 2, 20).of("s")
        (30, 500, 20)
        """
        found = degrees(product)
        if found is not None and self.single:
            found = (1, found[1]) if found[1] else found
        if found == (0, 0):
            return 1
        if found == (1, 0):
            return self.sequences
        if found == (1, 1):
            return self.tokens
        if found == (1, 2):
            return self.pairs
        if found is not None and not found[0] and found[1] <= 2:
            return self.longest ** found[1]
        raise NotModelled(
            f"sequences of unequal lengths where a size is {product}: it is linear neither in tokens nor in query-key pairs"
        )
