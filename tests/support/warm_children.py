"""Children of `loadgauge trace` that begin with PyTorch imported.

Each is a process of its own, as `loadgauge.pytorch.trace.subprocess` starts it, and runs the same `main`; but it is forked from a
process that has imported PyTorch and transformers, which is most of the time that a small trace takes. (Tests of the
page, of `measure` and its command, and doctests, start theirs from nothing.)
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import IO, Any

import pytest


class Source:
    """The process that children are forked from; it starts when the first is wanted."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.line: socket.socket | None = None

    def send(self, request: dict[str, Any], handles: list[int]) -> None:
        """Asks for a child: its arguments, environment and folder; its output, its errors, where its end is reported."""
        if self.line is None:
            self.line, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-W", "ignore", __file__, str(other.fileno())], pass_fds=[other.fileno()]
            )
            other.close()
        socket.send_fds(self.line, [json.dumps(request).encode()], handles)

    def close(self) -> None:
        """Ends the process."""
        if self.line is not None and self.process is not None:
            self.line.close()
            self.process.wait(60)


class Child:
    """What `loadgauge.pytorch.trace.subprocess` uses of a `subprocess.Popen`."""

    def __init__(self, source: Source, words: list[str]) -> None:
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        self.stdout, self.stderr = os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0)
        self.status, end = socket.socketpair()
        request = {"arguments": words[words.index("-c") + 2 :], "environment": dict(os.environ), "folder": os.getcwd()}
        source.send(request, [to_out, to_err, end.fileno()])
        end.close()
        os.close(to_out)
        os.close(to_err)
        self.lines: IO[str] = self.status.makefile()
        self.pid, self.code = int(self.lines.readline()), None

    def wait(self) -> int:
        """The exit code, once the child has ended."""
        if self.code is None:
            self.code = int(self.lines.readline())
            for stream in (self.stdout, self.stderr, self.lines, self.status):
                stream.close()
        return self.code

    def poll(self) -> int | None:
        """The exit code, if `wait` has returned it."""
        return self.code

    def kill(self) -> None:
        """Ends the child."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def warm_source() -> Iterator[Source]:
    """What this worker's children are forked from."""
    source = Source()
    yield source
    source.close()


@pytest.fixture(scope="module")
def warm_children(warm_source: Source) -> Iterator[None]:
    """Each child that the tests of a file, or its fixtures, start is forked from one warm process of this worker."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if sys.platform.startswith("linux") and find_spec("torch") and find_spec("transformers"):
            from loadgauge.pytorch.trace import subprocess as children

            stand_in = SimpleNamespace(Popen=lambda words, **_: Child(warm_source, words), PIPE=subprocess.PIPE)
            monkeypatch.setattr(children, "subprocess", stand_in)
            # What is said to who waits long is no part of an answer; how long it takes here, the machine's load decides.
            monkeypatch.setattr(children, "SILENCE", float("inf"))
        yield


def fork(request: dict[str, Any], handles: list[int]) -> None:
    """In a fork of the source: forks the child, reports its process number and its exit code."""
    from loadgauge.pytorch.trace.child import main

    out, err, end = handles
    parent = os.getpid()
    child = os.fork()
    if child:
        os.write(end, b"%d\n" % child)
        os.close(out)
        os.close(err)
        os.write(end, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    os.close(end)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["-c", *request["arguments"]]
    main(parent)


def serve(line: socket.socket) -> None:
    """Forks a child for each request, until the other side closes."""
    import transformers

    import loadgauge.pytorch.compare.compare
    import loadgauge.pytorch.measure.train_steps
    import loadgauge.pytorch.parallel.parallel  # noqa: F401

    assert transformers
    gc.collect()
    gc.freeze()  # as a child that starts from nothing does: what imports make is not looked through again
    running: list[int] = []
    while True:
        data, handles, _, _ = socket.recv_fds(line, 1 << 20, 3)
        running = [pid for pid in running if os.waitpid(pid, os.WNOHANG if data else 0)[0] == 0]
        if not data:
            return
        running.append(os.fork())
        if not running[-1]:
            line.close()
            try:
                fork(json.loads(data), handles)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            os._exit(1)
        for handle in handles:
            os.close(handle)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
