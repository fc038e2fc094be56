"""What the page offers to choose from: models, GPUs, flags with their kinds and values, dialects, ready-made runs."""

from __future__ import annotations

import functools
from typing import Any

import click

from loadgauge.cli.gpus import _plain as plain_gpu
from loadgauge.cli.models import _plain as plain_model
from loadgauge.cli.param_types import Positive, Whole
from loadgauge.families.catalogue import model, models
from loadgauge.formats.dialects import FILES
from loadgauge.spec.axes import DEGREES
from loadgauge.spec.frameworks import FRAMEWORKS
from loadgauge.spec.hardware import gpu_ids, gpus
from loadgauge.spec.lora import BASE_FORMATS
from loadgauge.spec.optimizers import OPTIMIZERS
from loadgauge.spec.overlap import Overlap
from loadgauge.spec.precision import PRECISIONS
from loadgauge.web.flags import options

GROUPS = {
    "method": (
        "framework", "precision", "optimizer", "attention", "loss", "lora-rank", "lora-targets", "qlora", "base",
        "offload", "mtp",
    ),
    "batch": ("micro-batch", "global-batch", "seq-len", "lengths"),
    "layout": (
        *DEGREES, "zero", "replicas", "sequence-parallel", "schedule", "recompute", "stage-layers", "cp-comm", "order",
        "expert-imbalance", "overlap",
    ),
    "cluster": ("gpu", "gpus", "gpus-per-node", "link-bandwidth", "nic-bandwidth", "measured"),
    "money": ("tokens", "price", "days", "mtbf-hours", "checkpoint-seconds", "restart-seconds"),
}  # fmt: skip
"""Where the page shows a flag."""
VALUES: dict[str, tuple[str, ...]] = {
    "precision": ("bf16", "fp16", *PRECISIONS),
    "optimizer": tuple(OPTIMIZERS),
    "framework": tuple(FRAMEWORKS),
    "loss": ("auto", "float32", "inplace", "fused", "compiled", "chunked"),
    "recompute": ("none", "selective", "full", "full:every=2"),
    "lora-targets": ("all", "attention"),
    "overlap": ("none", "all", *Overlap.__struct_fields__),
    "base": tuple(BASE_FORMATS),
}
"""Usual values of flags that take others too."""
UNITS = {"link-bandwidth": "GB/s", "nic-bandwidth": "GB/s"}
PRESETS: tuple[dict[str, Any], ...] = (
    {
        "name": "Llama 3.1 70B, 256 H100",
        "flags": {
            "model": "llama-3.1-70b", "gpu": "h100-sxm5-80gb", "gpus": "256", "tp": "8", "pp": "4",
            "sequence-parallel": "true", "zero": "1", "recompute": "selective", "seq-len": "8192", "micro-batch": "1",
            "global-batch": "512", "tokens": "1T", "price": "2.5",
        },
    },
    {
        "name": "Llama 3.1 8B, 8 H100, FSDP",
        "flags": {
            "model": "llama-3.1-8b", "gpu": "h100-sxm5-80gb", "gpus": "8", "zero": "3", "seq-len": "8192",
            "micro-batch": "1", "global-batch": "64", "framework": "torchtitan", "recompute": "selective",
        },
    },
    {
        "name": "Llama 3.1 8B, QLoRA on one RTX 4090",
        "flags": {
            "model": "llama-3.1-8b", "gpu": "rtx4090", "gpus": "1", "qlora": "true", "loss": "chunked", "seq-len": "2048",
            "micro-batch": "1", "global-batch": "16", "recompute": "full",
        },
    },
    {
        "name": "Llama 3.1 405B, 1,024 H100",
        "flags": {
            "model": "llama-3.1-405b", "gpu": "h100-sxm5-80gb", "gpus": "1024", "tp": "8", "pp": "16",
            "stage-layers": "7,8,8,8,8,8,8,8,8,8,8,8,8,8,8,7", "sequence-parallel": "true", "zero": "1",
            "recompute": "full", "seq-len": "8192", "micro-batch": "1", "global-batch": "2048", "tokens": "15T",
            "price": "2.5",
        },
    },
    {
        "name": "DeepSeek-V3, 2,048 H800",
        "flags": {
            "model": "deepseek-v3", "gpu": "h800-sxm5-80gb", "gpus": "2048", "pp": "16", "ep": "64",
            "stage-layers": "4,4,4,4,4,4,4,4,4,4,4,4,4,3,3,3", "zero": "1", "precision": "fp8", "recompute": "full",
            "nic-bandwidth": "50GB/s", "seq-len": "4096", "micro-batch": "1", "global-batch": "15360",
            "tokens": "14.8T", "price": "2",
        },
    },
)  # fmt: skip
"""Runs to begin with."""


@functools.cache
def catalogue() -> dict[str, Any]:
    """All of it."""
    return {
        "models": [plain_model(model(name)) for name in models()],
        "gpus": [plain_gpu(card) for card in gpus()],
        "flags": [_flag(name, option) for name, option in options().items()],
        "dialects": list(FILES),
        "presets": list(PRESETS),
    }


def _flag(name: str, option: click.Option) -> dict[str, Any]:
    """One flag: its kind, its values, the group it is shown in.

    >>> found = _flag("zero", options()["zero"])
    >>> found["type"], found["min"], found["max"], found["group"]
    ('int', 0, 3, 'layout')
    """
    kind, low, high, choices = "text", None, None, VALUES.get(name, ())
    if option.is_flag:
        kind = "bool"
    elif isinstance(option.type, Whole):
        kind, low, high = "int", option.type.low, option.type.high
    elif isinstance(option.type, Positive):
        kind = "number"
    elif isinstance(option.type, click.Choice):
        kind, choices = "choice", tuple(option.type.choices)
    elif name == "gpu":
        kind, choices = "choice", gpu_ids()
    elif name == "lengths":
        kind = "file"
    elif name in UNITS:
        kind = "bandwidth"
    elif name == "tokens":
        kind = "count"
    return {
        "name": name,
        "type": kind,
        "choices": list(choices),
        "open": kind == "text",
        "min": low,
        "max": high,
        "default": None,
        "metavar": option.metavar,
        "group": next((group for group, names in GROUPS.items() if name in names), "method"),
        "help": option.help,
    }
