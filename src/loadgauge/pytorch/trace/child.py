"""Entry point of the child processes of `loadgauge.pytorch.trace.subprocess`."""

import gc
import os
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from loadgauge.core.base import Error, first_line, is_script
from loadgauge.pytorch.trace.no_compiler import quick_scan, without_compiler
from loadgauge.pytorch.trace.programs.target import find_job
from loadgauge.pytorch.trace.programs.training import Traceable
from loadgauge.pytorch.trace.result import Trace
from loadgauge.pytorch.trace.subprocess import Call, Reply, Request
from loadgauge.pytorch.trace.torch_run import TorchRun
from loadgauge.pytorch.trace.trace import Recorded, record


def requested(request: Request) -> Traceable:
    """The job of a request, to trace or measure. Raises ConfigError, LayoutError or NotModelled."""
    gc.disable()  # while transformers and the model's code are imported, as in `in_child`
    run = TorchRun.of(request.job, request.rank, request.keep)
    job = find_job(request.job.model, run, request.layers, request.arguments)
    gc.freeze()
    gc.enable()
    return job


def record_request(request: Request, stacks: bool = False) -> Recorded:
    """Traces the job of a request in this process. stacks: with the program's lines at each allocation. Raises as
    `requested` does."""
    gpus = request.job.gpus or 1
    job = requested(request)
    return record(job, request.device, gpus=gpus if gpus > 1 else None, rank=request.rank, stacks=stacks)


def trace_request(request: Request) -> Trace:
    """Traces the job of a request in this process; see `in_child`."""
    return record_request(request).trace


def _done(call: Call) -> Any:
    """Does the work, once more where a library imported a torchvision whose operators were not to be had (a wheel for CUDA)."""
    work = getattr(import_module(call.module), call.function)
    try:
        return work(call.request, **call.arguments)
    except Exception as error:
        chain: list[BaseException | None] = [error]
        while chain[-1] is not None:
            chain.append(chain[-1].__cause__ or chain[-1].__context__)
        if "torchvision::" not in " ".join(map(str, chain)):
            raise
    from loadgauge.pytorch.device.kernels.vision_ops import torchvision

    torchvision()
    return work(call.request, **call.arguments)


def _answer(call: Call) -> Reply:
    """Does the child's work."""
    target = call.request.job.model
    try:
        return Reply(msgspec.Raw(msgspec.msgpack.encode(_done(call))))
    except Error as error:
        return Reply(error=str(error), kind=type(error).__name__, key=getattr(error, "key", ""))
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return Reply(error=f"{target} cannot be run: {error.strerror or error}{where}", kind="ConfigError")
    except SystemExit as error:
        return Reply(error=f"{target} cannot be run: it ends the program (exit code {error.code})", kind="ConfigError")
    except Exception as error:
        if os.environ.get("LOADGAUGE_DEBUG"):
            raise
        return Reply(error=f"{target} cannot be run: {type(error).__name__}: {first_line(error)}", kind="NotModelled")


def end_with(parent: int) -> None:
    """Ends this process once its parent has ended, at most a second later: nobody is left to read the reply."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main(parent: int) -> None:
    """Runs the child of a process. It exits without unloading PyTorch, which may abort on the way out."""
    import logging

    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    asked, answered = map(Path, sys.argv[1:3])
    call = msgspec.msgpack.decode(asked.read_bytes(), type=Call)
    own = is_script(call.request.job.model)
    quick_scan(assignment=not own)
    room = call.module.removeprefix("loadgauge.pytorch.").partition(".")[0]
    if room == "capture" or (room == "trace" and not own):  # nothing is compiled
        without_compiler()
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True  # what symbols stop is run again without them
    if not own:  # the libraries' messages; a script's are the user's
        logging.disable(logging.CRITICAL)
    answered.write_bytes(msgspec.msgpack.encode(_answer(call)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
