"""Verdicts on verl's table of minimum resources (`minimum.csv`): every row of it ran, so that none may be said not to fit.

The table is docs/perf/device_tuning.rst of volcengine/verl, commit b178a3cd56f5 (Apache-2.0); settings are those of the script that
each row names, else verl's defaults of its time (float32 weights, vLLM's 1,024 sequences). What scripts state of all GPUs together
(`ppo_micro_batch_size`) is divided as verl's workers do. Scripts say how long prompts and answers may be, not how long those of
their data are. So there are two readings: every answer is the longest, an upper end; and answers of any length up to it are as
likely (`uniform:`), which is what is left where only the bounds are known. Prompts are the longest in both.
"""

from __future__ import annotations

import csv
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec

from loadgauge.core.base.units import GIB
from loadgauge.core.command_line.options.options import parse
from loadgauge.core.post_training.memory import memory
from loadgauge.core.resolve.posttrain import resolve_posttrain

ROWS = Path(__file__).with_name("minimum.csv")


class Row(msgspec.Struct, frozen=True):
    """A row and what is said of it. low, total, high: of the phase whose upper end is the highest; capacity: of the card [bytes]"""

    id: str
    model: str
    gpu: str
    gpus: int
    adapters: bool
    phase: str
    low: float
    total: float
    high: float
    capacity: float
    verdict: str

    @property
    def right(self) -> bool:
        """Whether it is not said to be impossible."""
        return self.verdict != "does not fit"

    def heading(self) -> str:
        """What it is of."""
        what = "LoRA" if self.adapters else "all weights"
        return f"{self.model} | {what} | {self.gpus} x {self.gpu} | {self.capacity / GIB:.1f}"

    def cells(self) -> str:
        """The most of a phase and its range, in GiB, and the verdict."""
        return f"{self.total / GIB:.1f} | {self.low / GIB:.1f} - {self.high / GIB:.1f} | {self.verdict}"


def verdicts(law: str = "") -> Iterator[Row]:
    """Yield every row's verdict. law: of the answers, up to the longest that the script allows; all are the longest without one"""
    with ROWS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        job = parse([row["model"], *shlex.split(row["flags"]), "--gpu", row["gpu"]])
        job = job.replace(answers=f"{law}{job.answers}")
        found = memory(resolve_posttrain(job)[0])
        phase = found.decisive
        yield Row(
            row["id"], row["model"], row["gpu"], job.gpus or 1, bool(job.lora_rank), phase.name, phase.low, phase.total,
            phase.high, found.capacity or 0.0, found.verdict,
        )  # fmt: skip
