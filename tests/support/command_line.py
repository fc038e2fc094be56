"""Runs command lines inside the test's own process, and takes down what they print."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from typing import Any, NamedTuple

from loadgauge.core.command_line.main import run

FITS = "estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3"
TOO_BIG = "estimate llama-3.1-8b --gpu rtx4090"
PIPELINE = "estimate llama-3.1-70b --gpu h100-sxm5-80gb --gpus 64 --tp 8 --pp 4 --micro-batch 1 --global-batch 64"


class Outcome(NamedTuple):
    """What a command line gives."""

    code: int
    out: str
    err: str


def typed(line: str | list[str]) -> Outcome:
    """What comes of a command line, as text or as words."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(shlex.split(line) if isinstance(line, str) else line)
    return Outcome(code, out.getvalue(), err.getvalue())


def document(line: str) -> dict[str, Any]:
    """The JSON document of a command line."""
    found = typed(f"{line} --json")
    assert not found.err
    value: dict[str, Any] = json.loads(found.out)
    return value
