"""Optimizers: the state that each keeps of each tensor, the bytes that its step moves, and what PyTorch calls it.

Source of every record: the optimizer itself, run for two steps on tensors of each kind or, where it runs on a GPU alone, read
(decision 0026 names the releases; tests/core/estimate/test_optimizer_states.py says which was which).
"""

from __future__ import annotations

from typing import Any

import msgspec

from loadgauge.core.base.errors import ConfigError, NotModelled, closest
from loadgauge.core.definitions.training.precision import Precision


class StepTemporaries(msgspec.Struct, frozen=True, kw_only=True):
    """Temporaries of an optimizer's step at its peak, in elements of the dtype of its moments.

    lists: tensors of the size of all trained parameters together (`foreach` takes a whole group at once)
    largest: tensors of the size of the largest parameter (a loop over the parameters)
    float32: whether those are float32 whatever the weights are; upcasts: how many more there are for 16-bit weights
    """

    lists: int = 0
    largest: int = 0
    float32: bool = False
    upcasts: int = 0
    source: str = "pytorch"


NO_TEMPORARIES = StepTemporaries()


class Variant(msgspec.Struct, frozen=True):
    """A way to run an optimizer: its suffix, the temporaries of its step, and PyTorch's arguments (None: not PyTorch's)."""

    suffix: str
    step: StepTemporaries = NO_TEMPORARIES
    options: tuple[tuple[str, Any], ...] | None = None


class LowRank(msgspec.Struct, frozen=True):
    """The state of the blocks' matrices in `rank` dimensions: moments of rank x the longer side (GaLore, APOLLO).

    every: steps between two new projections
    head: of the head too, as where every linear layer is named (`optim_target_modules: all-linear`)
    projector_bytes: of an element of the projection (rank x the shorter side), where it is not in the weights' dtype
    """

    rank: int = 128
    every: int = 200
    head: bool = False
    projector_bytes: float | None = None


class Preconditioners(msgspec.Struct, frozen=True):
    """Square matrices beside each matrix: `each` of rows x rows, and as many of columns x columns (SOAP, Shampoo).

    longest: a longer side has none
    """

    each: int
    longest: int = 10_000


