"""Changes to try when a run does not fit: every suggestion is a command line that was estimated."""

from itertools import combinations
from math import ceil, log2
from typing import Any

from loadgauge.core.base.verdict import RANK
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.plan.advise.changes import FIT, Change, Kind, Run, changes, tp_factors
from loadgauge.core.plan.advise.try_ import Tried, effort, try_change
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.core.resolve.setup import Setup

MOST_GPUS = 4096
MOST_SHOWN = 6
ENOUGH = 3
DEAR = (1.35, 2.0, 4.0)
"""Times of a run, over its own, from which on a change comes after milder ones."""
TAKES = {"framework": 1, "qlora": 1, "gpus": 2, "seq_len": 3}
"""Price of a change in steps, for what it takes: another framework, a base in 4 bits, up to 4 times the GPUs, another job."""
SHORTEST = 512
"""Tokens of a sequence below which none is advised."""


def advice(setup: Setup) -> list[Tried]:
    """Return the changes that make a run fit, the mildest first; where none does, the closest ones.

    Single changes are tried first, then saying what is assumed, then pairs, then the mildest combination, Unsloth for adapters
    on one GPU, more GPUs, adapters instead of full training, and shorter sequences. Certain fits precede tight ones.
    """
    own = setup.estimate()
    # Changes of a layout of which nothing is said are changes of the one that is assumed.
    assumed = _unsaid(own) if setup.open_layout else {}
    run = resolve_job(setup.job.replace(**assumed), setup.model) if assumed else setup
    alone: list[Change] = []
    tried: list[Tried] = []
    fitting: list[Tried] = []
    for change in changes(Run.of_setup(run), FIT):
        smaller = change.kind is Kind.SMALLER_MICRO_BATCH
        if smaller and any("micro_batch" in trial.fields for trial in fitting):
            continue  # the largest that fits is enough
        trial = _try(setup, assumed | change.fields, change.why)
        tried += [] if trial is None else [trial]
        if trial is not None and trial.result.memory.fits:
            fitting.append(trial)
        elif not smaller or change.fields == {"micro_batch": 1}:
            alone.append(change)
    if own.memory.verdict == "depends" and (itself := _try(setup, {}, "")) is not None and itself.result.memory.fits:
        fitting.insert(0, itself)
    cheap = sum(not _price(trial, own) for trial in fitting)
    if cheap < ENOUGH:
        fitting += _pairs(setup, assumed, alone, cheap)
    if all(_price(trial, own) >= len(DEAR) for trial in fitting):  # none, or none but in several times the time
        others = (_more_gpus, _adapters) if setup.training.lora is None else (_adapters, _more_gpus)
        last = [trial for way in (_together, _unsloth, *others, _shorter) if (trial := way(setup)) is not None]
        fitting += [trial for trial in last if trial.result.memory.fits]
        tried += last
    fitting = sorted(fitting, key=lambda trial: _price(trial, own))
    before = own.memory
    # One that may fit is a step on.
    fitting += sorted((trial for trial in tried if 0 < _rank(trial) < RANK[before.verdict]), key=_rank)
    if fitting:
        return fitting[:MOST_SHOWN]
    lower = [trial for trial in tried if trial.result.memory.total < before.total]
    return sorted(lower, key=_closeness)[:ENOUGH]


def _try(setup: Setup, fields: dict[str, Any], why: str) -> Tried | None:
    """A change; where it fits as assumed, and something unsaid may need more, with that said."""
    trial = try_change(setup, fields, why)
    if trial is None or trial.result.memory.verdict != "depends":
        return trial
    own = _unsaid(trial.result)
    if not own or own.keys() & fields.keys():
        return trial
    as_assumed = try_change(setup, {**fields, **own}, "; ".join(filter(None, (why, "the rest is as assumed"))))
    return as_assumed if as_assumed is not None and as_assumed.result.memory.fits else trial


def _price(trial: Tried, own: Estimate) -> int:
    """Price of a change: by the hours that it adds to a run, and by what else it takes."""
    more = effort(trial.result, own)
    doublings = ceil(log2(max(1, trial.result.layout.gpus / own.layout.gpus)))
    return (
        sum(more > bound for bound in DEAR) + sum(TAKES.get(name, 0) for name in trial.fields) + max(0, doublings - 2)
    )


def _unsaid(result: Estimate) -> dict[str, Any]:
    """Return, as fields of a job, the assumptions of an estimate whose other value would need more memory."""
    return {
        name: value
        for thing in result.memory.unsaid
        if thing.more > 0
        for name, value in thing.fields(thing.assumed).items()
    }


def _rank(trial: Tried) -> int:
    return RANK[trial.result.memory.verdict]


def _closeness(trial: Tried) -> tuple[int, float]:
    return _rank(trial), trial.result.memory.total


