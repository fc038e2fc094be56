"""A trace in a process of its own: PyTorch may end the process from C++, and the caller then says so in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import msgspec

from loadgauge.errors import ConfigError, Error, LayoutError, NotModelled
from loadgauge.measure.compare import Comparison
from loadgauge.measure.distributed import World
from loadgauge.measure.parallel import Parallel
from loadgauge.measure.real import Real
from loadgauge.measure.trace import Trace
from loadgauge.measure.training import Settings


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


def traced(request: Request) -> Trace:
    """Runs the trace and returns it. Raises the child's error, or NotModelled if PyTorch ended the child."""
    found = replied(request).trace
    assert found is not None
    return found


def replied(request: Request) -> Reply:
    """Has a child do the work. Raises as `traced` does."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "request", Path(folder) / "reply"
        asked.write_bytes(msgspec.msgpack.encode(request))
        done = subprocess.run(
            [sys.executable, "-m", "loadgauge.measure.child", str(asked), str(answered)],
            capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        if not answered.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise NotModelled(f"PyTorch ended the trace (exit code {done.returncode}): {last[:500]}")
        reply = msgspec.msgpack.decode(answered.read_bytes(), type=Reply)
    if reply.kind:
        kinds = {kind.__name__: kind for kind in (ConfigError, LayoutError, NotModelled)}
        raise kinds.get(reply.kind, Error)(reply.error)
    return reply


def answer(request: Request) -> Reply:
    """The work of the child."""
    from loadgauge.measure.compare import compare
    from loadgauge.measure.real import real
    from loadgauge.measure.target import job
    from loadgauge.measure.trace import record
    from loadgauge.measure.training import ConfigJob

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
            from loadgauge.measure.viewer import write

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

    logging.disable(logging.CRITICAL)
    asked, answered = map(Path, sys.argv[1:3])
    reply = answer(msgspec.msgpack.decode(asked.read_bytes(), type=Request))
    answered.write_bytes(msgspec.msgpack.encode(reply))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
