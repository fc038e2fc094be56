"""A process of its own for what takes long or comes from elsewhere: it can be ended at any time, and the page goes on.

It is started as `python -m loadgauge.web.worker_process`; questions come in and answers go out as JSON with its length in
four bytes before it. What it is asked to read is data: nothing of it is run.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, BinaryIO

import msgspec

from loadgauge.web.errors import failure

TASKS = {
    "plan": "loadgauge.web.planning:planned",
    "validation": "loadgauge.web.validation:some",
    "text": "loadgauge.web.drop:text",
    "snapshot": "loadgauge.web.drop:snapshot",
    **{name: f"loadgauge.web.second:{name}" for name in ("explain", "changes", "what_if", "export")},
}
"""What can be asked, and where it is answered."""
HEAD = struct.Struct(">I")
READY = HEAD.pack(0)
"""What it says first: from here on, what ends it may be the question's doing."""
LARGEST = 2**28
"""Bytes of one message."""


class Asked(msgspec.Struct, frozen=True):
    """A question: the task, what it is given, and how much address space it may take [bytes]; 0: any."""

    task: str
    given: dict[str, Any]
    room: int = 0


def read(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    size = HEAD.unpack(head)[0]
    body = stream.read(size)
    return body if len(body) == size else None


def answer(asked: Asked) -> dict[str, Any]:
    """What the task says, or why it says nothing."""
    module, _, name = TASKS[asked.task].partition(":")
    try:
        with within(asked.room):
            task: Callable[..., Any] = getattr(import_module(module), name)
            return {"answer": task(**asked.given)}
    except MemoryError:
        return {"status": 422, "body": {"error": "is too large to be read here", "kind": "ConfigError", "code": 2}}
    except Exception as error:
        status, body = failure(error)
        return {"status": status, "body": body}


@contextmanager
def within(room: int) -> Iterator[None]:
    """No more address space than that, where the system can see to it."""
    try:
        import resource
    except ImportError:  # not on Windows
        room = 0
    if not room:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main() -> None:
    """Answers until nobody asks any more."""
    # Whatever a library prints must not come between the messages.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    out.write(READY)
    out.flush()
    while (body := read(sys.stdin.buffer)) is not None:
        told = msgspec.json.encode(answer(msgspec.json.decode(body, type=Asked)))
        out.write(HEAD.pack(len(told)) + told)
        out.flush()


if __name__ == "__main__":
    main()
