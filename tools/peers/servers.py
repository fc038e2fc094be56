"""Asks aiconfigurator and loadgauge the same questions about servers, one by one, and writes both beside what was measured.

    python tools/peers/servers.py        # into docs/peers.md; aiconfigurator in an environment of its own (.peers), ten minutes;
                                         # its answers to the same questions are kept there

A question is a measured point (`data/serving.csv.gz`; of each engine, model and GPU so many): time of a token and to the first
one under a fixed number of requests. aiconfigurator answers by `cli_estimate` in its aggregated mode, tables only
(`database_mode="SILICON"`), with the newest tables of the engine; a question without a table is counted. Seconds are those of one
answer in a running interpreter, and of a fresh command.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import numpy as np

from loadgauge.core.serving.decode import serve
from loadgauge.evidence.validate.serving import Point, points, server, slots

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "peers.md"
FENCE = "<!-- servers: made by tools/peers/servers.py -->", "<!-- servers: end -->"
PACKAGE = "aiconfigurator==0.12.0"
MODELS = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B", "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "deepseek-v3": "deepseek-ai/DeepSeek-R1", "minimax-m2": "MiniMaxAI/MiniMax-M2.5", "kimi-k2": "moonshotai/Kimi-K2.5",
    "qwen3.5-397b-a17b": "Qwen/Qwen3.5-397B-A17B",
}  # fmt: skip
SYSTEMS = {
    "h100-sxm5-80gb": "h100_sxm", "h200-sxm-141gb": "h200_sxm", "b200-sxm-180gb": "b200_sxm", "b300-sxm-288gb": "b300_sxm",
}  # fmt: skip
QUANTISED = {"bf16": ("bfloat16", "bfloat16"), "fp8": ("fp8_block", "fp8_block"), "nvfp4": ("nvfp4", "nvfp4")}
"""Names of weights' formats in products of all tokens, and in those of experts; of dense models `fp8`."""
NEAR = 0.1
EACH = 4
"""Questions of an engine, a model and a GPU."""
ASK = """
import json, logging, sys, time, warnings
warnings.filterwarnings("ignore"); logging.disable(logging.ERROR)
from aiconfigurator.cli.api import cli_estimate
answers = []
for question in json.load(open(sys.argv[1])):
    begin = time.perf_counter()
    try:
        found = cli_estimate(**question)
        answer = {"first": float(found.ttft) / 1e3, "token": float(found.tpot) / 1e3}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {str(error)[:120]}"}
    answers.append(answer | {"seconds": time.perf_counter() - begin})
json.dump(answers, open(sys.argv[2], "w"))
"""


