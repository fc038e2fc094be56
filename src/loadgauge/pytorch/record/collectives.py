"""Collective calls as PyTorch dispatches them, and the bytes that each is about."""

from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from loadgauge.core.base.by_key import lists
from loadgauge.pytorch.trace.result import Sum

_QUIET = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


class Collective(msgspec.Struct, frozen=True):
    """One call. `payload` is the larger of what goes in and what comes out on this rank [bytes]; what the wires carry
    follows from it by algorithm. `ranks`: size of the group, 0 where it is not known."""

    kind: str
    ranks: int
    payload: int
    phase: str = ""
    module: str = ""
    step: int = 0


def sum_by_kind(calls: Iterable[Collective]) -> tuple[Sum, ...]:
    """Sums calls and bytes by kind and group size, most bytes first."""
    payloads = lists(((call.kind, call.ranks), call.payload) for call in calls)
    sums = [Sum(kind, ranks, len(sizes), sum(sizes)) for (kind, ranks), sizes in payloads.items()]
    return tuple(sorted(sums, key=lambda total: (-total.payload, total.kind)))


def collective(
    func: Any, args: Any, kwargs: Any, out: Any, phase: str = "", module: str = "", step: int = 0
) -> Collective | None:
    """Return the collective that a dispatched operator is, with its payload [bytes]; None where it sends nothing.

    func, args, kwargs, out: the operator, its arguments and its result; phase, module, step: where in the step it ran
    """
    name: str = func._opname
    if name in _QUIET:
        return None
    values = [*args, *(kwargs or {}).values()]
    sizes = [_nbytes(value) for value in values] + [_nbytes(out)]
    return Collective(plain(name), _ranks(values), max(sizes), phase, module, step)


def plain(name: str) -> str:
    """One name for the ways in which PyTorch calls the same collective.

    >>> plain("_allgather_base_"), plain("all_gather_into_tensor"), plain("allreduce_")
    ('all_gather', 'all_gather', 'all_reduce')
    """
    bare = (
        name.strip("_").replace("_coalesced", "").replace("_base", "").replace("_out", "").replace("_into_tensor", "")
    )
    return _NAMES.get(bare.replace("_tensor", ""), bare.replace("_tensor", ""))


_NAMES = {
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "recv_any_source": "recv",
    "shard_dim_alltoall": "all_to_all",
}


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(value.numel() * value.element_size())
    if isinstance(value, list | tuple):
        return sum(_nbytes(item) for item in value)
    return 0


def _ranks(values: list[Any]) -> int:
    import torch.distributed as dist

    for value in values:
        try:
            if isinstance(value, torch.ScriptObject):
                return int(dist.ProcessGroup.unbox(value).size())
            if isinstance(value, str):
                resolve: Any = torch._C._distributed_c10d._resolve_process_group
                return int(resolve(value).size())
        except (RuntimeError, AttributeError, TypeError):
            continue
    return 0
