"""Counters of memory in sources' words."""

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
    last = "last rank" in text
    if text.startswith(("allocated", "active")):
        return Counter("active" if text.startswith("active") else "allocated", last)
    if "default metric is peak active" in text:
        return Counter("active", last)  # what the tool prints where nothing else is asked for
    if text.startswith("reserved"):
        return Counter("reserved", last)
    if text.startswith("nvidia-smi"):
        return Counter("device", last)
    return Counter("unknown", last)
