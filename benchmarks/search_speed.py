"""Speed of the search, and the search against a plain loop. Prints tables and writes them to search_speed.md.

python benchmarks/search_speed.py                  speed: layouts a second on one core
python benchmarks/search_speed.py --brute-force    every layout of several small spaces, one `estimate` call each
"""

from __future__ import annotations

import datetime
import itertools
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

from loadgauge import cluster, estimate, gpu, model, training
from loadgauge.core.definitions.layout.layout import SCHEDULES
from loadgauge.core.plan.search import Case, search
from loadgauge.core.plan.space.axis_values import space_for
from loadgauge.core.text.plan.plan import _thinned, why

SPACES = [
    ("llama-3.1-405b", 16384, 2048, 8192),
    ("llama-3.1-405b", 1024, 512, 8192),
    ("llama-3.1-70b", 256, 512, 8192),
    ("mixtral-8x22b", 1024, 1024, 4096),
    ("deepseek-v3", 2048, 4096, 4096),
    ("llama-3.1-8b", 64, 512, 8192),
]
METHOD = """\
A layout is counted when it can exist; combinations that cannot are passed over, most of them without being looked at.
Of a layout that can exist

- lower bounds of its memory and its time are worked out together with others (`core/plan/batch/bounds.py`); by these it may not
  fit, or be neither among the 20 best layouts nor on the front of time and memory;
- else its memory is worked out, to the byte that a single estimate gives, and a closer bound of its time: its pipeline takes
  at least what its slowest stage is busy, with the first micro-batch on its way there and the last one on its way back
  (`core/plan/batch/schedule.py`, `least`);
- if it may still be one of these, its time is exact: where there is a pipeline, its schedule is played, the best bounds first.

The answer is that of the second table (tests/core/plan/test_search_plan.py, test_search_arrays.py). No closed form replaces a
time that is reported or ranked: what is shown is estimated one by one, and `SearchResult.moved` counts what then changes places.

CPU seconds (user + system) of one core, of the whole search with the estimates that `plan` prints, each search in a process of
its own that has done nothing before; GiB: the most memory that the process ever had, Python and NumPy included."""
ORACLES = [
    ("llama-3.1-8b", 8, 32, "megatron", SCHEDULES),
    ("llama-3.1-8b", 16, 16, "torchtitan", ("1f1b", "zb-v")),
    ("mixtral-8x7b", 8, 16, "megatron", ("1f1b", "interleaved")),
    ("deepseek-v2-lite", 8, 16, "megatron", ("1f1b", "interleaved")),
]


def case(name: str, gpus: int, batch: int, length: int, framework: str = "megatron", **locks: object) -> Case:
    spec, kind = model(name), training(framework)
    space = space_for(spec, kind, gpus, batch, length, locks=locks)  # type: ignore[arg-type]
    return Case(space=space, training=kind, cluster=cluster(gpu("h100-sxm5-80gb"), gpus))


def measured(number: int, exhaustive: bool) -> dict[str, float]:
    """One search in this process, which has done nothing before."""
    given = case(*SPACES[number])
    started = time.process_time()
    result = search([given], exhaustive=exhaustive)
    shown = (*result.layouts[:5], *_thinned(result.pareto), *why(result))
    cpu = time.process_time() - started
    return {
        "combinations": result.evaluated, "layouts": result.valid, "bounded": result.bounded, "shown": len(shown),
        "moved": result.moved, "cpu": cpu, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }  # fmt: skip


def speed() -> list[str]:
    """Each space in a process of its own, as `plan` searches it and with every schedule played."""
    lines = METHOD.splitlines()
    for exhaustive in (False, True):
        title = "With every schedule played (`exhaustive=True`)" if exhaustive else "As `plan` searches"
        heading = (
            "| model | GPUs | batch | combinations | layouts | time exact | time bounded | CPU s | layouts/s | GiB |"
        )
        lines += ["", f"{title}:", "", heading, "|---|---|---|---|---|---|---|---|---|---|"]
        for number, (name, gpus, batch, length) in enumerate(SPACES):
            command = [sys.executable, __file__, "--space", str(number), *["--exhaustive"] * exhaustive]
            each = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            lines.append(
                f"| {name} | {gpus:,} | {batch:,} x {length:,} | {each['combinations']:,} | {each['layouts']:,}"
                f" | {each['layouts'] - each['bounded']:,} | {each['bounded']:,} | {each['cpu']:.2f}"
                f" | {each['layouts'] / each['cpu']:,.0f} | {each['memory']:.2f} |"
            )
            print(lines[-1], flush=True)
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
        for found in given.evaluator().batches():
            for place, memory, step in zip(found.places, found.memory, found.step, strict=True):
                layout = found.grid.layout(found.structure, int(place))
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
    """Runs one of the two, and writes its tables into its part of search_speed.md."""
    if "--space" in sys.argv:
        number = int(sys.argv[sys.argv.index("--space") + 1])
        print(json.dumps(measured(number, "--exhaustive" in sys.argv)))
        return
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
