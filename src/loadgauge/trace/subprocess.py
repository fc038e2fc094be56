"""A trace in a process of its own: PyTorch may end the process from C++, and the caller then says so in one line."""

from __future__ import annotations

import codecs
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Literal, TextIO

import msgspec

from loadgauge.compare.compare import Comparison
from loadgauge.errors import ConfigError, Error, LayoutError, NotModelled
from loadgauge.measure.train_steps import Real
from loadgauge.trace.jobs import Settings
from loadgauge.trace.parallel.degrees import Parallel
from loadgauge.trace.parallel.distributed import World
from loadgauge.trace.trace import Trace


class Request(msgspec.Struct, frozen=True):
    """What to trace, and where to put the files that were asked for.

    `work`: trace; compare (with a measurement on `measure`, if any); or measure alone, with `timed` steps for time.
    """

    target: str
    device: str
    settings: Settings
    layers: int | None = None
    viewer: str = ""
    world: int = 1
    rank: int = 0
    work: Literal["trace", "compare", "measure"] = "trace"
    measure: str = ""
    timed: int = 3
    parallel: Parallel | None = None


DONE = {"trace": "traced", "compare": "compared", "measure": "measured"}


class Reply(msgspec.Struct):
    """What came of it, or why nothing did."""

    trace: Trace | None = None
    comparison: Comparison | None = None
    real: Real | None = None
    error: str = ""
    kind: str = ""


def traced(request: Request, shown: TextIO | None = None) -> Trace:
    """Runs the trace and returns it. Raises the child's error, or NotModelled if PyTorch ended the child. `shown`: see
    `replied`."""
    found = replied(request, shown).trace
    assert found is not None
    return found


def is_script(target: str) -> bool:
    """Whether a target is `script.py:function`, rather than a model."""
    return ".py:" in target


def replied(request: Request, shown: TextIO | None = None) -> Reply:
    """Has a child do the work. Raises as `traced` does. `shown`: where what a script prints goes, if anywhere; what it
    writes to standard error then goes to standard error."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "request", Path(folder) / "reply"
        asked.write_bytes(msgspec.msgpack.encode(request))
        code, last = _ended([str(asked), str(answered)], shown)
        if not answered.exists():
            raise NotModelled(f"PyTorch ended the trace (exit code {code}): {last[:500]}")
        reply = msgspec.msgpack.decode(answered.read_bytes(), type=Reply)
    if reply.kind:
        kinds = {kind.__name__: kind for kind in (ConfigError, LayoutError, NotModelled)}
        raise kinds.get(reply.kind, Error)(reply.error)
    return reply


def _ended(arguments: list[str], shown: TextIO | None) -> tuple[int, str]:
    """Runs the child to its end: its exit code, and the last line that it wrote to standard error. What it prints is
    passed on as it comes, if it is to be shown."""
    child = subprocess.Popen(
        [sys.executable, "-u", "-m", "loadgauge.trace.subprocess", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )  # fmt: skip
    last = ["no message"]

    def pass_on(source: IO[bytes], target: TextIO | None, kept: list[str]) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        line = ""
        while piece := os.read(source.fileno(), 1 << 16):
            text = decoder.decode(piece)
            if target is not None:
                target.write(text)
                target.flush()
            *whole, line = (line + text)[-100_000:].split("\n")
            kept[:] = [one for one in (*kept, *whole, line) if one.strip()][-1:]

    readers = [
        threading.Thread(target=pass_on, args=(child.stdout, shown, [])),
        threading.Thread(target=pass_on, args=(child.stderr, None if shown is None else sys.stderr, last)),
    ]
    try:
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return child.wait(), last[0]
    finally:
        if child.poll() is None:  # interrupted
            child.kill()
            child.wait()


def answer(request: Request) -> Reply:
    """The work of the child."""
    from loadgauge.compare.compare import compare
    from loadgauge.measure.train_steps import real
    from loadgauge.trace.jobs import ConfigJob
    from loadgauge.trace.target import job
    from loadgauge.trace.trace import record

    try:
        device = "cpu" if request.work == "measure" else request.device  # what is measured is no simulation
        world = None
        if request.world > 1:
            world = World(request.world, request.rank)
            world.check()
        asked = job(request.target, request.settings, device, request.layers, world, request.parallel)
        if request.work == "measure":
            return Reply(real=real(asked, request.device, request.timed))
        if request.work == "compare":
            if not isinstance(asked, ConfigJob):
                raise ConfigError("formulas are known of models, not of scripts: `trace` and `measure` take those")
            return Reply(comparison=compare(asked, request.device, request.measure, request.timed))
        found = record(asked, request.device, world=world, stacks=bool(request.viewer))
        if request.viewer:
            from loadgauge.oom.viewer import write

            write(found.stream, Path(request.viewer))
        return Reply(found.trace)
    except Error as error:
        return Reply(error=str(error), kind=type(error).__name__)
    except OSError as error:
        return Reply(error=f"{error.strerror or error}: {error.filename or ''}", kind="ConfigError")
    except Exception as error:
        if os.environ.get("LOADGAUGE_DEBUG"):
            raise
        said = (str(error).strip().splitlines() or ["no message"])[0]
        return Reply(
            error=f"{request.target} cannot be {DONE[request.work]}: {type(error).__name__}: {said}", kind="NotModelled"
        )


def main() -> None:
    """Where the child begins; it does not take leave of PyTorch, which may abort on the way out."""
    import logging

    asked, answered = map(Path, sys.argv[1:3])
    request = msgspec.msgpack.decode(asked.read_bytes(), type=Request)
    if not is_script(request.target):  # the libraries' own; a script's are the user's
        logging.disable(logging.CRITICAL)
    reply = answer(request)
    answered.write_bytes(msgspec.msgpack.encode(reply))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
