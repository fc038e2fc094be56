"""Writes `docs/rollout.md`: published GRPO steps beside what is predicted, each source's by the other's factor (`make rollout`).

`runs.csv` has what the pages print (sources: nemo-rl, docs/about/performance-summary.md, commit cff17f8; verl,
docs/advance/v1_async_trainer.md; both Apache-2.0). What they do not print is read from the recipes of the same names (nemo-rl,
examples/configs/recipes/llm/performance): prompts and samples, layers of stages, recomputation, micro-batches, share of the card.
The lengths of answers are not published: an exponential law cut at the longest, with the mean that is printed; prompts of `PROMPT`.
"""

from __future__ import annotations

import csv
import functools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from engines.page import table
from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.post_training.memory import memory
from loadgauge.core.post_training.step import HIGH, LOW, SOFTWARE, StepTime, step_time
from loadgauge.core.resolve.posttrain import resolve_posttrain

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "rollout.md"
PROMPT = {"nemo-rl": 150, "verl": 200}
"""Tokens of a prompt of mathematics, assumed (OpenMathInstruct-2; DAPO-Math)."""


class Recipe(msgspec.Struct, frozen=True):
    """What a recipe states: prompts, samples, recomputation, sequences of a forward of log-probs, and the size of an update."""

    prompts: int
    samples: int
    recompute: bool
    logprobs: int
    update: int = 512
    reference: str = "model"


RECIPES = {
    "llama-3.1-8b": Recipe(64, 32, True, 2), "deepseek-v3": Recipe(32, 16, True, 1), "qwen3-235b-a22b": Recipe(16, 32, True, 1),
    "qwen3-30b-a3b": Recipe(64, 32, False, 4), "qwen3-32b": Recipe(64, 32, False, 4),
    "qwen3.5-35b-a3b": Recipe(64, 8, True, 1, 128, "none"),
}  # fmt: skip
STAGES = {
    ("deepseek-v3", 16): ",".join(["3", *["4"] * 14, "2"]), ("deepseek-v3", 8): ",".join(["7", *["8"] * 6, "6"]),
    ("qwen3-235b-a22b", 8): ",".join(["11", *["12"] * 6, "11"]), ("qwen3-235b-a22b", 4): "23,24,24,23",
}  # fmt: skip


def law(mean: float, most: int) -> str:
    """Answers by an exponential law cut at the longest, whose mean is the one that is printed."""
    low, high = 1.0, 1e9
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if middle * -math.expm1(-most / middle) < mean else (low, middle)
    return f"exp:{low:.0f},{most}"


def job(row: dict[str, str]) -> Job:
    """A row as it would be asked for."""
    recipe, prompt, gpus = RECIPES[row["model"]], PROMPT[row["source"]], int(row["gpus"])
    colocated = row["placement"] == "colocated"
    share = "utilization=0.6,sleep=1" if colocated else "utilization=0.8"
    few = row["precision"] == "fp8"
    model = row["model"] if row["model"] != "qwen3.5-35b-a3b" else str(HERE / "qwen3.5-35b-a3b.json")
    # The layers of the hybrid over cp are not modelled: its ranks are dp, which share the same tokens.
    cp = 1 if row["model"].startswith("qwen3.5") else int(row["cp"])
    tp, ep = int(row["tp"]), int(row["ep"])
    return Job(
        model, task="grpo", gpu=row["gpu"], gpus=gpus, tp=tp, pp=int(row["pp"]), cp=cp, ep=ep if ep > 1 else None,
        sequence_parallel=True if tp > 1 else None, stage_layers=STAGES.get((row["model"], int(row["pp"]))),
        prompts=recipe.prompts, samples=recipe.samples, prompt_len=prompt,
        answers=law(float(row["mean_seq"]) - prompt, int(row["seq_max"]) - prompt),
        rollout=f"vllm:tp={row['rollout_tp']},{share}{',weights=fp8' if few else ''}", framework="megatron",
        global_batch=recipe.update, micro_batch=1, recompute="full" if recipe.recompute else None,
        staleness=int(row["staleness"]) or None, placement=row["placement"], logprob_batch=recipe.logprobs, zero=1,
        precision="fp8" if few else None, reference=recipe.reference,
    )  # fmt: skip


def _of(model: str, row: dict[str, str]) -> bool:
    return row["model"] == model


def timed(row: dict[str, str]) -> tuple[StepTime, StepTime] | str:
    """The step with and without the factor of software; or why there is none."""
    try:
        run, _ = resolve_posttrain(job(row))
        pool = memory(run).engine
        assert pool is not None
        return step_time(run, pool.pool), step_time(run, pool.pool, software=1.0)
    except Error as error:
        return str(error)


Scored = tuple[dict[str, str], float, float]
"""A row, its step, and what is predicted with the other source's factor [s]."""


