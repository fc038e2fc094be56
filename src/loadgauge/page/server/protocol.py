"""Messages of the page and of the server's processes, and the table of what the processes answer."""

import struct
from typing import Any, BinaryIO, TypeVar

import msgspec

from loadgauge.page.server.errors import Refused

Question = TypeVar("Question")

HEAD = struct.Struct(">I")
"""The length of a message [bytes], which precedes it."""
READY = HEAD.pack(0)
"""The first thing a process writes: from then on, a question may be the reason why it ends."""


class Task(msgspec.Struct, frozen=True):
    """A task of a worker process: the function, and the type of its question, as `module:name`.

    A function with a question type takes the question, which has `flags`, and the `Uploads`; any other takes keywords.
    """

    function: str
    question: str = ""


TASKS = {
    "explain": Task("loadgauge.page.server.handlers:explain", "loadgauge.page.server.handlers:OfBlock"),
    "changes": Task("loadgauge.page.server.handlers:changes", "loadgauge.page.server.handlers:Question"),
    "fitting": Task("loadgauge.page.server.handlers:fitting", "loadgauge.page.server.handlers:OfError"),
    "cards": Task("loadgauge.page.panels.cards:cards", "loadgauge.page.panels.cards:Cards"),
    "versus": Task("loadgauge.page.panels.versus:versus", "loadgauge.page.panels.versus:Versus"),
    "what_if": Task("loadgauge.page.server.handlers:what_if", "loadgauge.page.server.handlers:WhatIf"),
    "fleet": Task("loadgauge.page.panels.fleet:answer", "loadgauge.page.panels.fleet:OfFleet"),
    "posttrain": Task("loadgauge.page.panels.posttrain:answer", "loadgauge.page.panels.posttrain:OfTask"),
    "export": Task("loadgauge.page.server.handlers:export", "loadgauge.page.server.handlers:Export"),
    "plan": Task("loadgauge.page.panels.planning:planned"),
    "validation": Task("loadgauge.page.panels.validation:some"),
    "capture": Task("loadgauge.page.panels.captured:capture"),
    "text": Task("loadgauge.page.inputs.drop:text"),
    "snapshot": Task("loadgauge.page.inputs.drop:snapshot"),
}


class Asked(msgspec.Struct, frozen=True):
    """A question to a process: the task, its arguments, and the address space it may take [bytes]; 0 is unlimited."""

    task: str
    given: dict[str, Any]
    room: int = 0


class Answered(msgspec.Struct, frozen=True):
    """A worker's reply: the answer as raw JSON, or the status and body of an error."""

    answer: msgspec.Raw = msgspec.Raw()
    status: int = 0
    body: dict[str, Any] = {}


def read_message(stream: BinaryIO) -> bytes | None:
    """Read the next message without its length; None at the end of the stream."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    size = HEAD.unpack(head)[0]
    body = stream.read(size)
    return body if len(body) == size else None


def framed(body: bytes) -> bytes:
    """A message with its length before it."""
    return HEAD.pack(len(body)) + body


def decode(body: bytes, kind: type[Question]) -> Question:
    """Decode the body of a request. Raises `Refused` (400) with one line where it is not JSON of this type."""
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError:
        raise Refused(400, "the request is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, f"the request cannot be read: {error}") from None