class Optimizer(msgspec.Struct, frozen=True, kw_only=True):
    """Optimizer state: `moments` of `Precision.moment` bytes each, or of `moment_bytes` where the optimizer decides.

    What differs by the kind of tensor:
    factored: one row and one column of float32 for each matrix and table instead of a moment (Adafactor, AdaLOMO)
    matrix_moments: moments of the matrices of the blocks, where they differ from the rest's (Muon)
    small: tensors of fewer elements have whole moments: of float32 (`small_float32`), or of the weights' dtype
    table_float32: so has an embedding table, which transformers' Trainer keeps out of 8 bits
    low_rank: the blocks' matrices have their moments in few dimensions
    preconditioners: square matrices beside each matrix and table
    by_row: besides its moments a number for each row (Adam-mini); table_by_row: of a table that is trained by rows, in their place
    compensated: weights of 16 bits without a master copy have a compensation as large as they are (Kahan summation)
    average, average_away: bytes per parameter of a moving average of the weights (EMA), on the card or in host memory

    What differs in where and when it is:
    paged: tensors of at least so many elements have their state off PyTorch's allocator: in managed memory, which moves to
        the host when the card is full (bitsandbytes), or on the host; 0: none
    in_backward: each tensor is updated as soon as its gradient exists, which is freed then: gradients are never all alive
    update_bytes: bytes per element of the tensor at hand that such an update needs besides its gradient
    one_block: trains one layer at a time, with float32 weights, moments and gradients of that layer (BAdam)
    sharded: whether ZeRO or FSDP can shard it

    Its other names and forms:
    eight_bit: the optimizer that is this one with 8-bit moments, where there is one
    torch, options: the class that a trace builds, and its arguments; empty: PyTorch has none
    step: the temporaries of its step; of one with `variants`, those that the framework runs (`Framework.optimizer_step`)
    variants: other ways to run the same optimizer
    variant_of: the optimizer that this one is a way to run of
    takes: what `NAME:KEY=VALUE` may set
    """

    name: str
    moments: int
    matrix_moments: int | None = None
    moment_bytes: float | None = None
    factored: bool = False
    small: int = 0
    small_float32: bool = False
    table_float32: bool = False
    low_rank: LowRank | None = None
    preconditioners: Preconditioners | None = None
    by_row: bool = False
    table_by_row: bool = False
    compensated: bool = False
    average: int = 0
    average_away: int = 0
    paged: int = 0
    in_backward: bool = False
    update_bytes: float = 0
    one_block: bool = False
    sharded: bool = True
    eight_bit: str = ""
    torch: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    step: StepTemporaries = NO_TEMPORARIES
    variants: tuple[Variant, ...] = ()
    variant_of: str = ""
    takes: tuple[str, ...] = ()
    source: str = "rajbhandari2019"

    def moment(self, precision: Precision) -> float:
        """Return the bytes of one element of a moment.

        >>> from loadgauge.core.definitions.training.precision import PRECISIONS
        >>> OPTIMIZERS["adamw"].moment(PRECISIONS["bf16-pure"]), OPTIMIZERS["adamw-8bit"].moment(PRECISIONS["bf16-pure"])
        (2, 1.015625)
        """
        return precision.moment if self.moment_bytes is None else self.moment_bytes

    @property
    def by_tensor(self) -> bool:
        """Return whether the state depends on the tensor, so that a number of parameters alone does not give it."""
        return bool(
            self.factored
            or self.small
            or self.low_rank
            or self.preconditioners
            or self.by_row
            or self.table_by_row
            or self.paged
            or self.matrix_moments is not None
        )

    def moved(self, precision: Precision) -> float:
        """Return the memory traffic of the step [bytes per parameter]: gradients read twice (once for their norm), master weights
        and moments (and an average) read and written, the weights of the products written."""
        kept = (precision.master or precision.weight) + self.moments * self.moment(precision) + self.average
        return 2 * precision.gradient + 2 * kept + precision.compute

    def run_as(self, *suffixes: str) -> Optimizer:
        """Return the optimizer under its own name, run in the first of these variants that it has; itself where it has none.

        >>> OPTIMIZERS["adamw"].run_as("foreach").step.lists, OPTIMIZERS["lion"].run_as("foreach").step.lists
        (1, 0)
        """
        steps = {variant.suffix: variant.step for variant in self.variants}
        chosen = next((steps[suffix] for suffix in suffixes if suffix in steps), self.step)
        return self if chosen is self.step else msgspec.structs.replace(self, step=chosen)


# torch/optim: what is alive at once, by running them. The root of AdamW's second moment is a list of its own, and all that
# follows is in place; the loop divides it into a second tensor (`denom`). SGD's update is in place either way.
ADAMW_VARIANTS = (
    Variant("fused", NO_TEMPORARIES, (("fused", True),)),
    Variant("foreach", StepTemporaries(lists=1), (("foreach", True),)),
    Variant("loop", StepTemporaries(largest=2), (("foreach", False),)),
)
LIST, LOOP = StepTemporaries(lists=1), StepTemporaries(largest=2)
"""One list of all parameters' size; a loop with two temporaries, for the root of the second moment and what it divides."""


