"""The tables in `raw`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadgauge.evidence.published.source_rows import SourceRow, SourceRows, read

RAW = Path(__file__).with_name("raw")
MEASURED = (
    *("step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "hw_tflops_per_gpu", "mfu", "hfu"),
    "peak_memory_gib",
)
"""What was measured. None of it may decide how a row is expressed."""


def published() -> tuple[SourceRow, ...]:
    """The rows of all files in `raw`, in the order of the package's."""
    return (*read(RAW / "throughput.csv").rows, *read_memory(RAW / "memory.csv").rows)


def read_memory(path: Path) -> SourceRows:
    """The rows of a CSV of memory: a run that reports its speed too is in the file of speed, where that counts."""
    table = read(path)
    untimed = dict.fromkeys(name for name in MEASURED if name != "peak_memory_gib")
    return msgspec.structs.replace(table, rows=tuple(msgspec.structs.replace(row, **untimed) for row in table.rows))
