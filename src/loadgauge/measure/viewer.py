"""A stream of allocations as a snapshot that PyTorch's own memory viewer reads (pytorch.org/memory_viz)."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from loadgauge.measure.allocator import Allocator, replay
from loadgauge.measure.stream import Stream, op_name


def write(stream: Stream, path: Path) -> None:
    """Writes the snapshot of a simulated allocator that served the stream, with every event before it."""
    path.write_bytes(pickle.dumps(snapshot(stream, replay(stream))))


def snapshot(stream: Stream, allocator: Allocator) -> dict[str, Any]:
    """The snapshot as `torch.cuda.memory._snapshot` gives it: segments with their blocks, and the trace of events."""
    frames = _Frames(stream)
    traces = []
    for time, event in enumerate(allocator.trace):
        entry = {
            "action": event.action, "addr": event.address, "size": event.size, "stream": 0, "time_us": time,
            "frames": frames.of(event.storage),
        }  # fmt: skip
        if event.action == "free_completed":
            traces.append({**entry, "action": "free_requested"})
        traces.append(entry)
    segments = []
    for segment in allocator.segments.values():
        blocks: list[dict[str, Any]] = []
        block = segment.first
        while block is not None:
            live = not block.free
            blocks.append(
                {
                    "address": block.address, "size": block.size, "requested_size": block.requested or block.size,
                    "state": "active_allocated" if live else "inactive", "frames": frames.of(block.storage) if live else [],
                }
            )  # fmt: skip
            block = block.next
        active = sum(one["size"] for one in blocks if one["state"] == "active_allocated")
        segments.append(
            {
                "device": 0, "address": segment.address, "total_size": segment.size, "stream": 0,
                "segment_type": "small" if segment.small else "large", "segment_pool_id": (0, 0),
                "is_expandable": segment.expandable, "allocated_size": active, "active_size": active,
                "requested_size": active, "frames": [], "blocks": blocks,
            }
        )  # fmt: skip
    return {
        "segments": segments,
        "device_traces": [traces],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
        "external_annotations": [],
    }


class _Frames:
    """Where a storage was made, as a stack for the viewer: the lines of the program, where the stream knows them; else
    operation, module, phase, category."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.known: dict[int, list[dict[str, Any]]] = {-1: []}

    def of(self, number: int) -> list[dict[str, Any]]:
        if number not in self.known and number in self.stream.stacks:
            frames = self.stream.stacks[number]
            self.known[number] = [{"name": one.name, "filename": one.filename, "line": one.line} for one in frames]
        if number not in self.known:
            record = self.stream.records[number]
            phases = self.stream.phases
            phase = phases[record.phase - 1][1] if 0 < record.phase <= len(phases) else "preparation"
            lines = (op_name(record.op), record.module or "no module", phase, self.stream.category(number))
            self.known[number] = [{"name": line, "filename": "loadgauge trace", "line": 0} for line in lines]
        return self.known[number]
