"""Limits of connections: how many there may be, how long a request may take to arrive, and what is logged.

uvicorn waits forever for the rest of a request's head, and asyncio prints a traceback for each connection that the system
refuses. Here a head has ten seconds, the number of connections has a limit below that of open files, and where it is reached
the oldest connection that has not asked anything is closed: requests are always served.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import socket
import sys
import threading
import time

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""Deadline for the head of a request, from the start of the connection or the first byte of the head [s]."""
BODY_SECONDS = 30.0
"""Longest pause between two pieces of a body [s]."""
MOST = 512
"""Connections at most; fewer if the system allows fewer than twice as many open files."""
AT_ONCE = 64
"""Connections accepted before the loop does anything else. asyncio takes its backlog for this number."""
QUEUE = 512
"""Connections that wait in the kernel to be accepted."""
LINES, SPAN = 20, 10.0
"""At most this many lines are logged in this many seconds."""


@functools.cache
def most_connections() -> int:
    """Return the limit of connections: half of the files that this process may open, and at most `MOST`."""
    try:
        import resource
    except ImportError:  # Windows
        return MOST
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if allowed < 0 else max(8, min(MOST, allowed // 2))


class Connection(H11Protocol):
    """One connection, with a deadline for every request that has begun."""

    deadline: asyncio.TimerHandle | None = None
    since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline; if there are too many connections, close the oldest idle one."""
        super().connection_made(transport)
        self.since = self.loop.time()
        self._arm(HEAD_SECONDS)
        opened = [
            other for other in self.connections if isinstance(other, Connection) and not other.transport.is_closing()
        ]
        if len(opened) > most_connections():
            idle = [other for other in opened if other.is_quiet and other is not self]
            # A connection that has asked before belongs to a browser that keeps it: close it last.
            oldest = min(idle, key=lambda other: (other.cycle is not None, other.since), default=self)
            oldest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Feed received bytes to the parser and set the deadline for what is still missing."""
        super().data_received(data)
        if self.transport.is_closing():
            self._disarm()
        elif self.conn.their_state is h11.SEND_BODY:
            self._arm(BODY_SECONDS)
        elif not self.is_quiet:
            self._disarm()
        elif self.deadline is None:
            self._arm(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline of a closed connection."""
        self._disarm()
        super().connection_lost(exc)

    @property
    def is_quiet(self) -> bool:
        """Return whether the connection is idle: it waits for the head of a request."""
        return self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete)

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self.deadline = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def _late(self) -> None:
        self.deadline = None
        if self.conn.their_state is h11.SEND_BODY and self.flow.read_paused:
            self._arm(BODY_SECONDS)  # It is this side that is slow.
        elif self.is_quiet or self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn's server with a longer queue of connections that wait to be accepted."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving, with `QUEUE` as the backlog of each socket."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(QUEUE)


class OneLine(logging.Handler):
    """Log one line per record, rate-limited, from a separate thread: a blocked stderr cannot stop the server."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: queue.Queue[str] = queue.Queue(2 * LINES)
        self.begun, self.count, self.dropped = -SPAN, 0, 0
        self.thread = threading.Thread(target=self._write, daemon=True)
        self.thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record for the writing thread, or drop it if there are too many."""
        now = time.monotonic()
        if now - self.begun >= SPAN:
            self.begun, self.count = now, 0
        self.count += 1
        if self.count > LINES:
            self.dropped += 1
            return
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() + ("" if error is None else f" ({type(error).__name__}: {error})")
        text = " ".join(text.split())[:300]
        if self.dropped:
            text, self.dropped = f"{text} (and {self.dropped:,} more lines before)", 0
        with contextlib.suppress(queue.Full):
            self.lines.put_nowait(text)

    def _write(self) -> None:
        while True:
            line = self.lines.get()
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"loadgauge: {line}\n")
                sys.stderr.flush()


def log_briefly() -> None:
    """Send the warnings of uvicorn and asyncio to `OneLine`."""
    handler = OneLine()
    for name in ("uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