def _with_variants(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizer, and each way to run it as one of its own."""
    return optimizer, *(
        msgspec.structs.replace(
            optimizer,
            name=f"{optimizer.name}-{variant.suffix}",
            step=variant.step,
            variants=(),
            torch="" if variant.options is None else optimizer.torch,
            options=optimizer.options + (variant.options or ()),
            variant_of=optimizer.name,
        )
        for variant in optimizer.variants
    )


BLOCK_SCALE = 4 / 256
"""Bytes of a float32 scale for each block of 256 elements."""
EIGHT_BITS: dict[str, Any] = {"moment_bytes": 1 + BLOCK_SCALE, "small": 4096}
"""bitsandbytes' and torchao's moments of 8 bits: tensors below 4096 elements keep theirs whole."""
BITSANDBYTES: dict[str, Any] = {**EIGHT_BITS, "small_float32": True, "source": "dettmers2021"}
TRAINER: dict[str, Any] = {**BITSANDBYTES, "table_float32": True}
"""With transformers' Trainer, which registers every embedding with bitsandbytes' GlobalOptimManager as of 32 bits."""
PAGED: dict[str, Any] = {"paged": 100_000}
"""bitsandbytes' `get_state_buffer` leaves smaller tensors on the card."""
RANK: dict[str, Any] = {"takes": ("rank", "every"), "sharded": False}

OPTIMIZERS: dict[str, Optimizer] = {
    optimizer.name: optimizer
    for family in (
        Optimizer(
            name="adamw", moments=2, eight_bit="adamw-8bit", torch="torch.optim.AdamW", options=(("lr", 1e-4),),
            variants=ADAMW_VARIANTS,
        ),
        # One byte a moment and a float32 scale for each block of 256.
        Optimizer(name="adamw-8bit", moments=2, **TRAINER),
        Optimizer(name="adamw-bnb-32bit", moments=2, moment_bytes=4, eight_bit="adamw-8bit", source="dettmers2021"),
        Optimizer(name="paged-adamw-8bit", moments=2, **TRAINER, **PAGED),
        Optimizer(
            name="paged-adamw-32bit", moments=2, moment_bytes=4, eight_bit="paged-adamw-8bit", source="dettmers2021", **PAGED
        ),
        # torchao: in transformers' hands blocks are of 256 elements in both.
        Optimizer(name="adamw-torchao-8bit", moments=2, **EIGHT_BITS, source="torchao"),
        Optimizer(name="adamw-4bit", moments=2, moment_bytes=1 / 2 + BLOCK_SCALE, small=4096, source="torchao"),
        Optimizer(name="adamw-fp8", moments=2, **EIGHT_BITS, source="torchao"),
        Optimizer(
            name="adafactor", moments=0, factored=True, torch="torch.optim.Adafactor", options=(("lr", 1e-2),),
            step=StepTemporaries(largest=1),
            # transformers' own class: the update, its square, and float32 copies of 16-bit gradients and weights.
            variants=(
                Variant("transformers", StepTemporaries(largest=2, float32=True, upcasts=2, source="transformers")),
            ),
            source="shazeer2018",
        ),
        # Momentum alone for the matrices of the blocks; embeddings, head and vectors stay with AdamW.
        Optimizer(name="muon", moments=2, matrix_moments=1, source="jordan2024"),
        Optimizer(name="lion", moments=1, eight_bit="lion-8bit", source="chen2023lion"),
        Optimizer(name="lion-8bit", moments=1, **TRAINER),
        Optimizer(name="lion-bnb-32bit", moments=1, moment_bytes=4, eight_bit="lion-8bit", source="dettmers2021"),
        Optimizer(name="paged-lion-8bit", moments=1, **TRAINER, **PAGED),
        Optimizer(
            name="paged-lion-32bit", moments=1, moment_bytes=4, eight_bit="paged-lion-8bit", source="dettmers2021", **PAGED
        ),
        Optimizer(name="rmsprop", moments=1, torch="torch.optim.RMSprop", options=(("lr", 1e-3),), step=LIST, source="pytorch"),
        Optimizer(name="rmsprop-8bit", moments=1, **TRAINER),
        Optimizer(name="rmsprop-bnb-32bit", moments=1, moment_bytes=4, eight_bit="rmsprop-8bit", source="dettmers2021"),
        Optimizer(
            name="adagrad", moments=1, torch="torch.optim.Adagrad", options=(("lr", 1e-2),),
            step=StepTemporaries(lists=2), source="pytorch",
        ),
        # torchrec's of tables: one number for each row; what is no table has Adagrad's own.
        Optimizer(
            name="rowwise-adagrad", moments=1, table_by_row=True, step=StepTemporaries(lists=2), source="torchrec",
        ),
        Optimizer(
            name="sgd-momentum", moments=1, torch="torch.optim.SGD", options=(("lr", 1e-2), ("momentum", 0.9)),
        ),
        Optimizer(name="sgd", moments=0, torch="torch.optim.SGD", options=(("lr", 1e-2),)),
        # Two sequences of weights and a second moment; the weights that are trained are one of the sequences.
        Optimizer(name="schedule-free-adamw", moments=2, step=LIST, source="defazio2024"),
        Optimizer(name="schedule-free-sgd", moments=1, source="defazio2024"),
        # The averaged gradient is the third; all are on the host between steps, and fetched tensor by tensor.
        Optimizer(name="grokadamw", moments=3, paged=1, source="grokadamw", sharded=False),
        Optimizer(name="ademamix", moments=3, moment_bytes=4, eight_bit="ademamix-8bit", source="dettmers2021"),
        Optimizer(name="ademamix-8bit", moments=3, **TRAINER),
        Optimizer(name="stable-adamw", moments=2, compensated=True, step=LIST, source="optimi"),
        Optimizer(name="adamw-anyprecision", moments=2, moment_bytes=4, source="torchdistx"),
        Optimizer(name="galore", moments=2, step=LOOP, low_rank=LowRank(), source="zhao2024", **RANK),
        Optimizer(
            name="galore-8bit", moments=2, low_rank=LowRank(), **{**BITSANDBYTES, "source": "zhao2024"}, **RANK
        ),
        Optimizer(
            name="galore-adafactor", moments=0, factored=True, low_rank=LowRank(projector_bytes=4),
            step=StepTemporaries(largest=2, float32=True, upcasts=2), source="zhao2024", **RANK,
        ),
        Optimizer(
            name="galore-layerwise", moments=2, low_rank=LowRank(), in_backward=True, source="zhao2024", **RANK
        ),
        Optimizer(
            name="galore-8bit-layerwise", moments=2, low_rank=LowRank(), in_backward=True,
            **{**BITSANDBYTES, "source": "zhao2024"}, **RANK,
        ),
        Optimizer(name="apollo", moments=2, step=LOOP, low_rank=LowRank(), source="zhu2024", **RANK),
        Optimizer(name="apollo-mini", moments=2, step=LOOP, low_rank=LowRank(rank=1), source="zhu2024", **RANK),
        Optimizer(name="apollo-layerwise", moments=2, low_rank=LowRank(), in_backward=True, source="zhu2024", **RANK),
        # The gradient and the weight of the tensor in float32, beside them for AdaLOMO the update.
        Optimizer(name="lomo", moments=0, in_backward=True, update_bytes=8, sharded=False, source="lv2023"),
        Optimizer(
            name="adalomo", moments=0, factored=True, in_backward=True, update_bytes=12, sharded=False, source="lv2023"
        ),
        Optimizer(name="badam", moments=2, moment_bytes=4, one_block=True, sharded=False, source="luo2024"),
        Optimizer(name="adam-mini", moments=1, by_row=True, source="zhang2024"),
        Optimizer(name="soap", moments=2, preconditioners=Preconditioners(each=2), sharded=False, source="vyas2024"),
    )
    for optimizer in _with_variants(family)
}  # fmt: skip
"""Every optimizer by name."""

KNOWN = {
    "shampoo": "its preconditioners are those of blocks whose size its configuration states",
    "q-galore": "its weights are of 8 bits",
    "sophia": "its Hessian is estimated by a backward of its own",
    "adan": "", "came": "", "lamb": "", "dion": "", "prodigy": "", "rex": "", "lars": "",
    "distributed-muon": "its momentum is sharded by layers",
}  # fmt: skip
"""Optimizers that are known and not modelled, with what is in the way."""

MOMENTS: dict[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of a moment in a format (megatron-core: `exp_avg_dtype`, `exp_avg_sq_dtype`; DeepSeek-V3 keeps its in bf16)."""
AVERAGES = {"ema": ("average", 4), "ema=host": ("average_away", 4)}
"""Moving averages of the weights, in float32, by where they are: field of `Optimizer`, and bytes."""
OPTIONS = (*(f"moments={name}" for name in MOMENTS), *AVERAGES, "in-backward")
"""Options of every optimizer; in-backward: to be stepped tensor by tensor in backward (torchtune's `optimizer_in_bwd`)."""


def parse(text: str) -> Optimizer:
    """Read the name of an optimizer and its options: `NAME`, `NAME:KEY=VALUE,...`, `NAME:in-backward`, `NAME:moments=bf16,ema`.

    Raises `ConfigError` for a name or an option that does not exist, `NotModelled` for an optimizer of `KNOWN`.

    >>> parse("galore:rank=256,every=100").low_rank
    LowRank(rank=256, every=100, head=False, projector_bytes=None)
    >>> parse("adamw-8bit:in-backward").in_backward
    True
    """
    name, _, words = text.strip().partition(":")
    if name in KNOWN:
        why = f": {KNOWN[name]}" if KNOWN[name] else ""
        raise NotModelled(f"optimizer {name!r}{why} (modelled: {', '.join(OPTIMIZERS)})")
    if name not in OPTIMIZERS:
        hint = "".join(f"; did you mean {match!r}?" for match in closest(name, OPTIMIZERS))
        raise ConfigError(f"unknown optimizer {name!r} (known: {', '.join(OPTIMIZERS)}){hint}", key="optimizer")
    optimizer = OPTIMIZERS[name]
    low = optimizer.low_rank
    for word in filter(None, (each.strip() for each in words.split(","))):
        key, _, value = word.partition("=")
        if word == "in-backward":
            optimizer = msgspec.structs.replace(optimizer, in_backward=True)
        elif key == "moments" and value in MOMENTS:
            optimizer = msgspec.structs.replace(optimizer, moment_bytes=MOMENTS[value])
        elif word in AVERAGES:
            optimizer = msgspec.structs.replace(optimizer, **dict([AVERAGES[word]]))
        elif low is not None and word == "head":
            low = msgspec.structs.replace(low, head=True)
        elif low is not None and key in optimizer.takes:
            if not (value.isascii() and value.isdecimal() and 1 <= int(value) <= 10**6):
                raise ConfigError(f"{word!r}: the number must be from 1 to 1000000", key="optimizer")
            low = msgspec.structs.replace(low, **{key: int(value)})
        else:
            takes = ", ".join((*(f"{each}=N" for each in optimizer.takes), *(["head"] if low else []), *OPTIONS))
            raise ConfigError(f"{word!r} is no option of {name} (it takes {takes})", key="optimizer")
    name = text.strip().replace(" ", "") if words else name
    return msgspec.structs.replace(optimizer, name=name, low_rank=low)


class TorchOptimizer(msgspec.Struct, frozen=True):
    """An optimizer as PyTorch runs it: the name of its record, its class and its arguments."""

    optimizer: str
    factory: str
    options: dict[str, Any]


def torch_optimizers() -> dict[str, TorchOptimizer]:
    """Return PyTorch's optimizers and their variants by name; without a suffix as PyTorch runs them on CUDA: foreach.

    >>> torch_optimizers()["adamw-fused"].options
    {'lr': 0.0001, 'fused': True}
    """
    return {
        optimizer.name: TorchOptimizer(optimizer.variant_of or optimizer.name, optimizer.torch, dict(optimizer.options))
        for optimizer in OPTIMIZERS.values()
        if optimizer.torch
    }
