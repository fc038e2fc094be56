"""Captures that the page waits for: one at a time, in a process of its own, with how far they are."""

import asyncio
import contextlib
import tempfile
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from loadgauge.core.base.errors import ConfigError, refuse
from loadgauge.page.panels.captured import Wanted, family
from loadgauge.page.server.errors import Failed
from loadgauge.page.server.worker_pool import Worker

CAPTURE_SECONDS = 600.0
"""Longest capture [s]."""
ROOM = 48 * 2**30
"""Address space of a capture [bytes]; PyTorch alone maps some GiB."""
LEFT = 5.0
"""A capture that no page has asked about for this long is ended when another is wanted [s]."""
MOST_FAILED = 64
"""Failures that are remembered, so that the same question does not run for the same answer again."""


class Running:
    """A capture under way. begun, asked: when it began and when a page last asked about it [s, monotonic]"""

    def __init__(self, task: asyncio.Task[None], stage: Path) -> None:
        self.task, self.stage = task, stage
        self.begun = self.asked = time.monotonic()


class Captures:
    """The captures of a server."""

    def __init__(self) -> None:
        self.worker = Worker(CAPTURE_SECONDS, ROOM)
        self.folder = tempfile.TemporaryDirectory(prefix="loadgauge-")
        self.running: dict[str, Running] = {}
        self.failed: OrderedDict[str, Exception] = OrderedDict()

    async def progress(self, wanted: Wanted) -> dict[str, Any]:
        """Have a capture made, where it is not under way, and return how far it is: name, stage and seconds.

        Raises the exception of a capture that failed.
        """
        key = msgspec.json.encode(wanted, order="deterministic").hex()
        if key in self.failed:
            error = self.failed[key]
            if not isinstance(error, Failed | ConfigError):
                del self.failed[key]  # by accident: the next question tries again
            raise error
        if key not in self.running:
            await self._end_left()
            stage = Path(self.folder.name) / "stage"
            self.running[key] = Running(asyncio.create_task(self._made(key, wanted, stage)), stage)
        run = self.running[key]
        run.asked = time.monotonic()
        with contextlib.suppress(OSError):
            return {"name": wanted.name, "stage": run.stage.read_text(), "seconds": run.asked - run.begun}
        return {"name": wanted.name, "stage": "imports", "seconds": run.asked - run.begun}

    async def _made(self, key: str, wanted: Wanted, stage: Path) -> None:
        try:
            raw = await self.worker.ask("capture", wanted=msgspec.to_builtins(wanted), stage=str(stage))
            result = msgspec.json.decode(raw)
            refuse(not result["kept"], f"captures are kept in {result['folder']}, which cannot be written")
            of_family = family(wanted.name, wanted.keys, wanted.key.tuned)
            of_family.seconds, of_family.cached = of_family.seconds + result["seconds"], False
        except Exception as error:
            self.failed[key] = error
            while len(self.failed) > MOST_FAILED:
                self.failed.popitem(last=False)
        finally:
            self.worker.end()  # the next one begins as the first did
            with contextlib.suppress(OSError):
                stage.unlink()
            self.running.pop(key, None)

    async def _end_left(self, after: float = LEFT) -> None:
        for run in list(self.running.values()):
            if time.monotonic() - run.asked > after:
                run.task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await run.task

    async def close(self) -> None:
        """End what is under way."""
        await self._end_left(-1.0)
        await self.worker.close()
        self.folder.cleanup()
