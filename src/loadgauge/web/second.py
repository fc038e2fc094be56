"""What the second process answers: questions of some tenths of a second, beside the estimates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from loadgauge.web import handlers as answers
from loadgauge.web.exports import exported
from loadgauge.web.uploads import Uploads, handed_in

Texts = dict[str, list[str]]


def _answered(answer: Callable[[Any, Uploads], Any], kind: type, question: dict[str, Any], uploads: Texts) -> Any:
    kept = handed_in(uploads)
    try:
        return answer(msgspec.convert(question, kind), kept)
    finally:
        kept.close()


def explain(question: dict[str, Any], uploads: Texts) -> Any:
    """One block of the treemap."""
    return _answered(answers.explain, answers.OfBlock, question, uploads)


def changes(question: dict[str, Any], uploads: Texts) -> Any:
    """What to change next."""
    return _answered(answers.changes, answers.Question, question, uploads)


def what_if(question: dict[str, Any], uploads: Texts) -> Any:
    """Another network adapter."""
    return _answered(answers.what_if, answers.WhatIf, question, uploads)


def export(question: dict[str, Any], uploads: Texts) -> Any:
    """The run as another tool's job file."""
    return _answered(exported, answers.Export, question, uploads)
