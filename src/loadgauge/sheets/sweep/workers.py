"""Who plans the cells of a sweep: processes of this machine, or an existing Ray cluster."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing.connection import wait
from typing import Any

from loadgauge.core.base.errors import ConfigError, Error, refuse
from loadgauge.core.plan.space.grid import Cell, Row

Work = Callable[[Cell, dict[str, bytes]], Row]
"""Plans a cell. The files that cells name are passed along, as the worker may not see them. Raises nothing."""
ASK_AGAIN = 5.0
"""Seconds after which a cluster is asked again how large it is."""


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- processes ----------------------------------------------------------------------------------------------------------


class _Process:
    """A process that plans one cell after another, and the pipe to it. Nothing is shared with it that could leak."""

    def __init__(self, work: Work) -> None:
        # Spawned, not forked: a fork of a process with threads may hang.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_plans, args=(work, theirs), daemon=True)
        with _uninterrupted(), warnings.catch_warnings():
            # Where something ended Python's tracker of shared resources, a new one begins; there are none of them here.
            warnings.filterwarnings("ignore", "resource_tracker")
            self.process.start()
        theirs.close()

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


class Processes:
    """Processes of this machine, each with a pipe of its own: where one dies, it is known under which cell."""

    def __init__(self, work: Work, count: int) -> None:
        self.work, self.slots = work, count
        self.idle: list[_Process] = []
        self.busy: dict[Any, tuple[int, _Process]] = {}
        """By its pipe: the number of its cell."""

    def submit(self, number: int, cell: Cell) -> None:
        """Send a cell to an idle process; one is started if there is none."""
        while self.idle:
            worker = self.idle.pop()
            if worker.process.is_alive():
                break
            worker.end()  # It died while it had nothing to do.
        else:
            worker = _Process(self.work)
        # Where it dies just now, `finished` finds the end of its pipe.
        with contextlib.suppress(OSError):
            worker.pipe.send(cell)
        self.busy[worker.pipe] = number, worker

    def finished(self, seconds: float) -> list[tuple[int, Row | None]]:
        """Finished cells by number with their rows; None for a cell whose process died."""
        rows: list[tuple[int, Row | None]] = []
        for pipe in wait(list(self.busy), seconds):
            number, worker = self.busy.pop(pipe)
            try:
                rows.append((number, worker.pipe.recv()))
                self.idle.append(worker)
            except (EOFError, OSError):
                rows.append((number, None))
                worker.end()
        return rows

    def close(self) -> None:
        """Kill all processes."""
        for worker in (*self.idle, *(worker for _, worker in self.busy.values())):
            worker.end()
        self.idle, self.busy = [], {}


def _plans(work: Work, pipe: Any) -> None:
    """In each process: plans what comes, until nothing more does. It ends with its parent, however that ends."""
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    while True:
        try:
            cell = pipe.recv()
        except EOFError:
            return
        pipe.send(work(cell, {}))


class Interrupt:
    """Ctrl-C, heard for certain: Python drops the `KeyboardInterrupt` that it raises inside a destructor."""

    def __init__(self) -> None:
        self.heard = False
        self.before: Any = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)

    def _hear(self, number: int, frame: object) -> None:
        self.heard = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if Ctrl-C was pressed and its exception was lost."""
        if self.heard:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A process that begins in here never hears of Ctrl-C; this one does, at the latest when it comes out."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows.
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- Ray ----------------------------------------------------------------------------------------------------------------


class OnRay:
    """Tasks of an existing Ray cluster, each on one processor. files: what cells name, for nodes that do not see it."""

    def __init__(self, work: Work, address: str, count: int | None, files: dict[str, bytes]) -> None:
        refuse(find_spec("ray") is None, "Ray is not installed: pip install 'loadgauge[ray]'", key="ray")
        _answers(address)
        import ray

        self.ray: Any = ray
        self.count = count
        self.mine = not ray.is_initialized()
        if self.mine:
            _connect(ray, address)
        # Ray itself retries nothing: `run` counts the deaths, here as with processes.
        self.task: Any = ray.remote(num_cpus=1, max_retries=0)(work)
        self.files = ray.put(files)
        self.busy: dict[Any, int] = {}
        self.size = -math.inf, 0
        self.unheard = contextlib.ExitStack()  # Ray prints what happens to its workers on stdout, where results belong.
        self.unheard.enter_context(contextlib.redirect_stdout(io.StringIO()))

    @property
    def slots(self) -> int:
        """Twice the processors of the cluster, which may grow: so that none waits, and an autoscaler sees a demand."""
        if self.count is not None:
            return self.count
        read_at, slots = self.size
        if time.monotonic() - read_at > ASK_AGAIN:
            slots = max(2, 2 * int(self.ray.cluster_resources().get("CPU", 1)))
            self.size = time.monotonic(), slots
        return slots

    def submit(self, number: int, cell: Cell) -> None:
        """Submit a cell to the cluster as a task; `finished` returns its row under `number`."""
        self.busy[self.task.options(name=f"loadgauge {cell.key}").remote(cell, self.files)] = number

    def finished(self, seconds: float) -> list[tuple[int, Row | None]]:
        """Finished cells by number with their rows; None for a cell whose worker or node died, or ran out of memory."""
        done, _ = self.ray.wait(list(self.busy), num_returns=1, timeout=seconds, fetch_local=False)
        more, _ = self.ray.wait(list(self.busy), num_returns=len(self.busy), timeout=0, fetch_local=False)
        rows: list[tuple[int, Row | None]] = []
        for task in dict.fromkeys((*done, *more)):
            number = self.busy.pop(task)
            try:
                rows.append((number, self.ray.get(task)))
            except self.ray.exceptions.RayTaskError as error:
                raise Error(f"the Ray workers cannot run loadgauge: {_last(error)}; install it on every node") from None
            except self.ray.exceptions.RayError:
                rows.append((number, None))
        return rows

    def close(self) -> None:
        """Cancel running cells and disconnect from the cluster."""
        for task in self.busy:
            self.ray.cancel(task, force=True)
        self.busy = {}
        if self.mine:
            self.ray.shutdown()
        self.unheard.close()


def _answers(address: str) -> None:
    """Raises `ConfigError` for an address where nothing answers: Ray would end this process then."""
    if address == "auto":
        return
    host, _, port = address.rpartition("://")[2].rpartition(":")
    refuse(
        not host or not port.isdecimal() or len(port) > 5,
        f"must be auto, HOST:PORT or ray://HOST:PORT, got {address!r}",
        key="ray",
    )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"no Ray cluster answers at {address}: {_last(error)}", key="ray") from None


def _connect(ray: Any, address: str) -> None:
    try:
        with _silent():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        hint = "" if os.environ.get("RAY_AUTH_MODE") else " (one with tokens needs RAY_AUTH_MODE=token)"
        raise ConfigError(f"no Ray cluster answers at {address}{hint}: {_last(error)}", key="ray") from None


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without Ray's own lines on what goes wrong, which its core writes to stderr many times over."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _last(error: BaseException) -> str:
    """The last line of an error that has anything to say, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
