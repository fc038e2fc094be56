"""loadgauge: whether an LLM training job fits, where every byte goes, how long it takes and what it costs.

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

from typing import TYPE_CHECKING

from loadgauge._version import __version__ as __version__
from loadgauge.core.base.callable_package import load as _load
from loadgauge.core.base.callable_package import make_callable as _make_callable
from loadgauge.core.base.errors import ConfigError, Error, LayoutError, NothingFits, NotMeasured, NotModelled, NotStated
from loadgauge.core.base.model_sources import ROADS as _ROADS

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
    from loadgauge.core.families.catalogue import find_model as model
    from loadgauge.core.families.catalogue import models
    from loadgauge.core.families.hf import from_dict, from_hf
    from loadgauge.core.plan.answer import plan
    from loadgauge.job_files.convert import convert
    from loadgauge.pytorch.capture.call import capture
    from loadgauge.pytorch.trace.programs.call_job import trace


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
    "trace",
    "training",
]


_LAZY = {
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
_CALLABLE = {
    "capture": "loadgauge.pytorch.capture.call:capture",
    "equation": "loadgauge.core.answers.equations.equation:equation",
    "estimate": "loadgauge.api:estimate",
    "plan": "loadgauge.core.plan.answer:plan",
    "posttrain": "loadgauge.api:posttrain",
    "trace": "loadgauge.pytorch.trace.programs.call_job:trace",
}
"""Packages that are functions as well, and the function that answers (see `callable_package`)."""


def __getattr__(name: str) -> object:
    if name in _LAZY:
        found = globals()[name] = _load(_LAZY[name])
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def _captured(job: object, why: str) -> object:
    """The road of models that no family reads."""
    road = _load("loadgauge.pytorch.capture.road:road")
    return road(job, why)


_ROADS.append(_captured)
for _name, _address in _CALLABLE.items():
    _make_callable(f"{__name__}.{_name}", _address)
