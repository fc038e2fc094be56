"""What `loadgauge.pytorch.trace.subprocess` runs in a child process, run in this one."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest


def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What children do is done in this process; the list gains module:function and target of each that starts from then on."""
    ran: list[str] = []

    def call(work: Any, request: Any, shown: Any = None, **arguments: Any) -> Any:
        ran.append(f"{work.__module__}:{work.__name__} {request.job.model}")
        return work(request, **arguments)

    def named(work: str, result: type, request: Any, shown: Any = None, **arguments: Any) -> Any:
        module, _, function = work.partition(":")
        return call(getattr(import_module(module), function), request, **arguments)

    monkeypatch.setattr("loadgauge.pytorch.trace.subprocess.in_child", call)
    monkeypatch.setattr("loadgauge.pytorch.trace.subprocess.named_in_child", named)
    return ran
