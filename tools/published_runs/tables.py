"""The tables in `raw`."""

from __future__ import annotations

from pathlib import Path

from loadgauge.evidence.published.source_rows import SourceRow, read, read_memory

RAW = Path(__file__).with_name("raw")


def published() -> tuple[SourceRow, ...]:
    """The rows of all files in `raw`, in the order of the package's."""
    return (*read(RAW / "throughput.csv").rows, *read_memory(RAW / "memory.csv").rows)
