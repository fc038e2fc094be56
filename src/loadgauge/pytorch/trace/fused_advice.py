"""Places in a traced model where an operator of `fused` would keep less, and the bytes it would save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import msgspec

from loadgauge.pytorch.record.allocations import SAVED, Record, Stream, op_name


class Advice(msgspec.Struct, frozen=True):
    """An operator of `loadgauge.train.fused`, the modules it fits, and the saved activations it would avoid [bytes]."""

    operator: str
    modules: tuple[str, ...]
    saves: int
    why: str


def advise(stream: Stream, kinds: Mapping[str, str], live: Sequence[int], multiplied: Set[int]) -> tuple[Advice, ...]:
    """Finds operators that would save fewer activations, largest saving first.

    live: numbers of the storages that are live at the peak. `kinds`: class of each module; `multiplied`: storages
    that a multiplication keeps."""
    kept = [stream.records[number] for number in live if stream.category(number) == SAVED]
    result = []
    norms = [record for record in kept if "rmsnorm" in kinds.get(record.module, "").lower()]
    result.append(_of_norms([norm for norm in norms if op_name(norm.op) != "external"]))
    factors = (stream.records[number] for number in live if number in multiplied)
    gates = [record for record in factors if op_name(record.op) == "aten::silu"]
    result.append(_advice("swiglu", gates, "silu(gate), which is cheap to work out again"))
    losses = [record for record in kept if op_name(record.op) in ("aten::_log_softmax", "aten::log_softmax")]
    result.append(_advice("linear_cross_entropy", losses, "log-softmax of all logits"))
    sigmoids = [record for record in kept if op_name(record.op) == "aten::sigmoid"]
    if len(sigmoids) > 1:
        result.append(_advice("sigmoid_chain", sigmoids[:-1], "every output but the last"))
    return tuple(sorted((advice for advice in result if advice is not None), key=lambda advice: -advice.saves))


def _advice(operator: str, records: Sequence[Record], why: str) -> Advice | None:
    saves = sum(record.nbytes for record in records)
    modules = tuple(dict.fromkeys(record.module for record in records))
    return Advice(operator, modules, saves, f"keeps no {why}") if saves else None


def _of_norms(records: Sequence[Record]) -> Advice | None:
    """A norm keeps its result for the next operation, and a number per row; a fused one keeps x besides, which a plain
    one does not where it keeps a wider copy of it."""
    groups: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        if record.shape and record.shape[-1] > 1:
            groups.setdefault((record.module, record.phase), []).append(record)
    modules, saves = [], 0
    for (module, _), made in groups.items():
        *inner, result = made
        wider = any(record.nbytes > result.nbytes for record in inner)
        less = sum(record.nbytes for record in inner) - (result.nbytes if wider else 0)
        if less > 0:
            saves += less
            modules.append(module)
    names = tuple(dict.fromkeys(modules))
    return Advice("rms_norm", names, saves, "keeps no wide copy of x and no normalised x") if saves else None