def _pairs(setup: Setup, assumed: dict[str, Any], alone: list[Change], enough: int) -> list[Tried]:
    """Two changes together, where neither does it alone, the mildest first; a few are enough."""
    pairs: list[Tried] = []
    ranked = sorted(combinations(range(len(alone)), 2), key=lambda pair: (sum(pair), pair))
    for first, second in ((alone[first_index], alone[other]) for first_index, other in ranked):
        if first.fields.keys() & second.fields.keys():
            continue
        both = _try(setup, assumed | first.fields | second.fields, f"{first.why}; {second.why}")
        if both is not None and both.result.memory.fits:
            pairs.append(both)
        if len(pairs) + enough >= ENOUGH:
            break
    return pairs


def _mild(setup: Setup) -> dict[str, Any]:
    """Everything mild at once."""
    fields: dict[str, Any] = {}
    if setup.model.head.kind == "lm" and setup.training.kernels.loss != "chunked":
        fields["loss"] = "chunked"
    if setup.layout.micro_batch > 1:
        fields["micro_batch"] = 1
    if setup.layout.recompute.mode != "full":
        fields["recompute"] = "full"
    if setup.training.kernels.attention == "eager":
        fields["attention"] = "flash"
    return fields


def _together(setup: Setup) -> Tried | None:
    """The mildest combination that fits on the same GPUs."""
    mild, layout = _mild(setup), setup.layout
    combined: list[dict[str, Any]] = [mild]
    if layout.zero_ranks > 1:
        combined += [{"zero": 1} | mild, {"zero": 3} | mild]
    factors = tp_factors(Run.of_setup(setup))
    for zero in ({}, {"zero": 1}):
        combined += [{"tp": layout.tp * factor, "sequence_parallel": True, **zero, **mild} for factor in factors]
    if smaller := setup.training.optimizer.eight_bit:
        combined += [{"optimizer": smaller, **mild}]
    combined += [{"offload": "optimizer", **mild}]
    if layout.zero_ranks > 1:
        combined += [{"zero": 3, "offload": "all", **mild}]
    return _first(setup, combined, "together, on the same GPUs")


def _unsloth(setup: Setup) -> Tried | None:
    """Adapters by the framework that keeps least for them, on one GPU: on the base as it is, or in 4 bits."""
    if not setup.training.framework.is_default or setup.layout.gpus > 1 or setup.model.head.kind != "lm":
        return None
    if setup.gpu is not None and setup.gpu.vendor in ("apple", "google"):
        return None
    bases: list[dict[str, Any]] = [{"qlora": True}] if setup.training.lora is None else [{}, {"qlora": True}]
    ways = [_try(setup, {"framework": "unsloth"} | base, "its own kernels, checkpoints on the host") for base in bases]
    return min((trial for trial in ways if trial is not None), key=_rank, default=None)


def _shorter(setup: Setup) -> Tried | None:
    """The longest sequences that fit, halving, with everything mild."""
    if setup.lengths is not None:
        return None
    length, lengths = int(setup.layout.seq_len) // 2, []
    while length >= SHORTEST:
        lengths.append({**_mild(setup), "seq_len": length})
        length //= 2
    return _first(setup, lengths, "shorter sequences")


def _more_gpus(setup: Setup) -> Tried | None:
    """The fewest GPUs, doubling, on which ZeRO 3 and everything mild make it fit."""
    layout, gpus = setup.layout, int(setup.layout.gpus)
    batch = {} if setup.job.global_batch is None else {"global_batch": setup.job.global_batch}
    while gpus * 2 <= MOST_GPUS:
        gpus *= 2
        for fields in ({"gpus": gpus, "zero": 3}, {"gpus": gpus, "zero": 3, **_mild(setup)}):
            trial = _try(setup, {**fields, **batch}, f"{gpus} GPUs")
            if trial is None and batch:
                # As many micro-batches a rank as before.
                larger = {"global_batch": layout.global_batch * gpus // int(layout.gpus)}
                trial = _try(setup, fields | larger, f"{gpus} GPUs, a larger batch")
            if trial is not None and trial.result.memory.fits:
                return trial
    return None


def _adapters(setup: Setup) -> Tried | None:
    """QLoRA, with as little else as it takes."""
    if setup.training.lora is not None and setup.training.lora.quantised:
        return None
    combined: list[dict[str, Any]] = [
        {"qlora": True},
        {"qlora": True, "loss": "chunked"},
        {"qlora": True} | _mild(setup),
    ]
    return _first(setup, combined, "trains adapters on a 4-bit base only")


def _first(setup: Setup, combined: list[dict[str, Any]], why: str) -> Tried | None:
    for fields in combined:
        trial = _try(setup, fields, why)
        if trial is not None and trial.result.memory.fits:
            return trial
    return None
