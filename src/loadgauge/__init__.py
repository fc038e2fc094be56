"""loadgauge: whether an LLM training job fits, where every byte goes, how long it takes and what it costs.

Ten names, each with an example in its own help; the others are specifications behind them.

    estimate   does it fit, where does every byte go, how long does it take
    plan       the best of all layouts, or the nearest miss
    why        what held the memory when it ran out, from the text of the error
    trace      what real PyTorch code would allocate, on a simulated device
    capture    any module: its memory and work as formulas
    read       another tool's job file, as a Job
    convert    one tool's job file into another's
    train      padding-free batches for your own loop (a package)
    Job        a run as a value, with every flag of the command line
    Error      the base of every error here

>>> import loadgauge
>>> result = loadgauge.estimate("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3, seq_len=4096)
>>> result.memory.fits, result.time is not None
(True, True)

The same as a `Job`, and a change of it:

>>> job = loadgauge.Job(model="llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3, seq_len=4096)
>>> loadgauge.estimate(job) == result, loadgauge.estimate(job.replace(zero=0)).memory.fits
(True, False)

The same from specifications, with nothing assumed:

>>> layout = loadgauge.Layout(dp=8, zero=3, micro_batch=1, global_batch=8, seq_len=4096)
>>> kind = loadgauge.training("torchtitan", "bf16")
>>> loadgauge.estimate("llama-3.1-8b", layout, kind, gpu="h100-sxm5-80gb").memory.fits
True
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from loadgauge._version import __version__ as __version__
from loadgauge.core.base import (
    ConfigError,
    Error,
    LayoutError,
    NothingFits,
    NotMeasured,
    NotModelled,
    NotStated,
    load as _load,
)

if TYPE_CHECKING:
    from loadgauge.api import estimate, posttrain
    from loadgauge.core.answers.equations.equation import equation, equations
    from loadgauge.core.definitions.hardware.cluster import cluster
    from loadgauge.core.definitions.hardware.hardware import gpu, gpu_ids
    from loadgauge.core.definitions.job.job import Job
    from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
    from loadgauge.core.definitions.model.lora import Lora
    from loadgauge.core.definitions.training.training import training
    from loadgauge.core.estimate.states.parameters import parameters
    from loadgauge.core.families.catalogue import find_model as model, models
    from loadgauge.core.families.hf import from_dict, from_hf
    from loadgauge.core.plan.answer import plan
    from loadgauge.job_files.convert import convert, read
    from loadgauge.pytorch.capture.call import capture
    from loadgauge.pytorch.trace.programs.call_job import trace
    from loadgauge.pytorch.why.answer import answer as why


__all__ = [
    "ConfigError",
    "Error",
    "Job",
    "Layout",
    "LayoutError",
    "Lora",
    "NotMeasured",
    "NotModelled",
    "NotStated",
    "NothingFits",
    "RecomputePolicy",
    "capture",
    "cluster",
    "convert",
    "equation",
    "equations",
    "estimate",
    "from_dict",
    "from_hf",
    "gpu",
    "gpu_ids",
    "model",
    "models",
    "parameters",
    "plan",
    "posttrain",
    "read",
    "trace",
    "training",
    "why",
]


_LAZY = {
    "capture": "loadgauge.pytorch.capture.call:capture",
    "equation": "loadgauge.core.answers.equations.equation:equation",
    "estimate": "loadgauge.api:estimate",
    "plan": "loadgauge.core.plan.answer:plan",
    "read": "loadgauge.job_files.convert:read",
    "why": "loadgauge.pytorch.why.answer:answer",
    "posttrain": "loadgauge.api:posttrain",
    "trace": "loadgauge.pytorch.trace.programs.call_job:trace",
    "Job": "loadgauge.core.definitions.job.job:Job",
    "Layout": "loadgauge.core.definitions.layout.layout:Layout",
    "Lora": "loadgauge.core.definitions.model.lora:Lora",
    "RecomputePolicy": "loadgauge.core.definitions.layout.layout:RecomputePolicy",
    "cluster": "loadgauge.core.definitions.hardware.cluster:cluster",
    "convert": "loadgauge.job_files.convert:convert",
    "equations": "loadgauge.core.answers.equations.equation:equations",
    "from_dict": "loadgauge.core.families.hf:from_dict",
    "from_hf": "loadgauge.core.families.hf:from_hf",
    "gpu": "loadgauge.core.definitions.hardware.hardware:gpu",
    "gpu_ids": "loadgauge.core.definitions.hardware.hardware:gpu_ids",
    "model": "loadgauge.core.families.catalogue:find_model",
    "models": "loadgauge.core.families.catalogue:models",
    "parameters": "loadgauge.core.estimate.states.parameters:parameters",
    "training": "loadgauge.core.definitions.training.training:training",
}
"""Names and where they are defined; each is imported at its first use, so that a command imports only what it needs."""


_MOVED = {"measure": "pytorch.measure", "notebook": "sheets.notebook"}
"""Modules that can be imported by the shorter names that they had."""


def __getattr__(name: str) -> object:
    if name in _LAZY:
        value = globals()[name] = _load(_LAZY[name])
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


class _Moved:
    """Finds a module of `_MOVED` by its shorter name: the same module, not a copy."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        head, _, rest = name.removeprefix("loadgauge.").partition(".")
        if head not in _MOVED or not name.startswith("loadgauge."):
            return None
        from importlib.util import spec_from_loader

        loader: Any = _Same(".".join(filter(None, ("loadgauge", _MOVED[head], rest))))
        return spec_from_loader(name, loader)


class _Same:
    """Loads a module by the name where it is."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: Any) -> Any:
        module = _import_module(self.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        """Leave the module as it is: it has run, and keeps its own name."""
        module.__spec__ = self.spec


_sys.meta_path.insert(0, _Moved)
