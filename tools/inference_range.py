"""Writes `data/inference.toml`: how far measured points of serving lie from what the roofline of inference predicts.

    python tools/inference_range.py silicon_sample.csv

The table is aiconfigurator's (source: aic-silicon): time to first token and per token of servers under a fixed number of requests.
A server takes new prompts while it generates, so a token there takes that of a token alone and, of each prompt, a share: with B
sequences of r generated tokens, B / r of a prompt's pass comes with each step. First tokens wait for others; those of the fewest
requests at once are compared alone. Models with a file in the catalogue, on GPUs with measured operators, in the formats that
are told apart.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.hardware.cluster import cluster
from loadgauge.core.definitions.hardware.hardware import gpu
from loadgauge.core.definitions.serving.inference import Inference
from loadgauge.core.families.catalogue import model
from loadgauge.core.serving.passes import split
from loadgauge.core.serving.time import Clock

MODELS = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b", "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b", "MiniMaxAI/MiniMax-M2.5": "minimax-m2",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
}  # fmt: skip
GPUS = {"H100-SXM-80GB": "h100-sxm5-80gb", "H200-SXM-141GB": "h200-sxm-141gb", "B200": "b200-sxm-180gb"}
FORMATS = {"fp8": "fp8", "bf16": "bf16", "": "bf16"}
SOURCE = "aiconfigurator, silicon_sample.csv, commit 095f58a51c4c"
FEW = 4
"""Requests at once with which a first token hardly waits."""
OUT = Path(__file__).parents[1] / "src" / "loadgauge" / "data" / "inference.toml"


class Point(msgspec.Struct, frozen=True):
    """A measured point over its prediction: of a token, and of a first token where few requests wait."""

    group: tuple[str, ...]
    token: float
    first: float | None


def read(path: str) -> Iterator[Point]:
    """Yield the points of a table that can be predicted."""
    known: dict[tuple[object, ...], tuple[float, float] | None] = {}
    with open(path, encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["model"] not in MODELS or row["gpu"] not in GPUS or row["precision"] not in FORMATS:
                continue
            tp, ep = int(row["tp"]), int(row["moe_ep"] or 1)
            if int(row["attention_dp"] or 1) != 1 or int(row["pp"]) != 1 or tp > 8:
                continue
            batch, prompt, answer = (int(row[name]) for name in ("batch_per_attention_rank", "prompt", "response"))
            key = (row["model"], row["gpu"], row["precision"], tp, ep, batch, prompt, answer)
            if key not in known:
                known[key] = _predicted(row, tp, ep, batch, prompt, answer)
            found = known[key]
            if found is not None:
                token, one = found
                yield Point(
                    (row["model"], row["gpu"], row["engine"]),
                    float(row["tpot_ms"]) / 1e3 / (token + batch / answer * one),
                    float(row["ttft_ms"]) / 1e3 / one if batch <= FEW else None,
                )


def _predicted(
    row: dict[str, str], tp: int, ep: int, batch: int, prompt: int, answer: int
) -> tuple[float, float] | None:
    """Seconds of a token in the middle of an answer, and of one prompt."""
    spec, card = model(MODELS[row["model"]]), gpu(GPUS[row["gpu"]])
    asked = Inference(
        task="generate", context=prompt + answer, answer=answer, batch=batch, tp=tp, ep=ep,
        weight_format=FORMATS[row["precision"]],
    )  # fmt: skip
    alone = msgspec.structs.replace(asked, batch=1)
    machines = cluster(card, asked.replica)
    try:
        token = Clock(spec, asked, split(spec, asked), machines).token(prompt + answer / 2).seconds
        return token, Clock(spec, alone, split(spec, alone), machines).prompts().seconds
    except Error as error:
        print(row["id"], error, file=sys.stderr)
        return None


def tenths(values: list[float]) -> tuple[float, float]:
    """Return what 10 % and 90 % of the values lie below."""
    cuts = statistics.quantiles(values, n=10)
    return cuts[0], cuts[-1]


def main(path: str) -> None:
    """Print the points by group, and write the file."""
    points = list(read(path))
    for group in sorted({point.group for point in points}):
        tokens = [point.token for point in points if point.group == group]
        print(*group, len(tokens), *(f"{value:.2f}" for value in (*tenths(tokens), statistics.median(tokens))))
    (token_low, token_high), firsts = (
        tenths([point.token for point in points]),
        [point.first for point in points if point.first is not None],
    )
    first_low, first_high = tenths(firsts)
    text = f"""# Written by tools/inference_range.py: measured over predicted, what 10 % and 90 % of the points lie below.
first_low = {first_low:.2f}
first_high = {first_high:.2f}
token_low = {token_low:.2f}
token_high = {token_high:.2f}
points = {len(points)}
source = "80 % of {len(points):,} measured points of servers, nothing fitted ({SOURCE})"
"""
    OUT.write_text(text, encoding="utf-8")
    print(
        text,
        len(firsts),
        "first tokens; medians",
        statistics.median(firsts),
        statistics.median(p.token for p in points),
    )


if __name__ == "__main__":
    main(sys.argv[1])
