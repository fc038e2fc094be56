"""Something that takes long, done once for all of pytest's own workers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[], Any]) -> Any:
    """What `make` gives, as JSON holds it; the first worker that asks makes it, the others wait for it."""
    fcntl = pytest.importorskip("fcntl", reason="workers wait for each other by a lock on a file")
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with open(folder / f"{name}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / f"{name}.json"
        if not done.exists():
            done.write_text(json.dumps(make()))
    return json.loads(done.read_text())
