"""Distance of measured from predicted memory: the spread of published runs, and what the allocator holds idle.

The figures are in `data/memory_range.toml`, which `make range` writes; each is of a class of stacks or of a kind of lengths,
never of a run, a source or a model.
"""

import functools
import tomllib
from typing import Literal, get_args

import msgspec

from loadgauge.core.base import ConfigError, read_table

Counter = Literal["allocated", "active", "reserved", "nvidia-smi"]
"""Counter that a peak is read from: `torch.cuda.max_memory_allocated`, `active_bytes.all.peak` of `memory_stats`,
`max_memory_reserved`, and what the driver shows for the process. Each holds all that the one before holds."""
COUNTERS: tuple[Counter, ...] = get_args(Counter)
Stack = Literal["pretraining", "FSDP", "fine-tuning"]
"""Classes of frameworks by which the spread of published runs is known; FSDP: pre-training on PyTorch's own sharding, whose
buffers come from pools of their own streams."""
CARD = ", card"
"""Ends the name of a class of what a card holds, with what the allocator keeps idle and what lies beside it."""
SPLIT = "tensor parallel"
CLASSES = (
    *(f"{runs}{shown}" for shown in ("", CARD) for runs in (*get_args(Stack), "adapters")),
    f"{SPLIT}{CARD}",
)
"""Classes of runs and of what is read, for each of which a spread is known: a stack's, adapters of any stack, and what a card
holds where tensors are split, whose collectives leave more idle."""
COVERAGE = 0.8
"""Share of runs whose memory lies in the range."""


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes beyond the allocated peak, as shares of it: in 10 %, half and 90 % of the cases that were simulated."""

    low: float
    usual: float
    high: float


class Fragmentation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory that the caching allocator holds beyond what it has handed out.

    reserved: on a card with room, as `max_memory_reserved` counts it
    needed: on the smallest card that serves every request, where idle segments have been given back
    """

    reserved: Share
    needed: Share


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The factors between which measured / predicted lies in 80 % of the runs of a class, by its name in `CLASSES`.

    middle: factor on what is predicted of a card, for what measured ones show beyond and nothing here explains; low and high are
        around it
    floor: of a card, factor on what the tensors need with the least of what lies beside them, below which few runs lie
    sources: those whose runs they come from; covered: share of the runs of a source that lie within, where the factors come
    from the other sources alone, as the mean over sources
    """

    stack: str
    middle: float = 1.0
    low: float
    high: float
    floor: float = 1.0
    sources: tuple[str, ...]
    runs: int
    covered: float


class MemoryRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of `data/memory_range.toml`.

    static: where all micro-batches have one length and gradients exist from the start; fixed: where they come in each
    backward; dynamic: where lengths change too
    sharded: of what FSDP2 has on the main stream; expandable: the same where segments grow page by page
    """

    date: str
    spread: tuple[Spread, ...]
    static: Fragmentation
    fixed: Fragmentation
    dynamic: Fragmentation
    sharded: Fragmentation
    expandable: Fragmentation


@functools.cache
def memory_range() -> MemoryRange:
    """Return the figures. Raises `ConfigError` where the file is broken.

    >>> known = memory_range()
    >>> known.fixed.needed.high < known.dynamic.needed.high
    True
    """
    try:
        return msgspec.convert(read_table("memory_range.toml"), MemoryRange)
    except (msgspec.ValidationError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(str(error), file="data/memory_range.toml") from None


@functools.cache
def spread(stack: str, *, adapters: bool = False, card: bool = False, split: bool = False) -> Spread:
    """Return the spread of a class of stacks, or of adapters; `card`: of what the card holds, `split`: by tensor parallelism.

    >>> spread("pretraining").low <= 1 <= spread("fine-tuning", card=True).high
    True
    """
    name = class_of(stack, adapters=adapters, card=card, split=split)
    return next(row for row in memory_range().spread if row.stack == name)


def class_of(stack: str, *, adapters: bool, card: bool, split: bool = False) -> str:
    """Return the name of a class in `CLASSES`. split: by tensor parallelism

    >>> class_of("FSDP", adapters=False, card=True), class_of("FSDP", adapters=True, card=False)
    ('FSDP, card', 'adapters')
    >>> class_of("pretraining", adapters=False, card=True, split=True)
    'tensor parallel, card'
    """
    own = SPLIT if split and card else stack
    return f"{'adapters' if adapters else own}{CARD if card else ''}"
