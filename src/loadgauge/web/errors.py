"""What is answered when something cannot be: one clear line, its kind, and the exit code that a command would have."""

from __future__ import annotations

from typing import Any

import click

from loadgauge.errors import CANNOT_TELL, NO, Error, NothingFits

LONGEST = 2000


class Replaced(Exception):
    """The question was taken back by a newer one of the same page."""


class Failed(Exception):
    """What a worker could not answer: status and body of the answer."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        self.status, self.body = status, body
        super().__init__(body.get("error", ""))


class Refused(Exception):
    """Why a request is not answered."""

    def __init__(self, status: int, text: str) -> None:
        self.status, self.text = status, text
        super().__init__(text)


def failure(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and the body of an answer.

    >>> from loadgauge.errors import LayoutError
    >>> failure(LayoutError("5 over 4 leaves 1"))
    (422, {'error': '5 over 4 leaves 1', 'kind': 'LayoutError', 'code': 2})
    """
    from starlette.exceptions import HTTPException

    if isinstance(error, Failed):
        return error.status, error.body
    if isinstance(error, Replaced):
        return 409, said("a newer plan of this page has replaced it", "Replaced")
    if isinstance(error, Refused):
        return error.status, said(error.text, "Refused")
    if isinstance(error, HTTPException):
        words = {404: "there is nothing at this address", 405: "this address does not know that method"}
        return error.status_code, said(words.get(error.status_code, error.detail), "Refused")
    if isinstance(error, NothingFits):
        return 422, said(str(error), "NothingFits", NO)
    if isinstance(error, Error):
        return 422, said(str(error), type(error).__name__)
    if isinstance(error, click.ClickException):
        text = error.format_message()
        return 422, said(text[:1].lower() + text[1:].rstrip("."), "UsageError")
    if isinstance(error, TimeoutError):
        return 503, said("takes too long; try it on the command line", "TimeoutError")
    if isinstance(error, RecursionError):
        return 400, said("is nested too deeply", "ConfigError")
    kind = type(error).__name__
    return 500, said(f"unexpected {kind}: {error}; this is a defect, please report it", kind)


def said(text: str, kind: str, code: int = CANNOT_TELL) -> dict[str, Any]:
    """The body: one line, fit to be shown."""
    line = " ".join(text.split())
    shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in line)
    return {"error": shown[:LONGEST], "kind": kind, "code": code}
