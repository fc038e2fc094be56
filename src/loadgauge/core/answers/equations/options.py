"""The options of an equation: layer, ranks, kernels and recomputation, checked."""

from typing import Literal

import msgspec

from loadgauge.core.answers.equations.layers import Subject, subject
from loadgauge.core.base import ConfigError, Size, refuse
from loadgauge.core.definitions.layout import axes
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.definitions.model.kernels import PAPER, Dtypes, Kernels
from loadgauge.core.estimate.symbols import letter
from loadgauge.core.layers import View

AXES = {name: axes.AXES[name].symbol for name in axes.STAGE_AXES}
"""The axes a layer is sharded over, and the letters for how many ranks each has."""
ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
WEIGHTS = ("params", "active-params")
"""Quantities of one layer that have no micro-batch."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The checked options of an equation. `ranks`: of each sharded axis, the letter or a number above 1."""

    quantity: str
    of: Subject
    ranks: dict[str, int | str]
    sequence_parallel: bool
    policy: RecomputePolicy
    attention: Literal["eager", "flash"]
    experts: Literal["grouped", "fused"]
    padding_free: bool
    itemsize: int

    @property
    def has_experts(self) -> bool:
        """Return whether any of the layers has experts."""
        return self.of.has_experts

    @property
    def numbers(self) -> dict[str, Size]:
        """The number of ranks by the letter of its axis, where it is a number."""
        return {AXES[axis]: ranks for axis, ranks in self.ranks.items() if isinstance(ranks, int)}

    def view(self) -> View:
        """Return the view of one micro-batch on one rank, with letters for all sizes."""
        kernels: Kernels = msgspec.structs.replace(
            PAPER,
            attention=self.attention,
            experts=self.experts,
            dtypes=Dtypes(activation=self.itemsize, norm_statistic=0, index=0),
        )
        s, b = letter("s"), letter("b")
        tokens, pairs = (letter("T"), letter("P")) if self.padding_free else (s * b, s * s * b)
        ranks: dict[str, Size] = {axis: letter(AXES[axis]) for axis in self.ranks}
        c = ranks.get("cp", 1)
        return View(
            tokens=tokens / c,
            pairs=pairs / c,
            sequences=b,
            positions=s,
            sequence_parallel=self.sequence_parallel,
            kernels=kernels,
            **ranks,
        )


def chosen(
    quantity: str,
    layer: str,
    ranks: dict[str, int | str],
    sequence_parallel: bool,
    recompute: str,
    attention: str,
    experts: str,
    padding_free: bool,
    precision: str,
) -> Choice:
    """Check the options of an equation. Raises `ConfigError` or `LayoutError` where there is no answer."""
    for axis, count in ranks.items():
        if count != AXES[axis] and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ConfigError(f"must be a whole number of at least 1, or {AXES[axis]}, got {count!r}", key=axis)
    for word, chosen_word, choices in (
        ("attention", attention, ("eager", "flash")),
        ("experts", experts, ("grouped", "fused")),
        ("precision", precision, tuple(ITEMSIZES)),
    ):
        if chosen_word not in choices:
            raise ConfigError(f"unknown {word} {chosen_word!r} (known: {', '.join(choices)})")
    policy = RecomputePolicy.parse(recompute)
    refuse(
        policy.every > 1 or policy.layers is not None or policy.group > 1,
        f"{recompute!r} chooses among layers; an equation is of one",
        key="recompute",
    )
    tp = ranks.get("tp", 1)
    of = subject(layer, tp if isinstance(tp, int) else 1)
    sharded = {axis: count for axis, count in ranks.items() if count != 1}
    if quantity == "wire" and not sharded:
        # One rank sends nothing.
        sharded = {"tp": "t", "ep": "e"} if of.has_experts else {"tp": "t"}
        sequence_parallel = sequence_parallel or of.has_experts
    _check_ranks(quantity, of, sharded, sequence_parallel)
    refuse(experts != "grouped" and not of.has_experts, f"{of.name} has no experts", key="experts")
    return Choice(
        quantity=quantity,
        of=of,
        ranks=sharded,
        sequence_parallel=sequence_parallel,
        policy=policy,
        attention="flash" if attention == "flash" else "eager",
        padding_free=padding_free,
        experts="fused" if experts == "fused" else "grouped",
        itemsize=ITEMSIZES[precision],
    )


def _check_ranks(quantity: str, of: Subject, ranks: dict[str, int | str], sequence_parallel: bool) -> None:
    if ranks and (quantity.startswith("model-") or quantity == "active-params"):
        raise ConfigError(f"{quantity} counts what all ranks have together", key=next(iter(ranks)))
    refuse(
        sequence_parallel and "tp" not in ranks,
        "sequence parallelism shards over tp: give tp as well",
        key="sequence_parallel",
    )
    for axis in ("ep", "etp"):
        refuse(axis in ranks and not of.has_experts, f"shards experts, and {of.name} has none", key=axis)
    if quantity == "params":
        refuse("cp" in ranks, "shards tokens, not parameters", key="cp")
        sequence_parallel = "tp" in ranks  # which changes nothing here
    refuse(
        of.has_experts and "tp" in ranks and not sequence_parallel,
        "experts with tp above 1 need sequence parallelism",
        key="tp",
    )
    if of.is_open:
        return
    tp, cp, ep, etp = (count if isinstance(count := ranks.get(axis, 1), int) else 1 for axis in AXES)
    Layout(
        dp=ep * etp,
        tp=tp,
        cp=cp,
        ep=ep,
        etp=etp,
        sequence_parallel=sequence_parallel and tp > 1,
        seq_len=2 * tp * cp,
        global_batch=ep * etp,
    ).check(of.model)