def scored() -> tuple[list[Scored], dict[str, float], Counter[str]]:
    """Return the rows with their predictions, the factor of each source, and why rows have none."""
    with (HERE / "runs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found, refused = [], Counter[str]()
    for row in rows:
        times = timed(row)
        if isinstance(times, str):
            refused[times] += 1
            continue
        moved = next(one.seconds for one in times[1].phases if one.name == "weight sync")
        found.append((row, float(row["step"]), times[1].step, moved))
    factors = {
        source: float(
            np.median([(step - moved) / (bare - moved) for row, step, bare, moved in found if row["source"] == source])
        )
        for source in PROMPT
    }
    other = {"nemo-rl": factors["verl"], "verl": factors["nemo-rl"]}
    return (
        [(row, step, other[row["source"]] * (bare - moved) + moved) for row, step, bare, moved in found],
        factors,
        refused,
    )


def main() -> None:
    """Score all rows and write the page."""
    rows, factors, refused = scored()

    def line(name: str, chosen: list[Scored]) -> list[str]:
        ratio = np.array([step / predicted for _, step, predicted in chosen])
        off = abs(1 / ratio - 1)
        inside = np.mean((ratio > LOW) & (ratio < HIGH))
        return [
            name, str(len(chosen)), f"{np.median(off):.1%}", f"{np.quantile(off, 0.9):.1%}", f"{np.median(1 / ratio) - 1:+.1%}",
            f"{inside:.0%}",
        ]  # fmt: skip

    kinds: dict[str, Callable[[dict[str, str]], bool]] = {
        "all": lambda row: True, "nemo-rl": lambda row: row["source"] == "nemo-rl", "verl": lambda row: row["source"] == "verl",
        "colocated": lambda row: row["placement"] == "colocated", "split": lambda row: row["placement"] != "colocated",
        "H100": lambda row: row["gpu"].startswith("h100"), "GB200": lambda row: row["gpu"].startswith("gb200"),
        **{name: functools.partial(_of, name) for name in RECIPES},
    }  # fmt: skip
    lines = [line(name, [one for one in rows if keep(one[0])]) for name, keep in kinds.items()]
    ratios = np.array([step / predicted for _, step, predicted in rows])
    print(factors, np.quantile(ratios, (0.1, 0.9)), dict(refused), *lines, sep="\n")
    each = [
        [row["where"].split(",")[0], row["model"], row["gpu"], row["gpus"], row["placement"], row["staleness"], f"{step:.0f}",
         f"{predicted:.0f}", f"{predicted / step - 1:+.0%}"]
        for row, step, predicted in rows
    ]  # fmt: skip
    PAGE.write_text(
        PROSE.format(
            rows=len(rows), sources=", ".join(f"{name} {value:.2f}" for name, value in factors.items()), used=SOFTWARE, low=LOW,
            high=HIGH, refused=sum(refused.values()),
            total=table(("", "steps", "median", "p90", "bias", "in range"), lines),
            each=table(("from", "model", "GPU", "GPUs", "placement", "updates old", "step, s", "predicted", ""), each),
        ),
        encoding="utf-8",
    )  # fmt: skip


PROSE = """# Time of a step with a rollout, measured

{rows} published GRPO steps (NeMo-RL, docs/about/performance-summary.md, commit cff17f8; verl, docs/advance/v1_async_trainer.md)
beside what `estimate --task grpo` predicts. `make rollout` writes this page.

{total}

**How.** Answers take what an engine's steps take ([time of generation](decode.md)) while fewer and fewer run; log-probs,
reference and update take what training takes, over the tokens that there are. Over those, one factor for what software adds:
{sources} in the middle of each source's steps; every step here is predicted with the *other* source's factor, and a user's with
{used}. The range, {low} to {high} of the step, is a little wider than where 80 % of these steps lie.

**What is assumed.** Neither page prints how long answers are beyond their mean and their limit: an exponential law with that
mean, cut at the limit. Prompts, samples, recomputation and stages are those of the recipes. verl's one step that can be
predicted has its layers over cp taken as data-parallel; its asynchronous steps do not state their staleness and are left out. A
colocated step also changes sides for 33 s (of 32e9 parameters or more; SkyRL). {refused} rows are no layouts here.

**What is not known.** Answers of other laws with the same mean; environments and rewards on the host; a release in which a
phase got slower or faster (NeMo-RL's v0.4, v0.5 and v0.6 differ by up to 1.6 times in the same recipe).

**GB200.** Its steps are a quarter longer than predicted, H100's are not. That is so with one GPU a replica and with 32, with and
without a change of sides, and most where the prediction halves H100's: what does not get faster with the GPU (the host of a
Grace processor, an engine's start, the longest answer's steps) is a larger part there, and no measured server on a GB200 tells
how large. Nothing is fitted to these steps. A rack's GPUs are joined by 400 Gbit/s each to others', as in NVIDIA's own.

{each}
"""

if __name__ == "__main__":
    main()
