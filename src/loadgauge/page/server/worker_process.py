"""A separate process for what takes long or comes from outside: it can be ended at any time, and the page goes on.

It is started as `python -m loadgauge.page.server.worker_process`. Questions come in and answers go out as JSON, each after its
length in four bytes. What it reads is data; nothing of it is executed.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from loadgauge.core.base.hooks import load
from loadgauge.page.server.errors import error_answer
from loadgauge.page.server.protocol import READY, TASKS, Asked, Task, framed, read_message


def answer(asked: Asked) -> dict[str, Any]:
    """Carry out a task and return `{"answer": ...}`, or the status and body of an error; nothing is raised."""
    try:
        with address_space(asked.room):
            return {"answer": _call(TASKS[asked.task], asked.given)}
    except MemoryError:
        return {"status": 422, "body": {"error": "is too large to be read here", "kind": "ConfigError", "code": 2}}
    except Exception as error:
        status, body = error_answer(error)
        return {"status": status, "body": body}


def _call(task: Task, arguments: dict[str, Any]) -> Any:
    function = load(task.function)
    if not task.question:
        return function(**arguments)
    from loadgauge.page.inputs.uploads import handed_in

    uploads = handed_in(arguments["uploads"])
    try:
        return function(msgspec.convert(arguments["question"], load(task.question)), uploads)
    finally:
        uploads.close()


@contextmanager
def address_space(room: int) -> Iterator[None]:
    """Limit the address space of this process [bytes] while the block runs; 0, or Windows: no limit."""
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
    """Answer questions from stdin on stdout until stdin is closed."""
    # Whatever a library prints must not come between the messages.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    out.write(READY)
    out.flush()
    while (body := read_message(sys.stdin.buffer)) is not None:
        out.write(framed(msgspec.json.encode(answer(msgspec.json.decode(body, type=Asked)))))
        out.flush()


if __name__ == "__main__":
    main()
