"""Errors as answers: one clear line, the kind of error, and the exit code that the command would have."""

from typing import Any

import msgspec

from loadgauge.core.base.errors import CANNOT_TELL, NO, Error, LayoutError, NothingFits, NotYet

LONGEST = 2000


class Closed(LayoutError):
    """A layout on axes that captured layers do not have. closed: the flags of the axes"""

    def __init__(self, message: str, closed: list[str]) -> None:
        self.closed = closed
        super().__init__(message)


class Replaced(Exception):
    """A newer question of the same page replaced this one."""


class Failed(Exception):
    """A worker process answered with an error: HTTP status and body."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        self.status, self.body = status, body
        super().__init__(body.get("error", ""))


class Refused(Exception):
    """A request that is refused: HTTP status and reason."""

    def __init__(self, status: int, text: str) -> None:
        self.status, self.text = status, text
        super().__init__(text)


def error_answer(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the JSON body for an exception of any kind.

    >>> from loadgauge.core.base.errors import LayoutError
    >>> error_answer(LayoutError("5 over 4 leaves 1"))
    (422, {'error': '5 over 4 leaves 1', 'kind': 'LayoutError', 'code': 2})
    """
    from starlette.exceptions import HTTPException

    if isinstance(error, Failed):
        return error.status, error.body
    if isinstance(error, Replaced):
        return 409, error_body("a newer plan of this page has replaced it", "Replaced")
    if isinstance(error, Refused):
        return error.status, error_body(error.text, "Refused")
    if isinstance(error, HTTPException):
        words = {404: "there is nothing at this address", 405: "this address does not know that method"}
        return error.status_code, error_body(words.get(error.status_code, error.detail), "Refused")
    if isinstance(error, NothingFits):
        return 422, error_body(str(error), "NothingFits", NO)
    if isinstance(error, Closed):
        return 422, {**error_body(str(error), "LayoutError"), "closed": error.closed}
    if isinstance(error, NotYet):
        return 202, {"capture": msgspec.to_builtins(vars(error))}
    if isinstance(error, Error):
        return 422, error_body(str(error), type(error).__name__)
    if isinstance(error, TimeoutError):
        return 503, error_body("takes too long; try it on the command line", "TimeoutError")
    if isinstance(error, RecursionError):
        return 400, error_body("is nested too deeply", "ConfigError")
    kind = type(error).__name__
    return 500, error_body(f"unexpected {kind}: {error}; this is a defect, please report it", kind)


def error_body(text: str, kind: str, code: int = CANNOT_TELL) -> dict[str, Any]:
    """Return the JSON body of an error: the text on one printable line, its kind, and the exit code of the command line."""
    line = " ".join(text.split())
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
    return {"error": shown[:LONGEST], "kind": kind, "code": code}
