"""The memory of one call of a function, traced on fake tensors of any size, as on a CPU or on CUDA."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from loadgauge.core.base.by_key import largest_first
from loadgauge.core.base.errors import refuse
from loadgauge.pytorch.device.simulated import fake_tensors, simulated_device
from loadgauge.pytorch.record.allocations import op_name
from loadgauge.pytorch.record.sizes import Usage, storage_bytes
from loadgauge.pytorch.record.tracker import Tracker

DEVICES = ("cuda", "cpu")


class Call(Usage, frozen=True):
    """A traced `Usage`; `made`: bytes of the result that the function allocated itself."""

    made: int = 0

    @property
    def extra(self) -> tuple[int, int]:
        """(persistent, peak) without the result [bytes], as article 5 counts."""
        return self.persistent - self.made, self.peak - self.made


def trace_call(function: Callable[..., Any], *inputs: Any, device: str = "cuda") -> Call:
    """Traces the memory of one call of a function above its inputs; nothing is allocated or computed.

    Tensors among the inputs may be real or on the device `meta`; they stand for tensors on `device`. Raises what the
    function raises.

    >>> import torch
    >>> x = torch.empty(2**29, dtype=torch.float16, device="meta", requires_grad=True)
    >>> call = trace_call(lambda x: 1 / (1 + torch.exp(-x)), x)
    >>> [part / 2**30 for part in call.extra]  # in units of one tensor
    [2.0, 3.0]
    """
    device_type = where(device)
    with fake_tensors():
        fakes = tree_map(lambda value: fake_like(value, device_type), inputs)
        input_bytes = storage_bytes(fakes)
        tracker = Tracker(device_type)
        tracker.claim(tree_leaves(fakes), "inputs")
        before, first = tracker.live(), len(tracker.stream.ids)
        tracker.begin("call")
        with tracker:
            result = function(*fakes)
        after = tracker.live()
        moment = tracker.stream.peak(first) if len(tracker.stream.ids) > first else None
        live = {} if moment is None else tracker.stream.live(moment.event)
        held = [(tracker.stream.records[number], nbytes) for number, nbytes in live.items()]
        peak = max(after, moment.total if moment else 0) - before
        return Call(
            device=f"simulated {device}",
            persistent=after - before,
            peak=max(0, peak),
            seconds=0.0,
            by_op=largest_first((op_name(record.op), nbytes) for record, nbytes in held if record.phase),
            made=sum(nbytes for key, nbytes in storage_bytes(result).items() if key not in input_bytes),
        )


def where(device: str) -> str:
    """Return PyTorch's name of the simulated device for `device` (cuda or cpu). Raises ConfigError for another."""
    refuse(device not in DEVICES, f"device: traces as on {' or '.join(DEVICES)}, got {device!r}")
    return simulated_device() if device == "cuda" else "cpu"


def fake_like(value: Any, device: str) -> Any:
    """Return a fake tensor of the shape, strides, dtype and `requires_grad` of a tensor; other values unchanged.

    device: PyTorch's name of its device
    """
    if not isinstance(value, torch.Tensor):
        return value
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return fake.requires_grad_(value.requires_grad)
