"""Speed of the list of operations and of an estimate. Prints a table and writes it to benchmarks/speed.md with the date.

    python benchmarks/speed.py

Every figure is the median of several runs on one core; the machine and the commit stand in the heading.
"""

from __future__ import annotations

import datetime
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import loadgauge
from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.estimate.estimate import estimate
from loadgauge.core.estimate.schedule.simulate import simulate
from loadgauge.core.families.reference import llama_block, llama_model
from loadgauge.core.layers import View, block_layer
from loadgauge.page.inputs.uploads import Uploads
from loadgauge.page.server.handlers import Question, estimate as answer

LAYOUTS = 1_000_000
SMALL_PAGE = {"model": "llama-3.1-8b", "gpu": "h100-sxm5-80gb", "gpus": "8", "zero": "3", "seq-len": "8192"}
LARGE_PAGE = {
    "model": "deepseek-v3", "gpu": "h800-sxm5-80gb", "gpus": "2048", "pp": "16", "ep": "64", "zero": "1",
    "stage-layers": "4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,1", "schedule": "dualpipe", "global-batch": "15360",
    "seq-len": "4096", "framework": "megatron",
}  # fmt: skip
BLOCK = llama_block(8192.0, 64.0, 8.0, 128.0, 28672.0)


def five_quantities(s: np.ndarray, b: np.ndarray, t: np.ndarray) -> list[object]:
    """Parameters, FLOPs forward and backward, bytes kept and bytes sent of one Llama layer of 70B shape."""
    layer = block_layer(BLOCK, 8192.0, View.of(s, b, tp=t, sequence_parallel=True, kernels=Kernels()))
    return [layer.params, layer.forward_flops, layer.backward_flops, layer.saved(), layer.wire]


def columns() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    choices = {"s": [2048, 4096, 8192, 32768], "b": [1, 2, 4, 8], "t": [1, 2, 4, 8]}
    return {name: rng.choice(np.array(values, float), LAYOUTS) for name, values in choices.items()}


def seconds(run: Callable[[], object], repeats: int = 7) -> tuple[float, float, float]:
    """Median, minimum and maximum wall time of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times), min(times), max(times)


def cold_start(arguments: list[str], repeats: int = 11) -> tuple[float, float, float]:
    """CPU seconds (user + system) of a fresh process."""
    times = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "loadgauge", *arguments], check=False, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(times), min(times), max(times)


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    grid = columns()

    def in_chunks(size: int = 8192) -> None:
        for start in range(0, LAYOUTS, size):
            five_quantities(**{name: column[start : start + size] for name, column in grid.items()})

    def on_an_open_grid() -> None:
        axis = np.arange(1.0, 101.0)
        five_quantities(1024 * axis[:, None, None], axis[None, :, None], axis[None, None, :])

    def one_estimate(layers: int, ranks: int) -> Callable[[], object]:
        model = llama_model(layers, 16384, 128, 128256, num_key_value_heads=8, intermediate_size=53248)
        layout = loadgauge.Layout(
            dp=ranks // 72, tp=8, pp=9, global_batch=ranks // 72 * 9, seq_len=8192, sequence_parallel=True, zero=1
        )
        how, gpu = loadgauge.training("megatron"), loadgauge.gpu("h100-sxm5-80gb")
        return lambda: estimate(model, layout, how, gpu)

    def one_estimate_with_time(name: str, **given: int) -> Callable[[], object]:
        model, layout = loadgauge.model(name), loadgauge.Layout(**given)
        how = loadgauge.training("megatron")
        machines = loadgauge.cluster(loadgauge.gpu("h100-sxm5-80gb"), layout.gpus)
        return lambda: estimate(model, layout, how, cluster=machines)

    def played() -> object:
        return simulate("1f1b", 64, 512, forward=1.0, backward=2.0)

    def page_answer(state: dict[str, str]) -> Callable[[], object]:
        # as its first tab asks
        uploads, question = (
            Uploads(),
            Question(flags=state, want=["treemap", "moments", "lanes", "schedule", "network"]),
        )
        return lambda: answer(question, uploads)

    small = {"dp": 8, "zero": 3, "seq_len": 8192, "global_batch": 64}
    large = {"dp": 16, "tp": 8, "pp": 9, "zero": 1, "seq_len": 8192, "global_batch": 1152}
    command = ["estimate", "llama-3.1-405b", "--gpus", "1152", "--tp", "8", "--pp", "9", "--seq-len", "8192", "--json"]
    rows = [
        ("one layer x 5 quantities x 1,000,000 layouts, columns in chunks of 8,192", seconds(in_chunks), "< 500 ms"),
        ("the same on an open 100 x 100 x 100 grid", seconds(on_an_open_grid), ""),
        ("one estimate, 126 layers on 1,152 GPUs, warm", seconds(one_estimate(126, 1152), 51), "< 2 ms"),
        ("one estimate, 1,260 layers on 1,152,000 GPUs, warm", seconds(one_estimate(1260, 1_152_000), 51), "the same"),
        (
            "one estimate with time, 8B on 8 GPUs, warm",
            seconds(one_estimate_with_time("llama-3.1-8b", **small), 51),
            "< 2 ms",
        ),
        (
            "one estimate with time, 405B on 1,152 GPUs, pp 9, warm",
            seconds(one_estimate_with_time("llama-3.1-405b", **large), 51),
            "< 2 ms",
        ),
        ("an answer of the page, 8B on 8 GPUs, warm", seconds(page_answer(SMALL_PAGE), 51), "< 6 ms"),
        (
            "an answer of the page, DeepSeek-V3 on 2,048 GPUs, pp 16, warm",
            seconds(page_answer(LARGE_PAGE), 51),
            "< 15 ms",
        ),
        ("a 1F1B pipeline of 64 stages and 512 micro-batches, played", seconds(played, 21), "< 50 ms"),
        ("`loadgauge estimate --json`, cold start, CPU time", cold_start(command), "< 200 ms"),
        ("`loadgauge trace llama-3.1-8b`, cold start, CPU time", cold_start(["trace", "llama-3.1-8b"], 3), "< 3.5 s"),
    ]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    lines = [
        "# Speed",
        "",
        f"{datetime.date.today()}, commit {commit.strip() or 'unknown'}, {platform.machine()}, one core, "
        f"Python {platform.python_version()}, NumPy {np.__version__}. Made by `make bench`.",
        "",
        "| what | median | min | max | target |",
        "|---|---|---|---|---|",
        *(
            f"| {what} | {m * 1e3:.2f} ms | {lo * 1e3:.2f} ms | {hi * 1e3:.2f} ms | {goal} |"
            for what, (m, lo, hi), goal in rows
        ),
    ]
    text = "\n".join(lines) + "\n"
    Path(__file__).with_name("speed.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
