"""loadgauge: does it fit, where does every byte go, how long will it take, what will it cost. Before a GPU is rented.

>>> import loadgauge
>>> result = loadgauge.estimate(
...     loadgauge.model("llama-3.1-8b"),
...     loadgauge.Layout(dp=8, zero=3, micro_batch=1, global_batch=8, seq_len=4096),
...     loadgauge.training("torchtitan", "bf16"),
...     loadgauge.gpu("h100-sxm5-80gb"),
... )
>>> result.memory.fits
True
"""

from typing import TYPE_CHECKING

from loadgauge.errors import ConfigError, Error, LayoutError, NothingFits, NotMeasured, NotModelled, NotStated
from loadgauge.estimate.estimate import estimate
from loadgauge.estimate.params import parameters
from loadgauge.estimate.result import Estimate
from loadgauge.families.catalogue import model, models, resolve
from loadgauge.families.hf import from_dict, from_hf
from loadgauge.spec.cluster import cluster
from loadgauge.spec.hardware import gpu, gpu_ids
from loadgauge.spec.layout import Layout, RecomputePolicy
from loadgauge.spec.lora import Lora
from loadgauge.spec.training import training

if TYPE_CHECKING:
    from loadgauge.estimate.equation import equation, equations

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Error",
    "Layout",
    "LayoutError",
    "Lora",
    "NotMeasured",
    "NotModelled",
    "NotStated",
    "NothingFits",
    "RecomputePolicy",
    "cluster",
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
    "resolve",
    "training",
]


def __getattr__(name: str) -> object:
    """`equation` and `equations` are read when they are asked for: few runs need an equation."""
    if name in ("equation", "equations"):
        from importlib import import_module

        return getattr(import_module("loadgauge.estimate.equation"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _in_a_notebook(result: Estimate) -> str:
    from loadgauge.show.notebook import html

    return html(result)


# An estimate does not know how it is shown; whoever has this package sees it as a table in a notebook.
setattr(Estimate, "_repr_html_", _in_a_notebook)  # noqa: B010
