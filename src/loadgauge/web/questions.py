"""Bodies of requests, read as the questions that they should be."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from loadgauge.web.errors import Refused

Question = TypeVar("Question")


def decoded(body: bytes, kind: type[Question]) -> Question:
    """A body as a question; whatever else it is, is said in one line."""
    try:
        return msgspec.json.decode(body, type=kind)
    except RecursionError:
        raise Refused(400, "the request is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(400, f"the request cannot be read: {error}") from None
