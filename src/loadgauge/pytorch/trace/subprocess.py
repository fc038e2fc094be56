"""Work on a model or a script in a process of its own: PyTorch may end the process from C++, and the caller then reports
it in one line. The caller needs no PyTorch."""

import codecs
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TextIO, TypeVar, get_type_hints

import msgspec

from loadgauge.core.base.errors import ConfigError, Error, LayoutError, NotModelled, refuse
from loadgauge.core.definitions.job.job import Job

LIMIT = "LOADGAUGE_CAPTURE_SECONDS"
"""The variable that says after how many seconds a capture is stopped."""
SECONDS, PATIENCE, SILENCE = 600, 0.5, 5.0
"""After how many it is stopped where that variable is not set, after how many a terminal is told so, and after how many a file."""
P = ParamSpec("P")
T = TypeVar("T")


WHOLE = "__main__"
"""The name of a script's function that is all of it, as `python script.py` runs it."""


def with_whole_script(target: str) -> str:
    """Return a target of which a script that is named without a function is run whole."""
    return f"{target}:{WHOLE}" if target.endswith(".py") and os.path.isfile(target) else target


class Request(msgspec.Struct, frozen=True):
    """A job to work on in a child process. `job.model` may be `script.py:function`; `layers`, `rank` and `keep` as for
    `find_job` and `TorchRun`; device: the device to simulate, or where a measurement runs; arguments: of a script."""

    job: Job
    device: str = "cuda"
    layers: int | None = None
    rank: int = 0
    keep: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


DEFAULT_KEEP = (
    "mm",
    "addmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "reduce_scatter_tensor",
)
"""Matrix products, attention and communication: torchtitan's list, except that it recomputes every second product."""


def kept_operations(text: str | None) -> tuple[str, ...]:
    """The operations of `--keep`: names separated by commas, or `default` for `DEFAULT_KEEP`; none without a text."""
    if text is None:
        return ()
    return DEFAULT_KEEP if text == "default" else tuple(name.strip() for name in text.split(","))


class Call(msgspec.Struct, frozen=True):
    """The task of a child: a function by its module and name, its request, and further arguments."""

    module: str
    function: str
    request: Request
    arguments: dict[str, Any]


class Reply(msgspec.Struct):
    """The result of the function, encoded, or why there is none."""

    result: msgspec.Raw = msgspec.Raw(msgspec.msgpack.encode(None))
    error: str = ""
    kind: str = ""
    key: str = ""


def in_child(
    work: Callable[Concatenate[Request, P], T],
    request: Request,
    shown: TextIO | None = None,
    *_: P.args,
    **arguments: P.kwargs,
) -> T:
    """Calls `work(request, **arguments)` in a child process and returns its result.

    work: a function of a module, whose result type msgspec can encode
    shown: where the child's standard output goes, if anywhere; its standard error is then passed on too
    Raises the child's error, or NotModelled where the work fails or PyTorch ended the child.
    """
    result: type[T] = get_type_hints(work)["return"]
    return named_in_child(f"{work.__module__}:{work.__name__}", result, request, shown, **arguments)


def named_in_child(work: str, result: type[T], request: Request, shown: TextIO | None = None, **arguments: Any) -> T:
    """`in_child` of a function whose module only the child imports, as that takes PyTorch.

    work: module:function; result: the type of what it returns; the rest as for `in_child`
    Raises ConfigError too where a capture has not ended after the seconds of `LIMIT`.
    """
    module, _, function = work.partition(":")
    limit = seconds_allowed() if module.startswith("loadgauge.pytorch.capture.") else None
    call = Call(module, function, request, arguments)
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "request", Path(folder) / "reply"
        asked.write_bytes(msgspec.msgpack.encode(call))
        try:
            code, last = _run_child([str(asked), str(answered)], shown, limit)
        except TimeoutError:
            message = f"its own code had not ended after {limit:g} s and was stopped; {LIMIT}=NUMBER allows more"
            raise ConfigError(message, file=request.job.model) from None
        refuse(not answered.exists(), f"PyTorch ended the trace (exit code {code}): {last[:500]}", NotModelled)
        reply = msgspec.msgpack.decode(answered.read_bytes(), type=Reply)
    if reply.kind:
        errors = {kind.__name__: kind for kind in (ConfigError, LayoutError, NotModelled)}
        error = errors.get(reply.kind, Error)(reply.error)
        if isinstance(error, ConfigError):
            error.key = reply.key  # its text has it already
        raise error
    return msgspec.msgpack.decode(reply.result, type=result)


def seconds_allowed() -> float:
    """Return after how many seconds a capture is stopped. Raises ConfigError where the variable `LIMIT` is no positive number."""
    text = os.environ.get(LIMIT) or str(SECONDS)
    try:
        allowed = float(text)
    except ValueError:
        allowed = 0.0
    refuse(
        not 0 < allowed <= threading.TIMEOUT_MAX, f"must be a number of seconds above 0, got {text[:40]!r}", key=LIMIT
    )
    return allowed


def _run_child(arguments: list[str], shown: TextIO | None, limit: float | None = None) -> tuple[int, str]:
    """Runs the child to its end: its exit code, and the last line that it wrote to standard error. What it prints is
    passed on as it comes, if it is to be shown. Raises TimeoutError where it has not ended after `limit` seconds."""
    # What imports make is there to stay, and to look for garbage in it takes a second. The child is told whose it is: what
    # it asks for itself may be another's number, where this process has ended before it asks.
    program = (
        "import gc; gc.disable(); from loadgauge.pytorch.trace.child import main; "
        f"gc.freeze(); gc.enable(); main({os.getpid()})"
    )
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
        threading.Thread(target=pass_on, args=(child.stdout, shown, []), daemon=True),
        threading.Thread(target=pass_on, args=(child.stderr, None if shown is None else sys.stderr, last), daemon=True),
    ]
    begun = time.monotonic()
    try:
        for reader in readers:
            reader.start()
        patience = PATIENCE if sys.stderr.isatty() else SILENCE
        if limit is not None and patience < limit:
            readers[0].join(patience)
            if readers[0].is_alive():
                stops = f"Ctrl-C stops it, and so do {limit:g} s ({LIMIT})"
                print(f"loadgauge: the model's own code runs, once for such flags; {stops}", file=sys.stderr)
        for reader in readers:
            reader.join(None if limit is None else max(0.0, limit - (time.monotonic() - begun)))
            if reader.is_alive():
                raise TimeoutError
        return child.wait(), last[0]
    finally:
        if child.poll() is None:  # interrupted
            child.kill()
            child.wait()
