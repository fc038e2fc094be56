"""A stream of allocations as a snapshot that PyTorch's own memory viewer reads (pytorch.org/memory_viz)."""

import pickle
from pathlib import Path
from typing import Any

from loadgauge.pytorch.record.allocations import GRADIENTS, OPTIMIZER, WEIGHTS, Stream, op_name
from loadgauge.pytorch.record.caching_allocator import Allocator, replay
from loadgauge.pytorch.trace.child import record_request
from loadgauge.pytorch.trace.result import Trace
from loadgauge.pytorch.trace.subprocess import Request
from loadgauge.pytorch.why.snapshot import TRACED


def trace_for_viewer(request: Request, path: str) -> Trace:
    """Trace the job of a request, write its snapshot to `path`, and return the trace; see `in_child`.

    Raises as `trace_request`.
    """
    recorded = record_request(request, stacks=True)
    write(recorded.stream, Path(path))
    return recorded.trace


def write(stream: Stream, path: Path) -> None:
    """Writes a snapshot of the simulated allocator after it has served the stream, with all its events.

    Each stack ends with what a real snapshot does not have: operation, module, phase and category.
    """
    path.write_bytes(pickle.dumps(snapshot(stream, replay(stream), described=True)))


def snapshot(stream: Stream, allocator: Allocator, described: bool = False) -> dict[str, Any]:
    """The snapshot as `torch.cuda.memory._snapshot` gives it: segments with their blocks, and the trace of events.

    `described`: lines of the program are followed by operation, module, phase and category.
    """
    frames = _Frames(stream, described)
    traces = []
    for time, event in enumerate(allocator.trace):
        entry = {
            "action": event.action,
            "addr": event.address,
            "size": event.size,
            "stream": 0,
            "time_us": time,
            "frames": frames.of(event.storage),
        }
        if event.action == "free_completed":
            traces.append({**entry, "action": "free_requested"})
        traces.append(entry)
    segments = []
    for segment in allocator.segments.values():
        blocks: list[dict[str, Any]] = []
        block = segment.first
        while block is not None:
            if block.unmapped:
                block = block.next
            else:
                live = not block.free
                blocks.append(
                    {
                        "address": block.address,
                        "size": block.size,
                        "requested_size": block.requested or block.size,
                        "state": "active_allocated" if live else "inactive",
                        "frames": frames.of(block.storage) if live else [],
                    }
                )
                block = block.next
        active = sum(piece["size"] for piece in blocks if piece["state"] == "active_allocated")
        segments.append(
            {
                "device": 0,
                "address": segment.address,
                "total_size": sum(piece["size"] for piece in blocks),
                "stream": segment.pool.stream,
                "segment_type": "small" if segment.pool.small else "large",
                "segment_pool_id": (0, 0),
                "is_expandable": segment.expandable,
                "allocated_size": active,
                "active_size": active,
                "requested_size": active,
                "frames": [],
                "blocks": blocks,
            }
        )
    return {
        "segments": segments,
        "device_traces": [traces],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
        "external_annotations": [],
    }


class _Frames:
    """Where a storage was made, as a stack for the viewer: the lines of the program, where the stream knows them; else, or
    after them, operation, module, phase, category."""

    def __init__(self, stream: Stream, described: bool) -> None:
        self.stream, self.described = stream, described
        self.known: dict[int, list[dict[str, Any]]] = {-1: []}

    def of(self, number: int) -> list[dict[str, Any]]:
        if number not in self.known:
            lines = self.stream.stacks.get(number, ())
            if self.described and self.stream.records[number].op == "external":
                lines = ()  # of who introduced it to the trace, not of who made it
            frames = [{"name": frame.name, "filename": frame.filename, "line": frame.line} for frame in lines]
            if self.described or not lines:
                frames += [{"name": line, "filename": TRACED, "line": 0} for line in self._described(number)]
            self.known[number] = frames
        return self.known[number]

    def _described(self, number: int) -> tuple[str, ...]:
        record, category, phases = self.stream.records[number], self.stream.category(number), self.stream.phases
        phase = phases[record.phase - 1][1] if 0 < record.phase <= len(phases) else "preparation"
        if category in (WEIGHTS, GRADIENTS, OPTIMIZER):
            return category, op_name(record.op), record.module or "no module", phase
        return op_name(record.op), record.module or "no module", phase, category
