"""Counters of memory in sources' words."""

from typing import Any

from loadgauge.evidence.published.models import Inexpressible
from loadgauge.evidence.published.source_rows import SourceRow
from loadgauge.evidence.validate.counters import Counter


def counter(run: SourceRow) -> Counter:
    """The counter of a row's peak memory; raises `Inexpressible` where it is not of one GPU.

    >>> counter(SourceRow(id="x", memory_kind="allocated (torch max_memory_allocated; last rank = last pipeline stage)"))
    Counter(kind='allocated', last_stage=True)
    >>> counter(SourceRow(id="x", memory_kind="nvidia-smi snapshot (integer GB)")).kind
    'device'
    """
    text = run.memory_kind.lower()
    if "not per gpu" in text:
        raise Inexpressible(f"memory_kind: {run.memory_kind!r} is not the memory of one GPU")
    words = {"allocated": "allocated", "active": "active", "reserved": "reserved", "nvidia-smi": "device"}
    kind: Any = next((kind for word, kind in words.items() if text.startswith(word)), "unknown")
    if (
        "default metric is peak active" in text and kind != "allocated"
    ):  # what the tool prints where nothing else is asked for
        kind = "active"
    return Counter(kind, "last rank" in text)
