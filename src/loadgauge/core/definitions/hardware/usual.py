"""Tells what is assumed of a GPU where no source states it (`data/usual_figures.toml`): a wide range is better than none."""

import msgspec

from loadgauge.core.base import parse, read_table
from loadgauge.core.definitions.hardware.cluster import GPUS_PER_NODE
from loadgauge.core.definitions.hardware.hardware import Gpu, Quantity

ASSUMED = "assumed"
"""Citation key of these figures."""


def usual_network(gpu: Gpu) -> tuple[float, str] | None:
    """Return the bandwidth between nodes that is usual for a GPU [byte/s], and why; None where its own file's counts.

    >>> from loadgauge.core.definitions.hardware.hardware import gpu
    >>> [usual_network(gpu(id))[0] for id in ("mi300x", "rtx4090")], usual_network(gpu("h100-sxm5-80gb"))
    ([50000000000.0, 390625000.0], None)
    """
    rows = read_table("usual_figures.toml")["network"]
    row = next((row for row in rows if gpu.id in row.get("gpus", "").split()), None)
    if gpu.nic.bandwidth is not None and (row is None or not row.get("before_stated")):
        return None
    row = row or next(row for row in rows if gpu.segment in row.get("segments", "").split())
    return parse(row["each"], "each", "byte/s")[0], row["why"]


def usual_format(name: str) -> str:
    """Return the format in which the publisher of a model stores its weights; empty for 16 bits.

    >>> usual_format("deepseek-v3"), usual_format("llama-3.1-8b")
    ('fp8', '')
    """
    return next(
        (text for text, names in read_table("usual_figures.toml")["stored"].items() if name in names.split()), ""
    )


def usual_node(gpu: Gpu | None) -> int:
    """Return the number of GPUs that a node's fast link joins, within which layers are shared out; 8 where no source says.

    >>> usual_node(None)
    8
    """
    domain = None if gpu is None else gpu.interconnect.domain
    return GPUS_PER_NODE if domain is None else min(GPUS_PER_NODE, int(domain.value))


def one_of(gpu: Gpu) -> str:
    """Return the id of what a program counts as one GPU of a package that has several; the GPU's own where it has one.

    >>> from loadgauge.core.definitions.hardware.hardware import gpu
    >>> one_of(gpu("mi250x")), one_of(gpu("h100-sxm5-80gb"))
    ('mi250x-gcd', 'h100-sxm5-80gb')
    """
    return str(read_table("usual_figures.toml")["one_of"].get(gpu.id, gpu.id))


def with_usual(gpu: Gpu) -> tuple[Gpu, dict[str, str]]:
    """Return a GPU with figures in the place of those that no source states, and what was assumed, by name.

    16-bit products that no source states run at the rate of float32.

    >>> from loadgauge.core.definitions.hardware.hardware import gpu
    >>> filled, assumed = with_usual(gpu("m2-max-64gb"))
    >>> filled.peak("bf16") == filled.peak("fp32"), assumed["memory bandwidth"]
    (True, '400 GB/s')
    """
    texts = {
        name: next((text for text, ids in rows.items() if gpu.id in ids.split()), None)
        for name, rows in read_table("usual_figures.toml")["figures"].items()
    }
    assumed: dict[str, str] = {}
    for figure, section, field, name in (
        ("memory_bandwidth", "memory", "bandwidth", "memory bandwidth"),
        ("link_bandwidth", "interconnect", "bandwidth", "link bandwidth"),
        ("link_domain", "interconnect", "domain", "GPUs on one link"),
    ):
        part, text = getattr(gpu, section), texts[figure]
        if getattr(part, field) is None and text:
            part = msgspec.structs.replace(part, **{field: Quantity(text, (ASSUMED,))})
            gpu, assumed[name] = msgspec.structs.replace(gpu, **{section: part}), text
    if gpu.peaks.bf16 is None and gpu.peaks.fp16 is None and (texts["half"] or gpu.peaks.fp32):
        half = Quantity(texts["half"], (ASSUMED,)) if texts["half"] else gpu.peaks.fp32
        gpu = msgspec.structs.replace(gpu, peaks=msgspec.structs.replace(gpu.peaks, bf16=half, fp16=half))
        assumed["peak in 16 bits"] = half.text if half is not None else ""
    return gpu, assumed
