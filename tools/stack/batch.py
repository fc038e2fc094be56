"""Traces many cases: each in a process of its own, two at a time, and not again where nothing has changed since."""

from __future__ import annotations

import gc
import hashlib
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from stack import libraries
from stack.case import Case
from stack.record import Traced

LIBRARIES = (
    "torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "deepspeed", "liger_kernel", "torchao",
    "galore-torch", "apollo-torch", "lomo-optim", "schedulefree",
)  # fmt: skip
FOLDER = Path(os.environ.get("STACK_FOLDER") or Path(__file__).parents[2] / ".stack")
"""Where traces are kept (STACK_FOLDER); git does not see it."""
REVISION = 2
"""Grows with each change of training, record, libraries or models that changes a trace."""
CHANGED: tuple[tuple[str, int, Callable[[Case], bool]], ...] = (
    ("offloaded", 1, lambda case: case.checkpointing == "offloaded"),
    ("the rank with the head", 1, lambda case: case.wrapper in ("zero1", "zero2")),
    ("copied weights", 1, lambda case: case.method == "embeddings" and case.ranks > 1),
    ("the loss alone", 1, lambda case: case.family == "gemma" and case.loss in ("liger", "inplace")),
    ("dtype of autocast", 1, lambda case: case.trains_by_trl and case.precision.endswith("+bf16")),
)
"""The same for a change that touches some cases only; these are traced again."""
LONGEST = 300.0
"""Seconds after which a case is given up."""


class Failed(msgspec.Struct, frozen=True):
    """A case that the libraries refused, or that could not be traced."""

    case: Case
    error: str


Outcome = Traced | Failed


def versions() -> dict[str, str]:
    """The libraries that are installed, with their versions."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run(cases: Iterable[Case], workers: int = 2) -> Iterator[Outcome]:
    """The outcome of each case, in the order in which they come; those that are kept come first."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    todo = []
    for case in cases:
        kept = read(case)
        if kept is None:
            todo.append(case)
        else:
            yield kept
    if todo:
        _import_libraries()
    running: dict[int, tuple[Case, float]] = {}
    while todo or running:
        while todo and len(running) < workers:
            case = todo.pop(0)
            running[_start(case)] = case, time.monotonic()
        number, _ = os.waitpid(-1, os.WNOHANG)
        if not number:
            time.sleep(0.05)
            for child, (_, begun) in running.items():
                if time.monotonic() - begun > LONGEST:
                    os.kill(child, signal.SIGKILL)
            continue
        if number in running:
            case, _ = running.pop(number)
            yield read(case) or Failed(case, "the process ended")


def read(case: Case) -> Outcome | None:
    """The outcome that is kept of a case; None where there is none, or where libraries or this program have changed."""
    place = _place(case)
    if not place.exists():
        return None
    return msgspec.msgpack.decode(place.read_bytes(), type=_Kept).outcome


class _Kept(msgspec.Struct):
    traced: Traced | None = None
    failed: Failed | None = None

    @property
    def outcome(self) -> Outcome:
        result = self.traced or self.failed
        assert result is not None
        return result


def _place(case: Case) -> Path:
    changed = "".join(f" {name} {number}" for name, number, of in CHANGED if of(case))
    return FOLDER / f"{hashlib.sha256((case.words + _program() + changed).encode()).hexdigest()[:24]}.msgpack"


def _program() -> str:
    """The libraries and the revision of what this program does with them, as one word."""
    return f"{REVISION} {versions()}"


def _start(case: Case) -> int:
    """Traces a case in a child process, and returns the child's number."""
    number = os.fork()
    if number:
        return number
    code = 0
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        from stack.record import record

        try:
            kept = _Kept(traced=record(case))
        except Exception as error:
            if os.environ.get("LOADGAUGE_DEBUG"):
                _place(case).with_suffix(".txt").write_text(traceback.format_exc())
            kept = _Kept(failed=Failed(case, f"{type(error).__name__}: {error}"[:500]))
        part = _place(case).with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.msgpack.encode(kept))
        part.rename(_place(case))
    except BaseException:
        code = 1
    finally:
        os._exit(code)


def _import_libraries() -> None:
    """Once for all children."""
    assert libraries.SEE_CUDA  # its import says which accelerator there is
    for name in ("torch", "transformers", "accelerate", "peft", "trl", "datasets", "bitsandbytes", "liger_kernel", "deepspeed",
                 "torchao", "torch.distributed.fsdp", "transformers.integrations.bitsandbytes", "torch._dynamo",
                 "deepspeed.runtime.zero.stage3", "transformers.trainer", "trl.trainer.sft_trainer", "peft.tuners.lora",
                 "torch.testing._internal.distributed.fake_pg", *(f"transformers.models.{name}.modeling_{name}" for name in
                 ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "gpt2", "gpt_neox", "mixtral"))):  # fmt: skip
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"without {name}: {error}", file=sys.stderr)
    gc.collect()
    gc.freeze()  # children collect garbage often, and would go through all of this each time
