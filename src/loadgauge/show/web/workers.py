"""The server's side of `worker`: asks, waits no longer than it should, and ends what is not wanted any more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from loadgauge.show.web.guard import Refused
from loadgauge.show.web.worker import HEAD, Asked

WAITING = 256
"""Questions that may wait for one worker; more are refused."""


class Replaced(Exception):
    """The question was taken back by a newer one of the same page."""


class Failed(Exception):
    """What a worker could not answer: status and body of the answer."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        self.status, self.body = status, body
        super().__init__(body.get("error", ""))


class Told(msgspec.Struct, frozen=True):
    """What a worker says: an answer as it stands, or what went wrong."""

    answer: msgspec.Raw = msgspec.Raw()
    status: int = 0
    body: dict[str, Any] = {}


class Worker:
    """One process, one question at a time. A question of a page takes back the one that this page asked before."""

    def __init__(self, seconds: float, room: int = 0) -> None:
        self.seconds, self.room = seconds, room
        self.process: asyncio.subprocess.Process | None = None
        self.lock = asyncio.Lock()
        self.waiting = 0
        self.newest: dict[str, object] = {}
        self.asking: tuple[str, object] | None = None

    async def ask(self, task: str, page: str = "", /, **given: Any) -> msgspec.Raw:
        """The answer, as JSON. page: who asks, where a newer question of theirs replaces this one."""
        mine = object()
        if page:
            self.newest[page] = mine
            if self.asking is not None and self.asking[0] == page:
                self.end()
        if self.waiting >= WAITING:
            raise Refused(503, "too many such questions at once; ask again in a moment")
        self.waiting += 1
        try:
            async with self.lock:
                self._still(page, mine)
                self.asking = page, mine
                return await self._asked(Asked(task, given, self.room), page, mine)
        finally:
            self.waiting -= 1
            if self.newest.get(page) is mine:
                del self.newest[page]

    def _still(self, page: str, mine: object) -> None:
        if page and self.newest.get(page) is not mine:
            raise Replaced

    async def _asked(self, asked: Asked, page: str, mine: object) -> msgspec.Raw:
        done = False
        try:
            async with asyncio.timeout(self.seconds):
                body = await self._exchange(msgspec.json.encode(asked))
            done = True
            self._still(page, mine)  # the answer may have come just before a newer question
        except (asyncio.IncompleteReadError, ConnectionError, BrokenPipeError):
            self._still(page, mine)
            raise Refused(503, "the calculation broke off: it may need more memory than there is") from None
        finally:
            self.asking = None
            if not done:
                # Half an answer must not be taken for that of the next question.
                self.end()
        told = msgspec.json.decode(body, type=Told)
        if told.status:
            raise Failed(told.status, told.body)
        return told.answer

    async def _exchange(self, question: bytes) -> bytes:
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(HEAD.pack(len(question)) + question)
        await process.stdin.drain()
        size = HEAD.unpack(await process.stdout.readexactly(HEAD.size))[0]
        return await process.stdout.readexactly(size)

    async def _running(self) -> asyncio.subprocess.Process:
        """The process; a new one where there is none."""
        if self.process is None or self.process.returncode is not None:
            import loadgauge

            home = str(Path(loadgauge.__file__).parents[1])
            path = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH", "")) if part)
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "loadgauge.show.web.worker", stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                limit=2**20,
            )  # fmt: skip
        return self.process

    def end(self) -> None:
        """Ends the process, whatever it does."""
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def close(self) -> None:
        """Ends the process and waits for its end."""
        process = self.process
        self.end()
        if process is not None:
            await process.wait()
