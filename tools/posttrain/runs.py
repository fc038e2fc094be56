"""Measured peaks of rollout and update, as jobs of `loadgauge estimate --task grpo`.

    python -m posttrain.runs RUNS.csv

writes `tests/data/posttrain/agilerl.csv`: rows of AgileRL's profiling (github.com/AgileRL/AgileRL, branch memory/profiling-rig,
commit 0151c660, Apache-2.0), one card, LoRA GRPO beside vLLM. Each row has the model and flags of the run, and the peak of each
phase that the driver showed. The rig's settings: a prompt is a quarter of the context, the engine's largest step is
min(seqs x context, max(context, 8192 x seqs)), adapters are float32 beside a bfloat16 base and its reference is a second set, the
head runs in chunks of 256 MiB of float32 logits, one forward scores policy and reference, weights are on the host meanwhile.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.families.catalogue import find_model

OUT = Path(__file__).parents[2] / "tests" / "data" / "posttrain" / "agilerl.csv"
COLUMNS = ("id", "model", "gpu", "flags", "rollout_gib", "update_gib", "where")
MODELS = {
    "SmolLM2-1.7B-Instruct": "smollm2-1.7b", "OLMoE-1B-7B-0924-Instruct": "olmoe-1b-7b",
    "Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b", "Qwen2.5-1.5B-Instruct": "qwen2.5-1.5b", "Qwen2.5-3B-Instruct": "qwen2.5-3b",
    "Qwen2.5-7B-Instruct": "qwen2.5-7b", "gemma-4-E2B-it": "gemma-4-e2b", "gemma-4-E4B-it": "gemma-4-e4b",
}  # fmt: skip
"""Those of the catalogue."""
CARDS = {"L4": ("l4", "22.03GiB"), "A100-SXM4-40GB": ("a100-sxm4-40gb", "39.49GiB")}
"""The cards, with the memory that the driver reports of them (`device.total_bytes` of the fixtures)."""
TILE = 2**28


def job(row: dict[str, str]) -> Job:
    """Return the job of a measured row."""
    name = MODELS[row["model"]]
    context, sequences = int(row["seq_max"]), int(row["sequences"])
    batch = min(int(row["micro_batch"]), sequences)
    card, memory = CARDS[row["gpu"]]
    share = re.findall(r"utilization ([\d.]+)", row["note"])[0]
    rank = int(re.findall(r"r=(\d+)", row["tuned"])[0])
    rows = max(128, min(4096, TILE // (4 * int(find_model(name).vocab_size))))
    prompt, most = max(context // 4, 8), min(sequences * context, max(context, sequences * 8192))
    return Job(
        name, task="grpo", gpu=card, memory=memory, lora_rank=rank, lora_dtype="float32", precision="bf16-pure",
        lora_targets="all" if "all" in row["tuned"] else "attention", recompute="full", optimizer="adamw-foreach",
        micro_batch=batch, global_batch=batch if sequences % batch == 0 else sequences,
        loss=f"chunked:{max(1, math.ceil(batch * context / rows))}", reference="adapter", logprob_batch=2 * batch,
        prompts=1, samples=sequences, prompt_len=prompt, answers=str(context - prompt), rollout_offload="all",
        rollout=f"vllm:utilization={float(share):.4f},max_num_seqs={sequences},max_batched_tokens={most},sleep=1",
    )  # fmt: skip


def read(path: str) -> Iterator[dict[str, str]]:
    """Yield a row of the output for each run: its two phases are two rows of the input, one after the other."""
    with open(path, encoding="utf-8") as file:
        rows = [
            row for row in csv.DictReader(file)
            if row["source"] == "agilerl" and row["quality"] == "A" and row["model"] in MODELS
        ]  # fmt: skip
    waiting: dict[str, dict[str, str]] = {}
    for row in rows:
        kind = "rollout_gib" if row["peak_phase"].startswith("rollout") else "update_gib"
        words = job(row)
        key = f"{row['path']} {words.flags()}"
        made = waiting.get(key)
        if made is None or kind in made:
            made = waiting[key] = {
                "id": row["id"], "model": words.model, "gpu": row["gpu"], "flags": words.flags(), "where": row["path"],
            }  # fmt: skip
        made[kind] = row["peak_gib"]
        if "rollout_gib" in made and "update_gib" in made:
            yield waiting.pop(key)


def main() -> None:
    """Write the table."""
    with OUT.open("w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        out.writeheader()
        out.writerows(read(sys.argv[1]))


if __name__ == "__main__":
    main()
