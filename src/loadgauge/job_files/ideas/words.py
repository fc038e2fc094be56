"""Words that several tools share: optimizers, attention, linear layers."""

import re
import reprlib
from pathlib import PurePath
from typing import Any

from loadgauge.core.definitions.job.spoken import ATTENTION as ATTENTION, TORCH_OPTIMIZERS as TORCH_OPTIMIZERS
from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.core.families.catalogue import repositories
from loadgauge.core.families.named.derived import derive

CUT_LOSS = "chunked:256"
"""Cut cross-entropy, which makes logits a block of rows and columns at a time and keeps none (cut-cross-entropy 25.1,
`cce_lse_forward.py`, `cce_backward.py`): pieces so small that they weigh nothing."""
SMALLER = {"gptq": 0.7, "awq": 0.7, "aqlm": 0.9, "nvfp4": 0.7, "fp8": 0.5}
"""How checkpoints are quantised already, and the share of 16 bits that this saves at the most."""
STORED = re.compile(rf"(?i)[-_]({'|'.join(SMALLER)})(?=$|[-_])")
"""Such a checkpoint, by its name."""


def stored(name: str | None) -> str | None:
    """Return how the matrices of a checkpoint are quantised, by its name.

    >>> stored("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4"), stored("gpt2")
    ('gptq', None)
    """
    return next((match.lower() for match in STORED.findall(name or "")), None)


GROWS = re.compile(r"^[^#\n]*\bPYTORCH_(?:CUDA_)?ALLOC_CONF\W{1,3}[^\n]*expandable_segments:True", re.MULTILINE)
"""The setting with which segments of PyTorch's allocator grow, in a shell script."""


def environment(text: str, file: str) -> tuple[Uncounted, ...]:
    """Return what the variables of a shell script ask of PyTorch that is not counted.

    Segments that grow move no figure and have no effect of their own: less lies idle, towards the low end of the range, which also
    rests on reports of tools that set them by themselves (axolotl, torchtune, LLaMA-Factory).

    >>> [item.key for item in environment("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\\n", "run.sh")]
    ['PYTORCH_CUDA_ALLOC_CONF']
    """
    note = "PYTORCH_CUDA_ALLOC_CONF: segments of the allocator grow, so that less lies idle: look at the low end of the range"
    return (Uncounted(note, "PYTORCH_CUDA_ALLOC_CONF", file=file),) if GROWS.search(text) else ()


def model_of_path(file: str) -> str | None:
    """The model that the names of a file and of the folders around it say, by a family and its size.

    >>> model_of_path("scripts/llama2/run_llama2_7b.sh"), model_of_path("opt/single_node/run_1.3b_lora.sh"), model_of_path("a.sh")
    ('llama-2-7b', 'opt-1.3b', None)
    """
    *folders, last = [
        re.split(r"[_\s-]+", PurePath(part).stem if part.endswith(".sh") else part)
        for part in PurePath(file).parts[-5:]
    ] or [[]]
    size = next((word for word in last if re.fullmatch(r"(?i)\d+(?:\.\d+)?[bm]", word)), None)
    before = [*last[: last.index(size)][::-1], *(word for folder in folders[::-1] for word in folder)] if size else []
    alike = (derive(f"{word}-{size}", repositories()) for word in before)
    return next((model.base for model in alike if model is not None and not model.changes), None)


AXOLOTL_OPTIMIZERS = {
    "muon": "muon", "ao_adamw_8bit": "adamw-torchao-8bit", "ao_adamw_4bit": "adamw-4bit", "ao_adamw_fp8": "adamw-fp8",
    "optimi_adamw": "stable-adamw",
}  # fmt: skip
"""What axolotl has beside them."""

BITSANDBYTES = {
    "bitsandbytes.optim.PagedAdamW8bit": "paged-adamw-8bit", "bitsandbytes.optim.AdamW8bit": "adamw-8bit",
    "bitsandbytes.optim.PagedAdamW": "paged-adamw-32bit", "bitsandbytes.optim.PagedAdamW32bit": "paged-adamw-32bit",
}  # fmt: skip
"""bitsandbytes' classes, as configurations that instantiate a class name them."""

TRANSFORMER_ENGINE = {"auto": "flash", "flash": "fa2", "fused": "cudnn", "unfused": "eager", "local": "eager"}
"""`attention_backend` of Megatron-Core: `flash` is the library FlashAttention, `fused` cuDNN."""

SHARDING = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
SHARDING |= {str(number): stage for number, stage in enumerate(list(SHARDING.values()), 1)}
"""FSDP1's strategies, by name and by number, as ZeRO stages."""

RESHARDED = {"true": 3, "false": 2}
"""Words for dropping whole weights after the forward, or keeping them, as ZeRO stages."""

CPU, NOWHERE = ("cpu", "nvme"), ("none",)


SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxlist, SHORT.maxdict, SHORT.maxstring, SHORT.maxother = 2, 4, 4, 40, 40


def short(value: object) -> str:
    """A value for an error message, at most 40 characters; a huge one is never written out whole.

    >>> short("x"), short(["y"] * 1_000_000), short(10**5000)
    ("'x'", "['y', 'y', 'y', 'y', ...]", 'a value too long to show')
    """
    if isinstance(value, int) and abs(value) > 10**40:
        return "a value too long to show"
    # ruamel's own strings, numbers and lists are shown as Python's.
    for kind in (bool, int, float, str, list, dict):
        if isinstance(value, kind):
            value = value if isinstance(value, bool) else _few(kind, value)
            break
    try:
        text = SHORT.repr(value)
    except (ValueError, RecursionError):
        return "a value too long to show"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _few(kind: Any, value: Any) -> Any:
    if kind is list:
        return [_few(list, inner) if isinstance(inner, list) else inner for inner in value[:5]]
    if kind is dict:
        return dict(list(value.items())[:5])
    return kind(value)
