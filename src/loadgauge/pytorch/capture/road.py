"""The captured road: a model that no family reads, or a module of one's own, as a `ModelSpec` like any other.

What runs is found in a cache on disk, else captured in a process of its own, for the dtypes, kernels and sizes that are asked for.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from loadgauge.core.base import ConfigError, NotModelled, Size, is_script, needs_capture, refuse, same
from loadgauge.core.base.errors import NotYet
from loadgauge.core.base.files import keep, read_kept
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.lora import ADAPTER_DTYPES
from loadgauge.core.definitions.model.model import Block, ModelSpec, Norm
from loadgauge.core.definitions.model.own_code import Written
from loadgauge.core.families.catalogue import Found
from loadgauge.core.families.encoders import pictures
from loadgauge.core.layers import View
from loadgauge.core.layers.operations.operations import Gemm, Layer, Operation
from loadgauge.core.resolve import resolve
from loadgauge.pytorch.capture.inputs.libraries import (
    NO_ENCODERS,
    Encoders,
    check_attention,
    encoders,
    is_library,
    latents,
    usual_fields,
)
from loadgauge.pytorch.capture.inputs.target import (
    LENGTH,
    ONE,
    SECOND,
    SOUND,
    SPELT,
    SPOKEN,
    check_script,
    config_keys,
    longest_of,
    longest_told,
    sound_window,
    usual_length,
)
from loadgauge.pytorch.capture.lists.listed import ENTRY, EXIT, Listing, Ragged, Segment
from loadgauge.pytorch.capture.lists.store import check_sizes, place, unchanged
from loadgauge.pytorch.capture.requests.regime import COMPILED, OWN, WHOLE, Document, Regime, Tuned
from loadgauge.pytorch.capture.symbols.sizes import SAMPLES, SECONDS
from loadgauge.pytorch.capture.symbols.splits import Splits

BY_ROWS = "adagrad", "sgd"
"""Optimizers that take sparse gradients."""
MOST = 8
"""Captures at other sizes that one command makes by itself."""
WIDTH = 1024
"""Width of a product that stands for those of frozen encoders, whose work is known and whose shapes are not."""
SHOWN = 5
"""Lines of what was taken for granted that an answer has."""


class OnDemand(Written):
    """A model's captured layers, which captures what it is asked for and does not know yet.

    chosen: for each of its kinds of blocks, the place of a recorded block in `Listing.blocks`
    keys: the configuration, where it is at hand and `target` is only its name
    where: captures are made in a process of their own (apart), in this one (here), or nowhere, where `NotYet` asks for one
    most: captures at other sizes than those asked for; tuned: what is trained; rows: how many a script's data chooses
    documents: by regime; took: seconds of captures; cached: whether all came from the disk
    """

    rewritten, states_splits, around, framework = False, True, False, "huggingface"

    def __init__(
        self,
        target: str,
        inputs: str = "",
        keys: dict[str, Any] | None = None,
        where: Literal["apart", "here", "nowhere"] = "apart",
        tuned: Tuned = WHOLE,
        rows: str = "",
        encoders: Encoders = NO_ENCODERS,
    ) -> None:
        self.name, self.chosen = target, tuple[int, ...]()
        self.beside: dict[str, int] = {}
        """Sizes by name that no layout has: `t`, tokens of the second text (else as many as of the first), `n`, samples of a
        sound."""
        self.seconds = 0.0
        """Of each sound."""
        self._made: dict[Any, tuple[Segment, Layer]] = {}
        self.left_out: dict[str, str] = {}
        """Ranks over which a search could not split it, and why."""
        self.where, self.most = where, MOST
        self.encoders, self.resident = encoders, encoders.nbytes
        self.rows = rows
        self.target, self.tuned = target, tuned
        self.script = keys is None and is_script(target)
        self.inputs = check_script(target, inputs) if self.script else inputs
        self.usual = usual_length(self.inputs)
        """Of a script: tokens of a sequence, unless the job says how many."""
        self.keys: dict[str, Any] | None = None if self.script else keys or config_keys(target)
        self.library = is_library(self.keys or {})
        self.documents: dict[Regime, Document] = {}
        self.last: dict[Regime, Listing] = {}
        self._files: dict[Regime, Path] = {}
        self.took, self.cached, self.more = 0.0, True, 0

    def file(self, regime: Regime) -> Path:
        """Where the document of a regime is kept: by the configuration, or by a script's path, beside the files that it read."""
        if regime not in self._files:  # a plan asks for each layout
            script = {"script": self.target, "inputs": self.inputs, "rows": self.rows, "folder": os.getcwd()}
            keys = {**self.keys, "_sizes": self.inputs} if self.keys and self.inputs else self.keys
            self._files[regime] = place(keys or script, {"list": 1, **msgspec.to_builtins(regime)})
        return self._files[regime]

    def document(self, regime: Regime, sizes: Mapping[str, int], *, asked: bool = True) -> tuple[Document, Listing]:
        """Return what is known in a regime, and the listing that holds for some sizes; captured where there is none.

        asked: by the user; else a regime that is not known stays unknown, as a capture takes seconds
        Raises ConfigError or NotModelled where it cannot be.
        """
        file = self.file(regime)
        document = self.documents.get(regime)
        for again in (False, True):  # another process may have written the file since
            if again:
                document = read_kept(file, Document, _check) or document
            for listing in () if document is None else document.listings:
                if listing.holds(sizes):
                    assert document is not None
                    self.documents[regime] = document
                    self.last[regime] = listing
                    return document, listing
        sharded = not regime.autocast and regime.weight == 2  # what FSDP makes of autocast over float32 weights
        alike = document is not None or (not self.tuned.whole and bool(self.documents))
        alike = alike or (sharded and any(own.autocast and own.weight == 4 for own in self.documents))
        refuse(
            not asked and (not alike or self.more >= self.most),
            f"{self.target} {OWN}, and not yet in this way: ask for it by its flags",
            NotModelled,
        )
        captured = self._captured(regime, sizes)
        self.more += not asked
        holding = [listing for listing in captured.listings if listing.holds(sizes)]
        if not holding:
            shown = ", ".join(f"{name}={sizes[name]}" for name in captured.listings[0].names)
            raise NotModelled(f"{self.target} {OWN}, whose formulas do not hold for {shown}")
        if document is not None and document.pattern == captured.pattern:
            captured.listings = [
                *document.listings,
                *(listing for listing in captured.listings if listing not in document.listings),
            ]
        self.documents[regime] = captured
        if captured.files or not self.script:
            keep(file, captured)
        self.last[regime] = holding[0]
        return captured, holding[0]

    def _captured(self, regime: Regime, sizes: Mapping[str, int]) -> Document:
        needs_capture()
        if self.library:
            check_attention(self.keys or {}, self.target, regime.attention == "flash")
        if self.where == "nowhere":
            raise NotYet(self.target, OWN, self.keys or {}, regime, sizes)
        from loadgauge.pytorch.trace.subprocess import Request, named_in_child

        begun = time.perf_counter()
        shown = sys.stderr if self.script else None
        arguments = {
            "how": msgspec.to_builtins(regime),
            "inputs": self.inputs,
            "sizes": {name: int(size) for name, size in sizes.items()},
            "pairs": dict(self.splits.plan),
            "rows": self.rows,
        }
        request = Request(Job(self.target))
        if self.where == "here":
            from loadgauge.pytorch.capture.requests.list_request import list_request

            document = list_request(request, **arguments)
        else:
            document = named_in_child(
                "loadgauge.pytorch.capture.requests.list_request:list_request", Document, request, shown, **arguments
            )
        self.took, self.cached = self.took + time.perf_counter() - begun, False
        return document

    @property
    def known(self) -> list[Listing]:
        """All listings so far."""
        return [listing for document in self.documents.values() for listing in document.listings]

    @property
    def table(self) -> str:
        """The first table whose gradient is the rows that were looked up."""
        return next((document.rows for document in self.documents.values() if document.rows), "")

    @property
    def notes(self) -> list[str]:  # type: ignore[override]
        """Return what an answer must say: values that the code reads, where there are no formulas, and what stands beside it."""
        lines = [
            f"what hangs on a value that the code reads ({line}): it got 1"
            for document in self.known
            for line in document.values
        ]
        lines += [
            f"sizes other than these, of which each is captured apart ({document.plain})"
            for document in self.known
            if document.plain
        ]
        lines += [
            f"sound: the model takes {document.unheard}, and ran on tokens alone"
            for document in self.known
            if document.unheard
        ]
        lines += [f"layouts with {ranks}, which cannot be captured ({why})" for ranks, why in self.left_out.items()]
        left = f" ({cached}; --encoders all counts them)" if (cached := self.encoders.cached) else ""
        if self.library and not self.splits.tables and (left or not self.encoders.words):
            lines.append(f"what encodes texts and pictures: latents and embeddings are taken as cached{left}")
        return list(dict.fromkeys(lines))

    def embedding(self, view: View) -> Layer:
        """Return what runs before the first block, with the encoders that stay on the card."""
        layer = self._layer(view, ENTRY)
        if not self.encoders.flops or same(view.tokens, 1):
            return layer
        rows = self.sizes(view)[ONE] * (self.encoders.flops / (2 * WIDTH**2))
        work = 2 * rows * WIDTH**2
        encoders = Operation(
            "encoders", "gemm", (), (), gemms=(Gemm(rows, WIDTH, WIDTH),), forward_flops=work, gradients=False
        )
        return msgspec.structs.replace(layer, operations=(*layer.operations, encoders))

    @property
    def any_listing(self) -> Listing:
        """One of the listings, whose parameters are those of all."""
        whole = [document for regime, document in self.documents.items() if regime == regime.whole]
        return (whole or list(self.documents.values()))[0].listings[0]

    @property
    def has_length(self) -> bool:  # type: ignore[override]
        """Return whether what it is called with has sequences: pictures, and a script's inputs, may be one token each."""
        texts = {LENGTH, SECOND} | (set() if self.script or self.library else {SOUND})
        return not texts.isdisjoint(self.any_listing.names)

    @property
    def splits(self) -> Splits:
        """Over which ranks it may be split."""
        return next(
            (document.splits for regime, document in self.documents.items() if regime == regime.whole), Splits()
        )

    def find(self, view: View, sizes: Mapping[str, Any]) -> Listing:
        """The listing for a view at some sizes; of arrays, that for the largest."""
        regime = Regime.of(view, self.target, self.tuned)
        if not all(isinstance(value, int) or hasattr(value, "max") for value in sizes.values()):
            return self.last.get(regime) or self.any_listing  # letters, of the numbers asked for before
        return self.document(regime, {name: _largest(value) for name, value in sizes.items()}, asked=False)[1]

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

    def groups(self, batches: Sequence[int]) -> list[tuple[int, ...]]:
        """Micro-batches by the listing that holds for them: one sequence is apart; where there are numbers alone, each size."""
        if any(document.plain for document in self.known):
            return [(batch,) for batch in batches]
        parts = tuple(batch for batch in batches if batch == 1), tuple(batch for batch in batches if batch != 1)
        return [part for part in parts if part]

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of its sizes."""
        return self.any_listing.names

    @property
    def labels(self) -> tuple[str, ...]:  # type: ignore[override]
        """The paths of the blocks that stand for its kinds."""
        return tuple(self.any_listing.places[index] for index in self.chosen)

    @property
    def unit(self) -> str:  # type: ignore[override]
        """Return what a sequence is so many of."""
        return "tokens" if "s" in self.names or "n" not in self.names else "samples of sound"

    @property
    def sample(self) -> str:  # type: ignore[override]
        """Return what a batch has so many of, where it has no sequences."""
        return next((document.sample for document in self.documents.values()), "samples")

    def besides(self, length: int) -> str:
        """Return what a sequence has beside its first text, in words; "" where there is nothing. length: tokens of that text"""
        parts = [f"{self.beside.get('t', length):,} of the second text"] if "t" in self.names else []
        if "s" in self.names and "n" in self.names:
            tokens = self.any_listing.of_sound
            parts.append(f"{self.seconds:g} s of sound" + (f", in place of {tokens:,} of its tokens" if tokens else ""))
        return " and ".join(parts)

    @property
    def has_experts(self) -> bool:  # type: ignore[override]
        """Return whether any of its layers has routed experts that are known as such."""
        return self.splits.experts > 0

    def problems(self, layout: Any) -> Iterator[str]:
        """Why a layout (`spec.layout.Layout`) cannot be that of captured layers, one line each."""
        if layout.cp > 1:
            why = "the layers were captured from their code, and how cp splits them is not known"
            yield f"cp = {layout.cp}: {why}; --zero 3 shares it out"
        if layout.sequence_parallel:
            yield "sequence parallelism: the layers were captured from their code, whose plan does not state it"
        if layout.pp > 1 and "t" in self.names:
            yield f"pp = {layout.pp}: what the first layers send to all of a decoder's is not modelled"
        if layout.pp > 1 and any(
            operation.borrows for block in self.any_listing.blocks for operation in block.operations
        ):
            yield f"pp = {layout.pp}: blocks that share their weights are not modelled on several stages"
        if self.table and (layout.zero or layout.num_microbatches > 1):
            several = f"zero = {layout.zero}" if layout.zero else f"{layout.num_microbatches} micro-batches of a step"
            yield f"{several}: {self.table} has sparse gradients; zero 0 and one micro-batch, or sparse=False"
        yield from self.splits.problems(tp=layout.tp, ep=layout.ep)

    def within_experts(self, tp: int, ep: int) -> int:
        """Ranks that one expert is divided over."""
        return int(self.splits.within_experts(tp, ep))

    def _of_one(self, view: View, sizes: Mapping[str, int]) -> Listing:
        """The listing of one token, whose parameters are asked for; of one sample, where it is known and there are no tokens."""
        if self.has_length or (self.tuned.adapts and view.lora is None):  # parameters alone, which every listing has
            return self.any_listing
        document = self.documents.get(Regime.of(view, self.target, self.tuned))
        listings = () if document is None else document.listings
        return next((listing for listing in listings if listing.holds(sizes)), self.any_listing)

    def _layer(self, view: View, which: str, index: int = 0) -> Layer:
        sizes, own = self.sizes(view), self.tuned.adapts and view.lora is None
        alone = same(view.tokens, 1)  # of 1 token: parameters alone
        listing = self._of_one(view, sizes) if alone else self.find(view, sizes)
        sizes, ragged = (dict(listing.sizes), None) if alone else (sizes, self.ragged(view, listing))
        segment = {ENTRY: listing.entry, EXIT: listing.exit}.get(which) or listing.blocks[index]
        ranks = {"tp": view.tp, "ep": view.ep}
        if ragged is not None or not all(isinstance(size, int) for size in sizes.values()):
            return segment.layer(sizes, ranks, ragged, own=own)
        key = id(segment), own, tuple(sizes.values())
        if key not in self._made:
            self._made[key] = segment, segment.layer(sizes, ranks, own=own)  # held, as its number would be another's
        return self._made[key][1]

    def head(self, view: View) -> Layer:
        """Return what runs after the last block, loss included."""
        return self._layer(view, EXIT)

    def block(self, kind: int, view: View) -> Layer:
        """The operations of a kind of block."""
        return self._layer(view, "block", self.chosen[kind])

    def held(self, view: View) -> Size:
        """Bytes that checkpoints of blocks hold together beside what is kept anyhow, such as masks."""
        sizes = self.sizes(view)
        listing = self.find(view, sizes)
        ragged = self.ragged(view, listing)
        if ragged is None:
            return listing.held.at(sizes)
        return sum(factor * ragged.of(product) for product, factor in listing.held.terms)


class Kind:
    """One kind of block of a family, as `spec.model.Block` has it."""

    def __init__(self, family: OnDemand, kind: int) -> None:
        self.family, self.kind = family, kind

    def layer(self, view: View) -> Layer:
        """Its operations."""
        return self.family.block(self.kind, view)


def _largest(value: Any) -> int:
    return value if isinstance(value, int) else int(getattr(value, "max", lambda: value)())


def _check(document: Document) -> None:
    for listing in document.listings:
        check_sizes(listing.names, listing.formulas(), listing.guards)
    most = min((len(listing.blocks) for listing in document.listings), default=0)
    refuse(
        any(not 0 <= index < most for index in document.pattern) or not unchanged(document.files), "not a captured list"
    )


def model_of(family: OnDemand, regime: Regime, sizes: Mapping[str, int]) -> ModelSpec:
    """The model that a family stands for."""
    document, _ = family.document(regime.whole, sizes)
    first: dict[Any, int] = {}
    like = {
        index: first.setdefault(tuple(listing.blocks[index] for listing in document.listings), index)
        for index in dict.fromkeys(document.pattern)
    }
    pattern = [like[index] for index in document.pattern]
    chosen = tuple(dict.fromkeys(pattern))
    family.chosen = chosen
    family.name = document.name if family.script else family.target
    apart: Any = {"trained": frozenset()} if family.tuned.by_layer else {}
    blocks = tuple(
        Block(attention=None, mlp=None, norm=Norm(), listed=Kind(family, kind)) for kind in range(len(chosen))
    )
    longest = document.longest or (family.usual if family.usual == sizes["s"] else None) if family.has_length else 1
    return ModelSpec(
        name=_short(family),
        model_type=document.model_type,
        hidden_size=document.hidden_size,
        vocab_size=document.vocab_size,
        blocks=blocks,
        pattern=tuple(chosen.index(index) for index in pattern),
        tie_word_embeddings=document.tied,
        max_position_embeddings=longest,
        dtype=document.dtype,
        source=family.target,
        listed=family,
        **apart,
    )


def _short(family: OnDemand) -> str:
    target, path = family.target, Path(family.target)
    if family.script:
        return target
    return (
        path.absolute().parent.name if path.name == "config.json" else path.stem if path.suffix == ".json" else target
    )


def road(job: Job, why: str) -> Found:
    """Take the captured road for a job's model. why: what its own family says, where it has one

    Raises ConfigError or NotModelled where it cannot be captured.
    """
    inputs = ",".join(filter(None, (latents(job.model, job.pictures or "", job.video or ""), job.inputs)))
    usual: tuple[tuple[str, Any], ...] = ()
    beside = NO_ENCODERS
    if is_library(keys := {} if is_script(job.model) else config_keys(job.model)):
        usual, beside = usual_fields(job, keys), encoders(keys, job.model, job.encoders or "cached", inputs)
        job = job.replace(**dict(usual))
    elif job.pictures is not None or job.video is not None:
        inputs = pictures.stated(job)
    elif job.encoders is not None:
        raise ConfigError("needs a diffusion model", key="encoders")
    elif is_script(job.model) and job.precision in ("bf16", "fp16"):  # of plain PyTorch: its autocast over float32
        usual = (("precision", f"{job.precision}-autocast"),)
        job = job.replace(**dict(usual))
    try:
        return _road(job, why, inputs, usual, beside)
    except ConfigError as error:  # of a model of fewer tokens, or of a module whose own weights have 16 bits
        if (most := longest_told(error)) and (job.seq_len, job.lengths) == (None, None):
            source = road(job.replace(seq_len=most), why)
            return msgspec.structs.replace(source, usual=(*source.usual, ("seq_len", most)))
        if job.precision is None and "bfloat16" in str(error).lower():  # an operator that has no 16 bits (FNet, YOSO)
            source = road(job.replace(precision="fp32"), why)
            return msgspec.structs.replace(source, usual=(*source.usual, ("precision", "fp32")))
        if error.key != "precision" or not usual or not is_script(job.model):
            raise
    usual = tuple((name, value.replace("-autocast", "-pure")) for name, value in usual)
    return _road(job.replace(**dict(usual)), why, inputs, usual, beside)


def _road(job: Job, why: str, inputs: str, usual: tuple[tuple[str, Any], ...], beside: Encoders) -> Found:
    """The same with what is usual of such models in the job."""
    tuned = Tuned.of(job)
    key = job.model, inputs, job.rows or "", tuned, job.target_len, job.audio, beside
    if key not in _FAMILIES:
        _FAMILIES[key] = OnDemand(job.model, inputs, tuned=tuned, rows=job.rows or "", encoders=beside)
    source = taken(job, _FAMILIES[key], why)
    if (table := _FAMILIES[key].table) and (job.optimizer or "sgd") not in BY_ROWS:
        raise NotModelled(f"{table}: sparse gradients with {job.optimizer}; {' or '.join(BY_ROWS)}, or sparse=False")
    own = next((document.optimizer for document in _FAMILIES[key].documents.values() if document.optimizer), "")
    usual += (("optimizer", own),) if own and job.optimizer is None else ()
    return msgspec.structs.replace(source, usual=usual)


def taken(job: Job, family: OnDemand, why: str) -> Found:
    """The captured model of a family, as a job trains it. Raises as `road`, and `NotYet` where this process makes no captures."""
    tuned, attention = family.tuned, "eager" if job.attention == "eager" else "flash"
    card, _ = resolve.named_card(job)
    usual = "fp32" if family.script else "bf16" if card is None or card.bf16 else "fp16"
    precision = job.precision or usual
    regime = {
        "fp32": Regime(4, False, attention),
        "bf16": Regime(2, True, attention),
        "fp16": Regime(2 if tuned.adapts else 4, True, attention),  # scaled gradients are of float32 weights
        "bf16-autocast-8": Regime(2, True, attention),
        "bf16-autocast": Regime(4, True, attention),
        "fp16-autocast": Regime(4, True, attention),
    }.get(precision, Regime(2, False, attention))
    if job.weights == "float32" and precision in ("bf16", "fp16") and not tuned.base:
        regime = Regime(4, True, attention)
    if regime.autocast and regime.weight == 4 and (job.zero or 0) >= 2:  # FSDP casts whole parameters
        regime = Regime(2, False, attention, buffer=4)
    if not tuned.whole:
        regime = _of_part(job, regime, tuned)
    length = _length(job, family)
    most = 0 if family.script else (family.keys or {}).get("max_target_positions", 0)
    if most and length > most:  # its own code says so too, in words of its tables
        raise ConfigError(f"seq_len: {length} is more than the model's {most}")
    family.seconds = job.audio or SECONDS
    family.beside = {SOUND: round(family.seconds * SAMPLES), SPELT: max(1, round(SPOKEN * family.seconds))}
    if job.target_len is not None:
        family.beside[SECOND] = job.target_len
    sizes = {"b": job.micro_batch or 1, "s": length, SECOND: length, **family.beside}
    try:
        spec = model_of(family, regime, sizes)
    except ConfigError as error:
        if not (family.script and job.precision is None and error.key == "precision"):
            raise
        regime = Regime(2, False, attention)  # its function gives it 16 bits
        spec = model_of(family, regime, sizes)
    _check_sizes(job, family)
    if not family.has_length:
        for name, value in (("seq_len", job.seq_len), ("lengths", job.lengths)):
            refuse(value not in (None, 1), f"{family.inputs} has no size s, the tokens of a sequence", key=name)
    split = msgspec.structs.replace(regime, tp=job.tp or 1, ep=job.ep or 1)
    if split != regime and not list(family.splits.problems(tp=split.tp, ep=split.ep)):
        family.document(split, sizes)
    took = "kept from before" if family.cached else f"{family.took:.0f} s"
    document, listing = family.document(regime, sizes)
    each = "each sequence" if family.has_length else f"each of its {family.sample}"
    per_sequence = (f"{each} has {document.given}",) if document.given else ()
    unit = (f"its tokens are {family.unit}",) if family.unit != "tokens" else ()
    own = listing.assumed[:SHOWN] if family.script else ()
    own += (COMPILED,) if family.script and job.compile else ()
    lines = ("captured from its own code, " + took, *((why,) if why else ()), *per_sequence, *own, *unit)
    return Found(spec, "; ".join(lines))


def _check_sizes(job: Job, family: OnDemand) -> None:
    """Raise ConfigError for a length that the model does not have."""
    if job.target_len is not None and SECOND not in family.names:
        raise ConfigError(f"{family.name} has one text, whose tokens are --seq-len", key="target_len")
    if job.audio is not None and SOUND not in family.names:
        window = sound_window(family.keys or {})
        refuse(not window, f"{family.name} takes no sound of any length", key="audio")
        if job.audio > window:
            raise ConfigError(
                f"{job.audio:g} s: {family.name} takes windows of {window:g} s, each a sample: --micro-batch has several",
                key="audio",
            )
    refuse(
        job.seq_len is not None and family.unit != "tokens",
        f"{family.name} takes sounds and no text: --audio",
        key="seq_len",
    )


def _length(job: Job, family: OnDemand) -> int:
    """Tokens of the longest sequence of a job, as `resolve` has them."""
    if job.lengths is not None:
        return Lengths.parse(job.lengths).longest
    longest = family.usual if family.script else longest_of(family.keys or {})
    return job.seq_len or min(resolve.SEQ_LEN, longest or resolve.SEQ_LEN)


def _of_part(job: Job, regime: Regime, tuned: Tuned) -> Regime:
    """The regime in which a job most likely trains a part, before its layout and recipe are known."""
    whole = (job.recompute or ("full" if tuned.base else "none")).partition(":")[0] == "full"
    adapters = (0, 0)
    if tuned.adapts:
        held = 4 if regime.autocast else regime.weight
        held = held if job.lora_dtype is None else ADAPTER_DTYPES[job.lora_dtype]
        sharded = regime.autocast and (job.zero or 0) >= 3
        adapters = (regime.weight if sharded else held), held
        gathered = bool(tuned.base) and sharded and tuned.upcast != "none"
        autocast = regime.autocast and not (sharded and regime.weight == 2)
        regime = msgspec.structs.replace(regime, autocast=autocast, gathered=gathered)
    return msgspec.structs.replace(regime, tuned=tuned, adapters=adapters, input_gradients=whole)


_FAMILIES: dict[tuple[object, ...], OnDemand] = {}
