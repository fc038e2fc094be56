"""Writes `data/serving.csv`, measured points of servers, from a table: `python -m engines.convert silicon_sample.csv`.

aiconfigurator's table (Apache-2.0) states time to first token and time of a token under a fixed number of requests. Its columns of
ranks are products where tensor and expert parallelism share the same GPUs (tp8_ep8 on 8 GPUs is 64); the number of GPUs is then
read from the name of the row, or taken as the root. Rows that are equal but for their names are one. Rows whose ranks are those of
several servers (`several`) are left out. What the launch of a server says of its queue is joined from `launches.toml`.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import sys
import tomllib
from pathlib import Path

OUT = Path(__file__).parents[2] / "src" / "loadgauge" / "data" / "serving.csv.gz"
MODELS = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b", "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b", "MiniMaxAI/MiniMax-M2.5": "minimax-m2",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3", "nvidia/DeepSeek-R1-NVFP4": "deepseek-v3",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-v3", "moonshotai/Kimi-K2.5": "kimi-k2",
    "Qwen/Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
}  # fmt: skip
"""Checkpoints, and the model of the catalogue with the same layers."""
GPUS = {
    "H100-SXM-80GB": "h100-sxm5-80gb", "H200-SXM-141GB": "h200-sxm-141gb", "B200": "b200-sxm-180gb",
    "B300": "b300-sxm-288gb", "GB200": "gb200-nvl72",
}  # fmt: skip
FORMATS = {"fp8": "fp8", "fp4": "nvfp4", "int4": "gptq", "bf16": "bf16", "": "bf16"}
COLUMNS = (
    "engine",
    "model",
    "gpu",
    "weights",
    "prompt",
    "answer",
    "requests",
    "tp",
    "ep",
    "attentions",
    "options",
    "first_ms",
    "token_ms",
)


def layout(row: dict[str, str]) -> tuple[int, int, int]:
    """Return tp, ep and the groups of ranks with batches of their own."""
    tp, apart, ep = int(row["tp"]), int(row["attention_dp"] or 1), int(row["moe_ep"])
    named = re.search(r"tp(\d+)(?:_0)?_ep(\d+)", row["id"])
    if named:
        gpus, ep = max(int(named[1]), int(named[2])), int(named[2])
    elif tp == int(row["moe_tp"]) * ep and int(row["moe_tp"]) == ep > 2:
        gpus = ep
    else:
        gpus, ep = tp, tp if ep > 1 else 1
    alone = row["attention_dp"] == "" and row["batch_per_attention_rank"] != row["concurrency"]
    return (1, gpus, gpus) if apart > 1 or alone else (gpus, ep, 1)


def several(row: dict[str, str]) -> bool:
    """Whether the ranks are the GPUs of servers that read prompts and of others that generate, counted together.

    Of a GB200's rack the table states one tensor-parallel group of 12, 20, 24, 28, 36, 40, 48, 52, 64 or 72 GPUs without expert
    parallelism: numbers that share no heads of the model. At 72 a token takes the same 32 ms under 128 and 4,096 requests.
    """
    return row["gpu"] == "GB200" and row["tp"] == row["moe_tp"] and int(row["tp"]) > 8


def launched(point: dict[str, str]) -> str:
    """Return the options of a server's launch; points of another benchmark, whose lengths are round thousands, have none."""
    rows = tomllib.loads((Path(__file__).parent / "launches.toml").read_text(encoding="utf-8"))["launch"]
    for row in rows:
        agrees = (
            value[0] <= int(point[name]) <= value[1] if isinstance(value, list) else point[name] == value
            for name, value in row.items()
            if name != "options"
        )
        if all(agrees):
            return str(row["options"])
    return ""


def main(path: str) -> None:
    """Convert a table."""
    found: dict[tuple[str, ...], None] = {}
    apart = 0
    with open(path, encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not row["concurrency"]:
                continue
            if several(row):
                apart += 1
                continue
            tp, ep, attentions = layout(row)
            values = (
                row["engine"], MODELS[row["model"]], GPUS[row["gpu"]], FORMATS[row["precision"]], row["prompt"],
                row["response"], row["concurrency"], str(tp), str(ep), str(attentions),
            )  # fmt: skip
            options = (
                ""
                if int(row["prompt"]) % 1000 == 0
                else launched(dict(zip(COLUMNS, values, strict=False)) | {"version": row["engine_version"]})
            )
            found[*values, options, row["ttft_ms"], row["tpot_ms"]] = None
    with gzip.GzipFile(OUT, "wb", mtime=0) as packed, io.TextIOWrapper(packed, "utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(sorted(found))
    print(f"{len(found):,} points; {apart:,} rows of several servers")


if __name__ == "__main__":
    main(sys.argv[1])
