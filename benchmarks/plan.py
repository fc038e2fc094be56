"""Speed of the search, and the search against a plain loop. Prints a table and writes it to benchmarks/plan.md.

    python benchmarks/plan.py                  speed: layouts a second on one core, memory and time of each worked out
    python benchmarks/plan.py --brute-force    every layout of several small spaces, one `estimate` call each

A layout counts when it can exist and both its memory and its time have been worked out; combinations that cannot exist
do not. Seconds are CPU seconds of one process (user + system), of the whole search with all exact estimates at its end.
"""

from __future__ import annotations

import datetime
import itertools
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

from loadgauge import cluster, estimate, gpu, model, training
from loadgauge.layout import SCHEDULES
from loadgauge.search.choices import space_for
from loadgauge.search.plan import Case, layout_at, plan

SPACES = [
    ("llama-3.1-405b", 16384, 2048, 8192),
    ("llama-3.1-405b", 1024, 512, 8192),
    ("llama-3.1-70b", 256, 512, 8192),
    ("mixtral-8x22b", 1024, 1024, 4096),
    ("llama-3.1-8b", 64, 512, 8192),
]
ORACLES = [
    ("llama-3.1-8b", 8, 32, "megatron", SCHEDULES),
    ("llama-3.1-8b", 16, 16, "torchtitan", ("1f1b", "zb-v")),
    ("mixtral-8x7b", 8, 16, "megatron", ("1f1b", "interleaved")),
    ("deepseek-v2-lite", 8, 16, "megatron", ("1f1b", "interleaved")),
]


def case(name: str, gpus: int, batch: int, length: int, framework: str = "megatron", **locks: object) -> Case:
    known, kind = model(name), training(framework)
    space = space_for(known, kind, gpus, batch, length, locks=locks)  # type: ignore[arg-type]
    return Case(space=space, training=kind, cluster=cluster(gpu("h100-sxm5-80gb"), gpus))


def speed() -> list[str]:
    lines = [
        "| model | GPUs | batch | combinations | layouts | fit | CPU s | layouts/s | wall s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, gpus, batch, length in SPACES:
        started, wall = time.process_time(), time.perf_counter()
        found = plan([case(name, gpus, batch, length)])
        cpu, wall = time.process_time() - started, time.perf_counter() - wall
        lines.append(
            f"| {name} | {gpus:,} | {batch:,} x {length:,} | {found.evaluated:,} | {found.valid:,} | {found.fitting:,}"
            f" | {cpu:.1f} | {found.valid / cpu:,.0f} | {wall:.1f} |"
        )
        print(lines[-1], flush=True)
    lines.append(f"\nMost memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB.")
    return lines


def brute_force() -> list[str]:
    """Each layout alone, against the array reading: the largest differences, and whether the order is the same."""
    lines = [
        "| model | framework | layouts | bytes off | relative time off | same order |",
        "|---|---|---|---|---|---|",
    ]
    for name, gpus, batch, framework, schedules in ORACLES:
        given = case(name, gpus, batch, 4096, framework, schedule=schedules)
        rows, off, late = [], 0.0, 0.0
        for found in given.reading().batches():
            for place, memory, step in zip(found.places, found.memory, found.step, strict=True):
                layout = layout_at(given.space, found.structure, found.grid, int(place))
                alone = estimate(given.space.model, layout, given.training, cluster=given.cluster)
                assert alone.time is not None
                off = max(off, abs(memory - alone.memory.total))
                late = max(late, abs(step / alone.time.step - 1))
                rows.append((float(step), alone.time.step))
        # Equal within rounding is a tie, whose order means nothing.
        ordered = [exact for _, exact in sorted(rows)]
        same = all(later >= earlier * (1 - 1e-9) for earlier, later in itertools.pairwise(ordered))
        lines.append(f"| {name} | {framework} | {len(rows):,} | {off:g} | {late:.1e} | {'yes' if same else 'NO'} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Runs one of the two, and writes its table into its part of plan.md."""
    what = "brute force" if "--brute-force" in sys.argv else "speed"
    lines = brute_force() if what == "brute force" else speed()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    heading = f"## {what}: {datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}, {commit.strip()}"
    file = Path(__file__).with_suffix(".md")
    old = file.read_text() if file.exists() else "# The search\n"
    kept = [part for part in old.split("\n## ")[1:] if not part.startswith(what)]
    parts = ["# The search\n", *(f"## {part.strip()}\n" for part in kept), "\n".join([heading, "", *lines, ""])]
    file.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
