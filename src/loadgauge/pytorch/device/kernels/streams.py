"""Streams and events of the simulated device: nothing runs on it, but what is allocated belongs to the current stream."""

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any, Self

import torch

_numbers = itertools.count()


def answering(value: Any) -> Callable[..., Any]:
    """Return a function that returns a value, whatever it is called with.

    >>> answering(3)("cuda:0", index=1)
    3
    """
    return lambda *_, **__: value


class Stream:
    """A stream of the simulated device, which is always idle; as a context, the current one in its body.

    stream_id: its number, 0 for the default stream
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream_id, self.device_index = next(_numbers), 0

    @property
    def device(self) -> torch.device:
        """The simulated device."""
        return torch.device(torch._C._get_privateuse1_backend_name(), 0)

    wait_stream = wait_event = synchronize = answering(None)
    """Do nothing: nothing runs, so nothing is waited for."""
    query, is_capturing = answering(True), answering(False)
    """All work is done; no CUDA graph is being captured."""

    def record_event(self, event: Any = None) -> Any:
        """Return the event, or a new one."""
        return event or Event()

    def __enter__(self) -> Self:
        _entered.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _entered.pop()


class Event:
    """An event of the simulated device; it is always complete."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    record = wait = synchronize = answering(None)
    """Do nothing: nothing runs."""
    query, elapsed_time = answering(True), answering(math.nan)
    """All work is done; it takes no time that is a number [ms]."""


DEFAULT = Stream()
"""The stream on which everything runs that names no other."""
_entered = [DEFAULT]


def current() -> Stream:
    """Return the current stream.

    >>> with Stream() as other:
    ...     current() is other
    True
    >>> current() is DEFAULT
    True
    """
    return _entered[-1]


def set_current(stream: Any) -> None:
    """Make a stream the current one, from here to the end of the context that is open."""
    _entered[-1] = stream


def within(stream: Any = None) -> Any:
    """Return a context in which a stream is the current one; without a stream, one that changes nothing."""
    return stream if isinstance(stream, Stream) else contextlib.nullcontext()
