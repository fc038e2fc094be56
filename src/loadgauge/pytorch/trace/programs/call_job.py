"""`loadgauge.trace(...)`: the trace of a model, a job, a script, or objects of PyTorch and transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO, Unpack

import msgspec

from loadgauge.core.base import ConfigError, is_script, needs_torch, refuse
from loadgauge.core.definitions.job.flag_types import TraceFlags
from loadgauge.core.definitions.job.job import Job
from loadgauge.pytorch.trace import subprocess
from loadgauge.pytorch.trace.result import Trace
from loadgauge.pytorch.trace.subprocess import Request

if TYPE_CHECKING:
    import torch

Device = Literal["cuda", "cpu"]


def trace(
    target: Any,
    *inputs: Any,
    device: Device | None = None,
    layers: int | None = None,
    rank: int = 0,
    keep: Sequence[str] = (),
    loss: Callable[[Any], torch.Tensor] | None = None,
    keywords: dict[str, Any] | None = None,
    **fields: Unpack[TraceFlags],
) -> Trace:
    """Traces two training steps on tensors without memory, as `loadgauge trace` does; no GPU is needed.

    target: a name in the catalogue, a path to a config.json, `script.py:function`, a `Job`, a config object of
        transformers, a function that trains, or a module (called with `inputs` and `keywords`)
    device: the device to simulate (cuda); for a script without a tensor on cuda, its CPU tensors unless given
    layers: number of layers, instead of the model's own
    rank: the rank of `gpus` to simulate
    keep: operations whose results `recompute="full"` keeps, such as `["mm"]`
    loss: for a module: makes a scalar of what it returns
    fields: as the flags of `loadgauge trace`; they replace those of a `Job`
    Returns a `Trace`: `print` shows the text of the command, `to_dict()` its JSON; all sizes are in bytes.
    Raises ConfigError without PyTorch, and ConfigError, LayoutError or NotModelled for what it cannot run.

    >>> import loadgauge
    >>> result = loadgauge.trace("gpt2", layers=1, seq_len=16, precision="fp32", optimizer="sgd")
    >>> result.peak.categories["weights"] > 4 * 768 * 50257
    True
    """
    needs_torch("trace")
    if isinstance(target, str | Job):
        job = target.replace(**fields) if isinstance(target, Job) else Job(model=target, **fields)
        job = job.replace(model=subprocess.with_whole_script(job.model))
        request = Request(job, device or "cuda", layers, rank, tuple(keep))
        result = traced(request, sys.stdout if is_script(job.model) else None)
        return result if result.events else trace_on_cpu(request, result, device is None)
    import torch

    from loadgauge.pytorch.trace import trace as tracing
    from loadgauge.pytorch.trace.programs.jobs import of_module
    from loadgauge.pytorch.trace.programs.script import FunctionJob
    from loadgauge.pytorch.trace.programs.target import config_job
    from loadgauge.pytorch.trace.torch_run import TorchRun

    if isinstance(target, torch.nn.Module):
        module_fields = {name: value for name, value in fields.items() if name in ("optimizer", "precision")}
        refuse(
            len(module_fields) < len(fields),
            "a module takes optimizer and precision; the rest is in the module and its inputs",
        )
        module_job = of_module(target, *inputs, loss=loss, keywords=keywords, **module_fields)  # type: ignore[arg-type]
        return tracing.trace(module_job, device or "cuda")
    gpus = fields.get("gpus")
    if hasattr(target, "get_text_config"):
        run = TorchRun.of(Job(model="", **fields), rank, tuple(keep))
        return tracing.trace(config_job(target, run, layers=layers), device or "cuda", gpus=gpus, rank=rank)
    if callable(target):
        return tracing.trace(FunctionJob(target), device or "cuda", gpus=gpus, rank=rank)
    raise ConfigError(f"cannot trace {type(target).__name__}: give a model, a Job, a script.py:function, or a module")


def traced(request: Request, shown: TextIO | None = None) -> Trace:
    """Return the trace of the job of a request, made in a child process; this one needs no PyTorch. shown: as for `in_child`"""
    return subprocess.named_in_child("loadgauge.pytorch.trace.child:trace_request", Trace, request, shown)


def trace_on_cpu(request: Request, trace: Trace, allowed: bool) -> Trace:
    """The trace of a script's CPU tensors, where nothing of it was on the simulated CUDA device.

    allowed: whether no device was asked for
    Raises ConfigError where there are no tensors at all, or where it is not allowed.
    """
    file = request.job.model.removesuffix(f":{subprocess.WHOLE}")
    refuse(not trace.elsewhere, "made no tensor: there is nothing to trace", file=file)
    refuse(
        not allowed,
        "nothing ran on the simulated CUDA device: put the model and its inputs on cuda"
        ' (torch.set_default_device("cuda")), or trace its CPU tensors with --device cpu',
        file=file,
    )
    again = traced(msgspec.structs.replace(request, device="cpu"))
    note = (
        "cpu: nothing of this script was on cuda, so it was run once more and its CPU tensors are what is reported"
        ' (torch.set_default_device("cuda") traces them as on a GPU)'
    )
    return msgspec.structs.replace(again, assumed={"device": note, **again.assumed})
