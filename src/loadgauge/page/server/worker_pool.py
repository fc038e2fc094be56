"""The server's side of `worker_process`: asks, waits within a limit, and ends processes that are no longer needed.

If the system or a person ends a process (kill -9), the question is asked once more, of a new process. If it crashes, or is
ended twice, the question is considered the cause.
"""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from loadgauge.page.server.errors import Failed, Refused, Replaced
from loadgauge.page.server.protocol import HEAD, READY, Answered, Asked, framed

WAITING = 256
"""Questions that may wait for one worker; more are refused."""
STARTS = 5
"""Processes started for a question before the attempt is given up."""
FROM_OUTSIDE = tuple(
    getattr(signal, name) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
)
"""Signals that come from outside, and not from a crash."""


class Ended(Exception):
    """The process ended before it answered. signal: the signal that ended it, or 0."""

    def __init__(self, signal: int) -> None:
        self.signal = signal
        super().__init__(signal)


class Worker:
    """One process, one question at a time. A new question of a page replaces the previous one of that page."""

    def __init__(self, seconds: float, room: int = 0) -> None:
        self.seconds, self.room = seconds, room
        self.process: asyncio.subprocess.Process | None = None
        self.handle = -1
        """The pidfd of the process: a signal by number might end another process that has the number by then."""
        self.ended: set[asyncio.subprocess.Process] = set()
        """Processes that were ended, until the system confirms it."""
        self.handed = False
        """Return whether the process is working on a question."""
        self.lock = asyncio.Lock()
        self.waiting = 0
        self.newest: dict[str, object] = {}
        self.asking: tuple[str, object] | None = None

    async def ask(self, task: str, page: str = "", /, **arguments: Any) -> msgspec.Raw:
        """Ask the process and return its answer as raw JSON.

        page: the page that asks, if its newer questions replace this one. Raises `Replaced`, `Failed` (an error answer),
        `Refused` (too many questions, or the process ended) and `TimeoutError`.
        """
        mine = object()
        if page:
            self.take_back(page)
            self.newest[page] = mine
        if self.waiting >= WAITING:
            raise Refused(503, "too many such questions at once; ask again in a moment")
        self.waiting += 1
        try:
            async with self.lock:
                self._still(page, mine)
                self.asking = page, mine
                return await self._asked(Asked(task, arguments, self.room), page, mine)
        finally:
            self.waiting -= 1
            if self.newest.get(page) is mine:
                del self.newest[page]

    def take_back(self, page: str) -> None:
        """End what a page asked before, which is then `Replaced`."""
        self.newest.pop(page, None)
        if self.asking is not None and self.asking[0] == page:
            self.end()

    def _still(self, page: str, mine: object) -> None:
        if page and self.newest.get(page) is not mine:
            raise Replaced

    async def _asked(self, asked: Asked, page: str, mine: object) -> msgspec.Raw:
        done, question = False, msgspec.json.encode(asked)
        try:
            async with asyncio.timeout(self.seconds):
                try:
                    body = await self._exchange(question)
                except Ended as error:
                    self._still(page, mine)
                    if error.signal not in FROM_OUTSIDE:
                        raise
                    body = await self._exchange(question)
            done = True
        except Ended:
            self._still(page, mine)
            raise Refused(503, "the calculation broke off: it may need more memory than there is") from None
        finally:
            self.asking = None
            if not done:
                # Half an answer must not be read as the answer to the next question.
                self.end()
        self._still(page, mine)  # It may have been answered just before it was taken back.
        answered = msgspec.json.decode(body, type=Answered)
        if answered.status:
            raise Failed(answered.status, answered.body)
        return answered.answer

    async def _exchange(self, question: bytes) -> bytes:
        """Write one question and read its answer. Raises `Ended` if the process ends in between."""
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(framed(question))
            self.handed = True
            await process.stdin.drain()
            size = HEAD.unpack(await process.stdout.readexactly(HEAD.size))[0]
            return await process.stdout.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise await self._end_of(process) from None
        finally:
            self.handed = False

    async def _running(self) -> asyncio.subprocess.Process:
        """The running process, or a new one; started again if it is ended before it is ready."""
        if self.process is not None and not _has_ended(self.process):
            return self.process
        for left in reversed(range(STARTS)):
            self.end()
            process = await self._begun()
            assert process.stdout is not None
            try:
                await process.stdout.readexactly(len(READY))
                break
            except (asyncio.IncompleteReadError, ConnectionError):
                error = await self._end_of(process)
                if not left or error.signal not in FROM_OUTSIDE:
                    raise error from None
        return process

    async def _begun(self) -> asyncio.subprocess.Process:
        home = str(Path(__file__).parents[3])
        path = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH", "")) if part)
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "loadgauge.page.server.worker_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            limit=2**20,
        )
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.handle = os.pidfd_open(self.process.pid)
        return self.process

    async def _end_of(self, process: asyncio.subprocess.Process) -> Ended:
        """Wait for a process whose pipe is closed, and return why it ended."""
        ours = self.process is not process  # `end` was called, for a newer question or as the server closes.
        if not ours:
            self.end()
        code = await process.wait()
        return Ended(0 if ours else max(0, -code))

    def end(self) -> None:
        """Kill the process."""
        process, self.process = self.process, None
        handle, self.handle = self.handle, -1
        self.ended = {ended for ended in self.ended if ended.returncode is None}
        if process is not None:
            self.ended.add(process)
        if handle >= 0:
            # Not `process.kill`, which asks first whether it has ended: asyncio would miss the answer, and complain.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        elif process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def close(self) -> None:
        """Kill the process, and wait until it and all earlier ones have ended."""
        self.end()
        for process in tuple(self.ended):
            await process.wait()


class Pool:
    """Several workers for the same questions: a slow question does not block the others."""

    def __init__(self, count: int, seconds: float, room: int = 0) -> None:
        self.workers = [Worker(seconds, room) for _ in range(count)]

    async def ask(self, task: str, page: str = "", /, **arguments: Any) -> msgspec.Raw:
        """Ask the worker with the shortest queue, and return its answer as JSON; arguments and errors as in `Worker.ask`."""
        return await min(self.workers, key=lambda worker: worker.waiting).ask(task, page, **arguments)

    async def close(self) -> None:
        """Kill all processes and wait for their end."""
        for worker in self.workers:
            await worker.close()


def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """Return whether a process has ended, even if its exit status has not been collected yet; the status is left in place."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.returncode is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