def question(point: Point) -> dict[str, Any]:
    """Return a point as `cli_estimate` takes it."""
    dense, experts = QUANTISED[point.weights]
    mixed = not point.model.startswith("llama")
    words: dict[str, Any] = {
        "model_path": MODELS[point.model], "system_name": SYSTEMS[point.gpu], "backend_name": point.engine, "isl": point.prompt,
        "osl": point.answer, "batch_size": point.asked.batch, "tp_size": point.tp, "attention_dp_size": point.attentions,
        "gemm_quant_mode": dense if mixed or point.weights != "fp8" else "fp8",
        "kvcache_quant_mode": "fp8" if point.asked.cache_format == "fp8" else "bfloat16",
    }  # fmt: skip
    if mixed:
        words |= {
            "moe_quant_mode": experts,
            "moe_ep_size": point.ep,
            "moe_tp_size": max(1, point.asked.replica // point.ep),
        }
    return words


def asked() -> list[Point]:
    """Return the questions: of each engine, model and GPU a few points, spread over lengths and requests."""
    known = (point for point in points() if point.gpu in SYSTEMS and point.weights in QUANTISED)
    by = itertools.groupby(sorted(known, key=kind), kind)
    rows = []
    for _, group in by:
        own = list(group)
        rows += own[:: max(1, len(own) // EACH)][:EACH]
    return rows


def kind(point: Point) -> tuple[str, str, str]:
    """Return what a point is grouped by."""
    return point.engine, point.model, point.gpu


def theirs(rows: list[Point], folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Return aiconfigurator's answers, and the seconds of a fresh command of it."""
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", PACKAGE], check=True)
    questions, answers, asked_now = (
        folder / "questions.json",
        folder / "answers.json",
        json.dumps([question(point) for point in rows]),
    )
    if not answers.exists() or questions.read_text(encoding="utf-8") != asked_now:
        questions.write_text(asked_now, encoding="utf-8")
        _quiet(python, questions, answers)
    single = folder / "question.json"
    single.write_text(json.dumps([question(rows[0])]), encoding="utf-8")
    begin = time.perf_counter()
    _quiet(python, single, folder / "answer.json")
    return json.loads(answers.read_text(encoding="utf-8")), time.perf_counter() - begin


def _quiet(python: Path, questions: Path, answers: Path) -> None:
    command = [str(python), "-c", ASK, str(questions), str(answers)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ours(rows: list[Point]) -> tuple[list[dict[str, float]], float]:
    """Return loadgauge's answers, and the seconds of a fresh command of it."""
    answers = []
    for point in rows:
        begin = time.perf_counter()
        replica = server(point)
        steady = serve(replica, point.asked.batch, point.prompt, point.answer, slots(point, replica), point.launched)
        answers.append({"first": steady.first, "token": steady.token, "seconds": time.perf_counter() - begin})
    point = rows[0]
    words = [
        "estimate", point.model, "--task", "generate", "--server", point.engine, "--gpu", point.gpu,
        "--gpus", str(point.asked.replica),
        "--tp", str(point.tp), "--ep", str(point.ep), "--context", str(point.prompt + point.answer), "--answer", str(point.answer),
        "--batch", str(point.asked.batch), "--weight-format", point.weights, "--json",
    ]  # fmt: skip
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-m", "loadgauge", *words], check=True, stdout=subprocess.DEVNULL)
    return answers, time.perf_counter() - begin


def errors(values: Any, truth: Any) -> str:
    """Median and p90 of an error, as cells."""
    off = abs(values / truth - 1)
    return f"{np.median(off):.0%} | {np.quantile(off, 0.9):.0%}"


def table(
    rows: list[Point], own: list[dict[str, float]], other: list[dict[str, Any]], fresh: tuple[float, float]
) -> str:
    """Return the tables of the page."""
    both = [n for n, answer in enumerate(other) if "error" not in answer]
    lines = [
        f"{len(rows)} measured servers are asked for; aiconfigurator has tables for {len(both)} of them, which are compared.", "",
        "| | loadgauge: median | p90 | aiconfigurator: median | p90 | one beside the other: median | p90 |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    sets = [("all", both)] + [
        (name, [n for n in both if rows[n].engine == name]) for name in ("vllm", "sglang", "trtllm")
    ]
    sets += [(name, [n for n in both if rows[n].model == name]) for name in MODELS]
    # Where its tables describe the server, which nobody but the measurement knows.
    holds = [n for n in both if abs(other[n]["token"] / rows[n].token - 1) < NEAR]
    sets.append((f"aiconfigurator within {NEAR:.0%} of a token", holds))
    for name, chosen in sets:
        if not chosen:
            continue
        for field, word in (("token", "a token"), ("first", "a first token")):
            mine = np.array([own[n][field] for n in chosen])
            their = np.array([other[n][field] for n in chosen])
            truth = np.array([getattr(rows[n], field) for n in chosen])
            lines.append(
                f"| {name} ({len(chosen)}): {word} | {errors(mine, truth)} | {errors(their, truth)} | {errors(mine, their)} |"
            )
    nearer = sum(abs(own[n]["token"] / rows[n].token - 1) < abs(other[n]["token"] / rows[n].token - 1) for n in both)
    quick, slow = (float(np.median([answers[n]["seconds"] for n in both])) for answers in (own, other))
    lines += [
        "",
        f"The time of a token is nearer to the measured one in loadgauge in {nearer} of {len(both)} questions.",
        f"An answer takes loadgauge {quick * 1e3:.0f} ms and aiconfigurator {slow:.1f} s in the median ({slow / quick:.0f} times);",
        f"a fresh command {fresh[0]:.1f} s and {fresh[1]:.1f} s.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Ask both and write the page."""
    rows = asked()
    own, mine = ours(rows)
    other, their = theirs(rows, ROOT / ".peers" / "aiconfigurator")
    for answer in {answer["error"] for answer in other if "error" in answer}:
        print(answer, file=sys.stderr)
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(FENCE[0])[0], text.split(FENCE[1])[1]
    shown = table(rows, own, other, (mine, their))
    PAGE.write_text(f"{before}{FENCE[0]}\n\n{shown}\n\n{FENCE[1]}{after}", encoding="utf-8")
    print(shown)


if __name__ == "__main__":
    main()
