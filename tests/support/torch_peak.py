"""The peak of a real training step on a CPU: the truth is the allocator's own events, less the scratch of kernels."""

from __future__ import annotations

import functools
import gc
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from torch_models import Built

CPU_GENERATOR = 5056
"""Bytes of the CPU generator's state, of which each checkpoint holds a copy to run its layer again."""


def optimizer(built: Built, name: str) -> torch.optim.Optimizer:
    """One that updates parameter by parameter."""
    if name == "adamw":
        return torch.optim.AdamW(built.model.parameters(), lr=1e-4, foreach=False, fused=False)
    return torch.optim.SGD(built.model.parameters(), lr=1e-2, foreach=False)


def largest_update(built: Built) -> int:
    """What that AdamW makes for the largest parameter: a square root and a denominator. (A fused step: nothing.)"""
    return 2 * max(parameter.nbytes for parameter in built.model.parameters())


def measured_peak(built: Built, s: int, b: int, optimizer_name: str, *, batches: int = 1, held: bool = False) -> int:
    """Largest number of bytes allocated in two steps: the first makes the optimizer's states, the second finds them.

    `held`: the loop holds on to the model's outputs, and with them the logits, while it calls backward.
    """
    step_of = optimizer(built, optimizer_name)
    ids = built.ids(s, b)
    parameters = {parameter.data_ptr(): parameter.nbytes for parameter in built.model.parameters()}
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(2):
            for _ in range(batches):
                outputs = built.model(ids, labels=ids)
                loss = outputs.loss
                if not held:
                    del outputs
                loss.backward()
                outputs = loss = None
            step_of.step()
            step_of.zero_grad(set_to_none=True)
    return sum(parameters.values()) + ids.nbytes + highest(profiler)


class Event(NamedTuple):
    """One allocation (positive) or release (negative) [bytes], and when the kernel ends that it happened in [ns]."""

    time: int
    address: int
    change: int
    kernel_end: int


@functools.cache
def composite() -> frozenset[str]:
    """Operators that are written with other operators and have no kernel of their own on a CPU."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    without, kernels = (
        {name.partition(".")[0] for name in registered(key)} for key in ("CompositeImplicitAutograd", "CPU")
    )
    return frozenset(without - kernels)


def events(profiler: profile) -> list[Event]:
    """The allocator's events in order of time."""
    kinds = torch._C._profiler._EventType
    waiting: list[tuple[Any, int]] = [
        (event, 0) for event in profiler.profiler.kineto_results.experimental_event_tree()
    ]
    seen = []
    while waiting:
        event, end = waiting.pop()
        kind, fields = event.typed
        if kind == kinds.Allocation:
            seen.append(Event(event.start_time_ns, fields.ptr or 0, fields.alloc_size, end))
        elif not end and kind == kinds.TorchOp and event.name.startswith("aten::") and event.name not in composite():
            end = event.end_time_ns
        waiting.extend((child, end) for child in event.children)
    return sorted(seen)


def scratch(changes: list[Event]) -> set[int]:
    """Positions of the allocations that a kernel makes and releases before it returns, and of their releases.

    They are no tensors of the program, and differ between CPUs: oneDNN takes float32 copies of bfloat16 matrices where
    there are no bfloat16 instructions, attention takes buffers for each thread.
    """
    made: dict[int, int] = {}
    places: set[int] = set()
    for place, event in enumerate(changes):
        if event.change > 0:
            made[event.address] = place
        elif event.address in made:
            start = made.pop(event.address)
            if event.time <= changes[start].kernel_end:
                places |= {start, place}
    return places


def highest(profiler: profile) -> int:
    """Largest sum of allocations less releases since the profiler began, without the scratch of kernels."""
    changes = events(profiler)
    left_out = scratch(changes)
    now = peak = 0
    for place, event in enumerate(changes):
        if place not in left_out:
            now += event.change
            peak = max(peak, now)
    return peak
