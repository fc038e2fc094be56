"""Choices that the page offers: models, GPUs, the fields of a `Job`, dialects of job files, presets."""

from __future__ import annotations

import functools
from typing import Any

from loadgauge.core.base.hooks import Door
from loadgauge.core.definitions.hardware.hardware import gpu_ids, gpus
from loadgauge.core.definitions.job.job import Field, fields
from loadgauge.core.families.catalogue import find_model, models
from loadgauge.core.text.catalogue import gpu_row, model_row
from loadgauge.page.inputs.flags import CHOSEN

JOB_FILES = Door("job_files")

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
            "model": "llama-3.1-8b", "gpu": "h100-sxm5-80gb", "gpus": "8", "zero": "3", "seq-len": "4096",
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
"""Example runs to start from."""


TYPES = {"switch": "bool", "whole": "int", "positive": "number", "price": "number"}
"""The page's name for a kind of field, where it differs."""


@functools.cache
def catalogue() -> dict[str, Any]:
    """All choices that the page offers: models, GPUs, flags, dialects of job files and presets, as plain values."""
    return {
        "models": [model_row(find_model(name)) for name in models()],
        "gpus": [gpu_row(card) for card in gpus()],
        "flags": [flag_row(name, field) for name, field in fields().items() if _shown(name, field)],
        "dialects": list(JOB_FILES.FILES),
        "presets": list(PRESETS),
    }


def _shown(name: str, field: Field) -> bool:
    """Return whether a field is a control of the page: job files are dropped onto it, never named."""
    return name in CHOSEN or (name != "model" and field.group not in ("file", "posttrain"))


def flag_row(name: str, field: Field) -> dict[str, Any]:
    """A field of `Job` as the page reads it: type, bounds, choices, group and help.

    >>> row = flag_row("zero", fields()["zero"])
    >>> row["type"], row["min"], row["max"], row["group"]
    ('int', 0, 3, 'layout')
    """
    kind, choices = TYPES.get(field.kind, field.kind), field.choices or field.values
    if name == "gpu":
        kind, choices = "choice", gpu_ids()
    return {
        "name": name.replace("_", "-"),
        "type": kind,
        "choices": list(choices),
        "open": kind == "text",
        "min": field.low,
        "max": field.high,
        "default": None,
        "metavar": field.metavar,
        "group": field.group,
        "help": field.help,
    }
