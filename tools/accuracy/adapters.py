"""Peaks of LoRA training on one card that AgileRL measured, beside the estimate; nothing is fitted to them.

    PYTHONPATH=tools python -m accuracy.adapters            # a line for each model, and for all
    PYTHONPATH=tools python -m accuracy.adapters --rows     # a line for each run

The runs (`published_runs/raw/agilerl.csv`) update a policy by GRPO with PEFT's LoRA on transformers, on an L4 or an A100. What
is counted is the whole card by NVML. Of each run its configuration is read, and the bytes that were on the card before the
window began (the CUDA context and a sleeping vLLM), which are not the trainer's. AgileRL's trainer differs from Trainer in what
its own sources say: adapters are float32 beside 16-bit weights, without autocast; a second set of adapters is the reference
(4 bytes a parameter); log-probabilities come in tiles of float32 logits, as many rows as fit 256 MiB, and a tile is held twice;
a micro-batch has no more sequences than the group, and the gradients of a group's micro-batches are summed before the step.
Runs on a 4-bit base are left out, and models that the catalogue does not have.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import msgspec

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from loadgauge import estimate
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.units import GIB
from loadgauge.core.estimate.memory.phases import Phase
from loadgauge.core.families.catalogue import find_model

TABLE = Path(__file__).parents[1] / "published_runs" / "raw" / "agilerl.csv"
TILE, FEWEST, MOST = 2**28, 128, 4096
"""Bytes of float32 logits of a tile, and how many rows one has (AgileRL's `agilerl/memory/formulas.py`, `resolve_chunk_rows`,
which says too that the tile is held twice)."""


class Peak(msgspec.Struct, frozen=True):
    """One run. measured, predicted: bytes on the card at the peak of the update; quality: A, or B where AgileRL marks it as
    not yet validated."""

    id: str
    model: str
    quality: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def peaks(table: Path = TABLE) -> Iterator[Peak]:
    """Yield the runs of a table that can be predicted."""
    with table.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            before = re.search(r"before the window ([\d.]+) GiB", row["note"])
            if before is None or "nf4" in row["tuned"]:
                continue
            try:
                vocabulary = int(find_model(row["model"]).vocab_size)
            except ConfigError:
                continue
            rank = re.search(r"r=(\d+)", row["tuned"])
            assert rank is not None
            group, length = int(row["sequences"]), int(row["seq_max"])
            sequences = min(int(row["micro_batch"]), group)
            result = estimate(
                row["model"], framework="huggingface", precision="bf16-pure", optimizer="adamw-foreach",
                lora_rank=int(rank[1]), lora_targets="all" if "all-linear" in row["tuned"] else "attention",
                lora_dtype="float32", recompute="full", micro_batch=sequences, global_batch=group, seq_len=length,
                loss="chunked:4096",  # all but the tiles
            )  # fmt: skip
            moments = result.memory.moments
            rows = min(max(FEWEST, min(MOST, TILE // (4 * vocabulary))), sequences * length)
            tiles = 2 * 4 * rows * vocabulary
            own = max(
                float(moment.total - moment.parts["outside"]) + (tiles if moment.phase is Phase.LOSS else 0)
                for moment in moments
            )
            reference = float(moments[-1].parts["optimizer"]) / 2  # of AdamW's two float32 moments one
            measured = float(row["peak_gib"]) * GIB
            yield Peak(row["id"], row["model"], row["quality"], measured, own + reference + float(before[1]) * GIB)


def table_of(found: list[Peak]) -> str:
    """The errors by model, and of all."""
    lines = [f"{'model':<28}{'runs':>5}{'mean':>8}{'worst':>9}{'bias':>9}"]
    models = dict.fromkeys(peak.model for peak in found)
    for name in (*models, "all"):
        errors = [peak.error for peak in found if name in (peak.model, "all")]
        worst = max(errors, key=abs)
        lines.append(f"{name:<28}{len(errors):>5}{mean(map(abs, errors)):>8.1%}{worst:>+9.1%}{mean(errors):>+9.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    every = list(peaks())
    for quality in "AB":
        chosen = [peak for peak in every if peak.quality == quality]
        print(f"quality {quality}\n{table_of(chosen)}\n")
        if "--rows" in sys.argv:
            print(*(f"{peak.id}  {peak.model:<28}{peak.error:+.1%}" for peak in chosen), sep="\n")
