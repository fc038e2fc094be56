"""Peaks in the headers of ms-swift's scripts beside what is predicted: whole GiB, of a card as the driver shows it.

    python -m posttrain.swift RUNS.csv

writes `tests/data/posttrain/swift.csv`: rows of ms-swift (github.com/modelscope/ms-swift, examples, Apache-2.0) as jobs of
`loadgauge estimate`. A script states the longest sequence that it allows, not how long those of its data are. Where it packs
sequences they fill it, a pair's two together (source: ms-swift, `template/base.py`, `length` is their sum); elsewhere they are
somewhere between `SHORT` and it. So a row has a lower end with the shortest and an upper end with the longest, and is inside where
the printed number lies between them. Vision towers are not in the estimate.
"""

from __future__ import annotations

import csv
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from loadgauge.core.base.units import GIB
from loadgauge.core.command_line.options.options import parse
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.training.tasks import TASKS as TASKS_OF
from loadgauge.core.post_training.memory import memory
from loadgauge.core.resolve.posttrain import resolve_posttrain

OUT = Path(__file__).parents[2] / "tests" / "data" / "posttrain" / "swift.csv"
COLUMNS = ("id", "model", "flags", "packed", "peak_gib", "where")
MODELS = {
    "Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b", "Qwen3-4B-Instruct-2507": "qwen3-4b", "Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "Qwen2.5-3B-Instruct": "qwen2.5-3b", "Qwen2.5-7B": "qwen2.5-7b", "Qwen2.5-14B-Instruct": "qwen2.5-14b",
    "Meta-Llama-3.1-8B-Instruct": "llama-3.1-8b", "Skywork-Reward-Llama-3.1-8B-v0.2": "llama-3.1-8b",
    "Qwen2.5-VL-7B-Instruct": "qwen2.5-vl-7b", "Qwen2.5-VL-3B-Instruct": "qwen2.5-vl-3b",
    "Qwen3-VL-30B-A3B-Instruct": "qwen3-vl-30b-a3b",
}  # fmt: skip
"""Models of rows and of their teachers and rewards, and those of the catalogue; others have none."""
TASKS = {"DPO": "dpo", "KTO": "kto", "RM": "rm", "SIMPO": "simpo", "GKD": "gkd", "PPO": "ppo"}
SHORT = 256
"""Tokens of a short pair of chat: what is taken for the shortest longest sequence of a micro-batch."""


class Row(msgspec.Struct, frozen=True):
    """A row's printed peak, and the ends of the range [GiB]: of the shortest sequences, and of the longest."""

    id: str
    model: str
    flags: str
    packed: bool
    measured: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        """Whether the printed number, rounded as it is, lies in the range."""
        return self.low - 0.5 <= self.measured <= self.high + 0.5


def job(row: dict[str, str]) -> Job | None:
    """Return the job of a measured row; None where its model, or the one beside it, is not in the catalogue or not named."""
    beside = re.match(r"(teacher|reward) (.+)", row["critic_reward"])
    named = MODELS.get(beside[2]) if beside else None
    if (
        row["model"] not in MODELS
        or not row["peak_gib"]
        or row["algorithm"] not in TASKS
        or bool(beside) != bool(named)
    ):
        return None
    megatron = row["train_engine"].startswith("Megatron")
    task = TASKS[row["algorithm"]]
    gpus, tp, most = int(row["gpus"]), int(row["train_tp"]), int(row["seq_max"] or 0)
    if not most or row["train_cp"] != "1":
        return None
    zero = 1 if megatron else int(row["train_sharding"].removeprefix("zero") or 0)
    if task == "ppo" and row["tuned"] != "full":
        return None  # its critic has adapters as well, which is no job here
    batch = int(row["micro_batch"])
    if "packing true" in row["note"]:
        most //= TASKS_OF[task].rows
    ranks = gpus // (tp * int(row["train_pp"]))
    rank = re.search(r"r=(\d+)", row["tuned"])
    answers = int(row["response_max"] or 0)
    on_policy = task == "ppo"
    return Job(
        MODELS[row["model"]], task=task, gpu="a100-sxm4-80gb", gpus=gpus, tp=tp, pp=int(row["train_pp"]),
        ep=int(row["train_ep"]) if int(row["train_ep"]) > 1 else None, zero=zero, sequence_parallel=True if tp > 1 else None,
        framework="megatron" if megatron else "deepspeed" if zero else "huggingface", precision="bf16", recompute="full",
        offload="optimizer" if "optimizer" in row["offload"] else None, micro_batch=batch,
        global_batch=int(row["mini_batch"]) if row["mini_batch"] else batch * ranks,
        lora_rank=int(rank[1]) if rank else None, lora_targets="all" if rank else None,
        teacher=named if beside and beside[1] == "teacher" else None, critic=named if on_policy else None,
        reward_model=named if on_policy else None, seq_len=None if on_policy else most,
        prompts=batch * ranks if on_policy else None, samples=1 if on_policy else None,
        prompt_len=most - answers if on_policy else None, answers=str(answers) if on_policy else None,
        rollout="hf" if on_policy else None,
    )  # fmt: skip


def shorter(whole: Job) -> Job:
    """The job with the shortest sequences."""
    if whole.prompt_len is not None:
        return whole.replace(prompt_len=SHORT, answers=str(min(SHORT, int(whole.answers or SHORT))))
    return whole.replace(seq_len=SHORT)


def rows(packed: bool = False) -> Iterator[Row]:
    """Yield every row with its range. packed: those alone whose sequences fill the longest"""
    with OUT.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if packed and not row["packed"]:
                continue
            whole = parse([row["model"], *shlex.split(row["flags"])])
            ends = [whole if row["packed"] else shorter(whole), whole]
            found = [memory(resolve_posttrain(one)[0]).phases for one in ends]
            low = max(phase.device.low for phase in found[0])
            high = max(phase.device.high for phase in found[1])
            yield Row(
                row["id"],
                row["model"],
                row["flags"],
                bool(row["packed"]),
                float(row["peak_gib"]),
                low / GIB,
                high / GIB,
            )


def main() -> None:
    """Write the table."""
    with open(sys.argv[1], encoding="utf-8") as file, OUT.open("w", encoding="utf-8", newline="") as into:
        out = csv.DictWriter(into, COLUMNS, lineterminator="\n")
        out.writeheader()
        for row in csv.DictReader(file):
            made = job(row) if row["source"] == "ms-swift" else None
            if made is not None:
                packed = "yes" if "packing true" in row["note"] else ""
                out.writerow({
                    "id": row["id"], "model": made.model, "flags": made.flags(), "packed": packed, "peak_gib": row["peak_gib"],
                    "where": row["path"],
                })  # fmt: skip


if __name__ == "__main__":
    main()
