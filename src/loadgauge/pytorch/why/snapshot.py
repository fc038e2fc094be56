"""A snapshot of CUDA's allocator (`torch.cuda.memory._snapshot`): what was held at the peak, by whom, and what lay idle.

A snapshot is a pickle, and a pickle can run code. This one is read by an unpickler that knows no class and no function:
a snapshot needs none, and anything else is refused. PyTorch is not needed.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from loadgauge.core.base.errors import ConfigError, refuse
from loadgauge.pytorch.why.files import LARGEST_SNAPSHOT, content_of
from loadgauge.pytorch.why.pickles import plain

UNSTATED = "no stack was recorded"
BEFORE = "before the recording began"
PYTORCH = re.compile(
    r"(-packages|\bpytorch)[/\\]torch[/\\]|\btorch[/\\](_|nn|autograd|cuda|csrc|distributed|func|fx|optim|utils)|<frozen|\?\?"
)
"""In a file's name: it is PyTorch's, and not a program that lies in a folder of that name."""
LIBRARY = re.compile(rf"(site|dist)-packages|{PYTORCH.pattern}")
TRACED = "loadgauge trace"
"""The file of what a trace says of an operation, in the place of a line."""


class Holder(msgspec.Struct, frozen=True):
    """Blocks that one place in the program held at the peak. `where` is its innermost own line, `stack` the innermost
    lines of all."""

    where: str
    nbytes: int
    blocks: int
    stack: tuple[str, ...]


class Snapshot(msgspec.Struct, frozen=True):
    """The state of one device in a snapshot [bytes].

    `peak` is the most that was allocated at once while events were recorded (or at the end, without events); `reserved`
    is what the segments take at the end, `idle` what lies free in them, and `largest_idle` the largest piece of that.
    `failed` is the size of the allocation that did not fit, 0 if all did.
    """

    device: int
    peak: int
    holders: tuple[Holder, ...]
    allocated: int
    reserved: int
    idle: int
    largest_idle: int
    failed: int
    free: int
    events: int


UNREADABLE = (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError, RecursionError)
"""What a snapshot that is none may lead to."""
LARGEST = 1 << 50
"""Bytes of the largest block or segment that is believed."""


def load(path: Path) -> dict[str, Any]:
    """The content of a snapshot file. Raises ConfigError for whatever is no snapshot, or holds sizes that cannot be; runs
    nothing, and takes no more memory than what it holds."""
    data = content_of(path, LARGEST_SNAPSHOT)
    with reading(path, "is no allocator snapshot: "):
        content = plain(data)
        if isinstance(content, list):  # before PyTorch 2.0: the segments alone
            content = {"segments": content}
        if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
            raise ConfigError("it has no segments")
        _check(content)
    return content


@contextlib.contextmanager
def reading(path: Path, prefix: str = "") -> Iterator[None]:
    """Raises a ConfigError about the file for whatever its body cannot read; `prefix` begins the text of its ConfigErrors."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{prefix}{error}", file=str(path)) from None
    except UNREADABLE as error:
        raise ConfigError(f"is no allocator snapshot: {type(error).__name__}: {error}", file=str(path)) from None


def _check(content: Mapping[str, Any]) -> None:
    """Raises ConfigError for a size that cannot be."""
    for segment in content["segments"]:
        total = _size(segment["total_size"], "a segment")
        inside = sum(_size(block["size"], "a block") for block in segment["blocks"])
        refuse(inside > total, f"a segment of {total:,} bytes holds blocks of {inside:,}")
    for events in content.get("device_traces") or ():
        for event in events:
            _size(event["size"], "an event")
            if event.get("device_free"):
                _size(event["device_free"], "what was free")


def _size(value: Any, of: str) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        shown = repr(value)[:40] if type(value) in (int, float, str) else type(value).__name__
        raise ConfigError(f"{of} has {shown} bytes")
    return value


def check_device(content: Mapping[str, Any], device: int) -> None:
    """Raises ConfigError where a snapshot does not have this device."""
    devices = {segment.get("device", 0) for segment in content["segments"]}
    devices |= {number for number, events in enumerate(content.get("device_traces") or ()) if events}
    if device < 0 or (device not in devices and device > 0):
        names = ", ".join(str(number) for number in sorted(devices, key=str)[:8]) or "none"
        raise ConfigError(f"knows no device {device}; those it knows: {names}")


