"""Work on a model or a script in a process of its own: PyTorch may end the process from C++, and the caller then reports
it in one line."""

from __future__ import annotations

import codecs
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TextIO, TypeVar, get_type_hints

import msgspec

from loadgauge.errors import ConfigError, Error, LayoutError, NotModelled, first_line
from loadgauge.files import is_script
from loadgauge.spec.job import Job
from loadgauge.trace.jobs import Traceable
from loadgauge.trace.no_compiler import without_compiler
from loadgauge.trace.quick_scan import quick_scan
from loadgauge.trace.target import find_job
from loadgauge.trace.torch_run import TorchRun
from loadgauge.trace.trace import Recorded, Trace, record

P = ParamSpec("P")
T = TypeVar("T")


class Request(msgspec.Struct, frozen=True):
    """A job to work on in a child process. `job.model` may be `script.py:function`; `layers`, `rank` and `keep` as for
    `find_job` and `TorchRun`; device: the device to simulate, or where a measurement runs."""

    job: Job
    device: str = "cuda"
    layers: int | None = None
    rank: int = 0
    keep: tuple[str, ...] = ()

    def find(self) -> Traceable:
        """The job to trace or measure. Raises ConfigError, LayoutError or NotModelled."""
        return find_job(self.job.model, TorchRun.of(self.job, self.rank, self.keep), self.layers)

    def record(self, stacks: bool = False) -> Recorded:
        """Trace the job in this process. stacks: with the program's lines at each allocation. Raises as `find` does."""
        gpus = self.job.gpus or 1
        return record(self.find(), self.device, gpus=gpus if gpus > 1 else None, rank=self.rank, stacks=stacks)


class _Call(msgspec.Struct, frozen=True):
    """What the child is to do: a function by its module and name, its request, and further arguments."""

    module: str
    function: str
    request: Request
    arguments: dict[str, Any]


class _Reply(msgspec.Struct):
    """The result of the function, encoded, or why there is none."""

    result: msgspec.Raw = msgspec.Raw(msgspec.msgpack.encode(None))
    error: str = ""
    kind: str = ""


def trace_request(request: Request) -> Trace:
    """Traces the job of a request in this process; see `in_child`."""
    return request.record().trace


def in_child(
    work: Callable[Concatenate[Request, P], T], request: Request, shown: TextIO | None = None,
    *_: P.args, **arguments: P.kwargs,
) -> T:  # fmt: skip
    """Calls `work(request, **arguments)` in a child process and returns its result.

    work: a function of a module, whose result type msgspec can encode
    shown: where the child's standard output goes, if anywhere; its standard error is then passed on too
    Raises the child's error, or NotModelled where the work fails or PyTorch ended the child.
    """
    call = _Call(work.__module__, work.__name__, request, dict(arguments))
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "request", Path(folder) / "reply"
        asked.write_bytes(msgspec.msgpack.encode(call))
        code, last = _run_child([str(asked), str(answered)], shown)
        if not answered.exists():
            raise NotModelled(f"PyTorch ended the trace (exit code {code}): {last[:500]}")
        reply = msgspec.msgpack.decode(answered.read_bytes(), type=_Reply)
    if reply.kind:
        kinds = {kind.__name__: kind for kind in (ConfigError, LayoutError, NotModelled)}
        raise kinds.get(reply.kind, Error)(reply.error)
    result: T = msgspec.msgpack.decode(reply.result, type=get_type_hints(work)["return"])
    return result


def _run_child(arguments: list[str], shown: TextIO | None) -> tuple[int, str]:
    """Runs the child to its end: its exit code, and the last line that it wrote to standard error. What it prints is
    passed on as it comes, if it is to be shown."""
    # What imports make is there to stay, and to look for garbage in it takes a second.
    program = "import gc; gc.disable(); from loadgauge.trace.subprocess import main; gc.freeze(); gc.enable(); main()"
    child = subprocess.Popen(
        [sys.executable, "-u", "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
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
            kept[:] = [text for text in (*kept, *whole, line) if text.strip()][-1:]

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


def _answer(call: _Call) -> _Reply:
    """Does the child's work."""
    target = call.request.job.model
    try:
        work = getattr(import_module(call.module), call.function)
        return _Reply(msgspec.Raw(msgspec.msgpack.encode(work(call.request, **call.arguments))))
    except Error as error:
        return _Reply(error=str(error), kind=type(error).__name__)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return _Reply(error=f"{target} cannot be run: {error.strerror or error}{where}", kind="ConfigError")
    except SystemExit as error:
        return _Reply(error=f"{target} cannot be run: it ends the program (exit code {error.code})", kind="ConfigError")
    except Exception as error:
        if os.environ.get("LOADGAUGE_DEBUG"):
            raise
        return _Reply(error=f"{target} cannot be run: {type(error).__name__}: {first_line(error)}", kind="NotModelled")


def main() -> None:
    """Runs the child. It exits without unloading PyTorch, which may abort on the way out."""
    import logging

    asked, answered = map(Path, sys.argv[1:3])
    call = msgspec.msgpack.decode(asked.read_bytes(), type=_Call)
    quick_scan()
    if call.module.startswith("loadgauge.capture."):  # nothing is compiled
        without_compiler()
    if not is_script(call.request.job.model):  # the libraries' own; a script's are the user's
        logging.disable(logging.CRITICAL)
    answered.write_bytes(msgspec.msgpack.encode(_answer(call)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
