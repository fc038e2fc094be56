"""`torch.cuda` and `torch.accelerator` of the simulated device; its memory counters follow the trace."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import torch

from loadgauge.core.base.units import GIB, MIB
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.pytorch.device.kernels.streams import DEFAULT, Event, Stream, answering, current, set_current, within
from loadgauge.pytorch.record.allocations import Stream as Allocations, round_up
from loadgauge.pytorch.record.caching_allocator import SMALLEST, Allocator

DEVICES = 8
"""Number of GPUs that the code sees."""
NAME = "NVIDIA H100 80GB HBM3"
CAPABILITY = (9, 0)
TOTAL = round(gpu("h100-sxm5-80gb").capacity)
MULTIPROCESSORS = 132


class Counters:
    """The memory counters of the simulated device, which follow a stream of allocations.

    `allocated` are the bytes of live storages, each a multiple of 512, as in the trace's own peak; `reserved` is what the
    simulated caching allocator holds for them. The peaks are those since the last reset. devices: that a program counts
    """

    def __init__(self, devices: int | None = None) -> None:
        self._devices = devices
        self.stream: Allocations | None = None
        self.allocator = Allocator()
        self.allocated = self.requested = 0
        self.highest = {"allocated": 0, "requested": 0, "reserved": 0}
        self.device = 0
        self.asked: set[int] = set()
        """Indices of devices that the code has named."""
        self._sizes: dict[int, int] = {}
        self._at = 0

    @property
    def devices(self) -> int:
        """Return the number of devices that a program counts."""
        return DEVICES if self._devices is None else self._devices

    def follow(self, stream: Allocations) -> None:
        """Reset the counters and follow a stream of allocations from its beginning. stream: of one traced process"""
        self.__init__(self._devices)  # type: ignore[misc]
        self.stream = stream
        set_current(DEFAULT)

    def catch_up(self) -> None:
        """Count the events of the stream since the last call, in order."""
        if self.stream is None:
            return
        ids, changes = self.stream.ids, self.stream.changes
        while self._at < len(ids):
            number, change = ids[self._at], changes[self._at]
            before = self._sizes.get(number, 0)
            after = self._sizes[number] = before + change
            self.requested += change
            self.allocated += round_up(after, SMALLEST) - round_up(before, SMALLEST)
            self.allocator.change(number, change, self.stream.records[number].stream)
            self.allocator.trace.clear()
            for name, value in self._now().items():
                self.highest[name] = max(self.highest[name], value)
            self._at += 1

    def _now(self) -> dict[str, int]:
        return {"allocated": self.allocated, "requested": self.requested, "reserved": self.allocator.reserved}

    # -- as torch.cuda has them ----------------------------------------------------------------------------------------

    def is_here(self, device: Any = None) -> bool:
        """Return whether a device is the one that this process uses. device: index, name, object, or None for the current one"""
        index = index_of(device)
        if index is None or index == self.device:
            return True
        return self.asked == {index}  # the code uses another than the current one

    def now(self, name: str, *, most: bool = False) -> Callable[..., int]:
        """Return a function of a device that returns its bytes. name: allocated, requested or reserved

        most: the maximum since the last reset, else what there is now
        """

        def answer(device: Any = None) -> int:
            self.catch_up()
            return (self.highest if most else self._now())[name] if self.is_here(device) else 0

        return answer

    def reset(self, device: Any = None) -> None:
        """Set the maxima to the current bytes, as `torch.cuda.reset_peak_memory_stats` does; other devices have none."""
        self.catch_up()
        if self.is_here(device):
            self.highest = self._now()

    def empty_cache(self) -> None:
        """Releases segments without a live tensor, as `torch.cuda.empty_cache`."""
        self.catch_up()
        self.allocator.empty_cache()

    def info(self, device: Any = None) -> tuple[int, int]:
        """`mem_get_info`: (free, total) [bytes]. The simulated device never runs out of memory: free stays at 0."""
        self.catch_up()
        return max(0, TOTAL - (self.allocator.reserved if self.is_here(device) else 0)), TOTAL

    def statistics(self, device: Any = None) -> dict[str, int]:
        """Return `torch.cuda.memory_stats` as far as it is simulated, by PyTorch's keys [bytes, counts]."""
        self.catch_up()
        here = self.is_here(device)
        result: dict[str, int] = collections.OrderedDict()
        for name, source in (
            ("allocated", "allocated"),
            ("active", "allocated"),
            ("requested", "requested"),
            ("reserved", "reserved"),
        ):
            result[f"{name}_bytes.all.current"] = self._now()[source] if here else 0
            result[f"{name}_bytes.all.peak"] = self.highest[source] if here else 0
        idle = self.allocator.reserved - self.allocated if here else 0
        result |= {"inactive_split_bytes.all.current": idle, "num_alloc_retries": 0, "num_ooms": 0}
        return result

    def summary(self, device: Any = None, abbreviated: bool = False) -> str:
        """Return four lines of text in place of `torch.cuda.memory_summary` [GiB]. abbreviated: accepted and ignored"""
        result = self.statistics(device)
        return "simulated device (loadgauge trace), GiB: now, peak\n" + "\n".join(
            f"{name:>9} {result[f'{name}_bytes.all.current'] / GIB:9.3f} {result[f'{name}_bytes.all.peak'] / GIB:9.3f}"
            for name in ("allocated", "requested", "reserved")
        )

    def set_device(self, device: Any) -> None:
        """Make a device, by index or name, the one of this process, as `torch.cuda.set_device` does."""
        index = index_of(device)
        self.device = self.device if index is None else index

    def cuda(self) -> dict[str, Any]:
        """Return the functions that replace those of `torch.cuda`, by their names there."""
        return {
            **self._both(),
            "is_available": answering(True),
            "is_initialized": answering(True),
            "init": answering(None),
            "current_device": lambda: self.device,
            "set_device": self.set_device,
            "get_device_name": answering(NAME),
            "get_device_properties": lambda *_, **__: properties(),
            "get_device_capability": answering(CAPABILITY),
            "is_bf16_supported": answering(True),
            "get_arch_list": answering(["sm_90"]),
            "memory_cached": self.now("reserved"),
            "max_memory_cached": self.now("reserved", most=True),
            "reset_max_memory_allocated": self.reset,
            "reset_max_memory_cached": self.reset,
            "mem_get_info": self.info,
            "memory_summary": self.summary,
            "ipc_collect": answering(None),
            "manual_seed": answering(None),
            "manual_seed_all": answering(None),
            "seed": answering(None),
            "seed_all": answering(None),
            "is_current_stream_capturing": answering(False),
            "get_rng_state": lambda *_, **__: torch.empty(16, dtype=torch.uint8),
            "set_rng_state": answering(None),
            "get_rng_state_all": lambda: [torch.empty(16, dtype=torch.uint8)],
            "set_rng_state_all": answering(None),
            "set_per_process_memory_fraction": answering(None),
            "Event": Event,
            "Stream": Stream,
            "current_stream": lambda *_, **__: current(),
            "default_stream": answering(DEFAULT),
            "set_stream": set_current,
            "stream": within,
            "device": self._within,
        }

    def accelerator(self) -> dict[str, Any]:
        """Return the functions that replace those of `torch.accelerator`, by their names there."""
        set_device = self.set_device
        return {
            **self._both(),
            "is_available": answering(True),
            "current_device_index": lambda: self.device,
            "current_device_idx": lambda: self.device,
            "set_device_index": set_device,
            "set_device_idx": set_device,
            "get_memory_info": self.info,
            "current_stream": lambda *_, **__: current(),
            "set_stream": set_current,
            "device_index": self._within,
        }

    def _both(self) -> dict[str, Any]:
        return {
            "device_count": answering(self.devices),
            "synchronize": answering(None),
            "empty_cache": self.empty_cache,
            "memory_allocated": self.now("allocated"),
            "max_memory_allocated": self.now("allocated", most=True),
            "memory_reserved": self.now("reserved"),
            "max_memory_reserved": self.now("reserved", most=True),
            "memory_stats": self.statistics,
            "reset_peak_memory_stats": self.reset,
            "reset_accumulated_memory_stats": answering(None),
        }

    def _within(self, device: Any) -> _Device:
        return _Device(self, device)


class _Device:
    """`with torch.cuda.device(n):`."""

    def __init__(self, counters: Counters, device: Any) -> None:
        self.counters, self.chosen, self.before = counters, device, counters.device

    def __enter__(self) -> _Device:
        self.before = self.counters.device
        self.counters.set_device(self.chosen)
        return self

    def __exit__(self, *_: Any) -> None:
        self.counters.device = self.before


def index_of(device: Any) -> int | None:
    """The index of a device; None where none is named.

    >>> index_of("cuda:3"), index_of(2), index_of("cuda"), index_of(None)
    (3, 2, None, None)
    """
    if isinstance(device, torch.device):
        return device.index
    if isinstance(device, str):
        number = device.partition(":")[2]
        return int(number) if number.isdecimal() else None
    return device if isinstance(device, int) and device >= 0 else None


def properties() -> Any:
    """Return `torch.cuda.get_device_properties` of the simulated device: those of an H100 SXM."""
    return types.SimpleNamespace(
        name=NAME,
        total_memory=TOTAL,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=MULTIPROCESSORS,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=232_448,
        L2_cache_size=50 * MIB,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
    )