def summary(content: Mapping[str, Any], device: int = 0) -> Snapshot:
    """Summarizes one device of a snapshot by replaying its events, starting from what was allocated before them."""
    segments = [segment for segment in content["segments"] if segment.get("device", 0) == device]
    idle = [block["size"] for block in _blocks(segments) if block["state"] == "inactive"]
    events, live, peak, at_peak = replay(content, device)
    failures = [event for event in events if event["action"] == "oom"]
    return Snapshot(
        device=device,
        peak=peak,
        holders=tuple(_holders(at_peak)),
        allocated=sum(block.nbytes for block in live.values()),
        reserved=sum(segment["total_size"] for segment in segments),
        idle=sum(idle),
        largest_idle=max(idle, default=0),
        failed=max((failure["size"] for failure in failures), default=0),
        free=min((failure.get("device_free", 0) for failure in failures), default=0),
        events=len(events),
    )


def _blocks(segments: list[Any]) -> Iterator[dict[str, Any]]:
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            yield {**block, "address": block.get("address", address)}
            address += block["size"]


class Block(NamedTuple):
    """Memory held at some moment. `frames`: the lines that asked for it; None for what is older than the recording.
    `event`: which event it was, -1 for what is older."""

    nbytes: int
    frames: list[Any] | None
    event: int = -1


def replay(
    content: Mapping[str, Any], device: int = 0, *, failure: bool = False
) -> tuple[list[Any], dict[int, Block], int, list[Block]]:
    """The events of a device; and after them: what is live, by address, the peak, and what was live then.

    `failure`: instead of the peak, what was live when the last allocation failed, where one did.
    """
    events, live = beginning(content, device)
    now = sum(block.nbytes for block in live.values())
    peak, at_peak, at = now, dict(live), -1
    start = dict(live)
    for number, event in enumerate(events):
        now += _apply(number, event, live)
        if now > peak:
            peak, at = now, number
    failed = [number for number, event in enumerate(events) if event["action"] == "oom"] if failure else []
    if failed:
        at = failed[-1]
    if at >= 0:
        at_peak = start
        for number, event in enumerate(events[: at + 1]):
            _apply(number, event, at_peak)
    return events, live, peak, list(at_peak.values())


def beginning(content: Mapping[str, Any], device: int = 0) -> tuple[list[Any], dict[int, Block]]:
    """The events of a device, and by address what was there before the first of them."""
    segments = [segment for segment in content["segments"] if segment.get("device", 0) == device]
    traces = content.get("device_traces") or []
    events = list(traces[device]) if device < len(traces) else []
    final = {block["address"]: block for block in _blocks(segments) if block["state"].startswith("active")}
    live: dict[int, Block] = {}
    seen: set[int] = set()
    for event in events:  # what is freed, but was never allocated, was there before
        address, size = event.get("addr"), event["size"]
        if event["action"] == "alloc":
            seen.add(address)
        elif event["action"] == "free_completed" and address not in seen:
            live[address] = Block(size, None)
            seen.add(address)
    for address, block in final.items():
        if address not in seen:
            live[address] = Block(block["size"], block.get("frames") or None)
    return events, live


def _apply(number: int, event: Any, held: dict[int, Block]) -> int:
    if event["action"] == "alloc":
        held[event["addr"]] = Block(event["size"], event.get("frames") or [], number)
        return int(event["size"])
    if event["action"] == "free_completed":
        gone = held.pop(event["addr"], None)
        return -gone.nbytes if gone else 0
    return 0


def _holders(held: list[Block]) -> list[Holder]:
    """Return what was held, by the stack that asked for it, most first."""
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for size, frames, _ in held:
        stack = tuple(line_of(frame) for frame in (frames or [])[:8])
        where = BEFORE if frames is None else _own(frames) if frames else UNSTATED
        groups.setdefault((where, stack), []).append(size)
    result = [Holder(where, sum(sizes), len(sizes), stack) for (where, stack), sizes in groups.items()]
    return sorted(result, key=lambda holder: -holder.nbytes)


def _own(frames: list[Any]) -> str:
    """The innermost line that is the program's own; else of a library other than PyTorch; else what a trace says of the
    operation; else the innermost."""
    return _short(line_of(min(frames, key=_rank)))


def _rank(frame: Any) -> int:
    """Return 0 for a line of the program, 1 of a library other than PyTorch, 2 of a trace, 3 of PyTorch."""
    file = frame["filename"]
    if file == TRACED:
        return 2
    return 3 if PYTORCH.search(file) else int(LIBRARY.search(file) is not None)


def _short(line: str) -> str:
    """A line without the way to where libraries lie."""
    return re.sub(r"\((?:.*?)(?:site|dist)-packages/", "(", line)


def line_of(frame: Any) -> str:
    """A stack frame as text: `function (file:line)`."""
    line = frame.get("line", 0)
    where = f"{frame['filename']}:{line}" if line else str(frame["filename"])
    return f"{frame['name']} ({where})"
