"""How fast a capture is: the command at full depth from start to end, imports included, and a second question.

    python benchmarks/capture.py [NAME ...]

Prints one JSON document: seconds of wall and CPU, host memory, whether there are formulas, and the machine; best on a quiet one.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version

MODELS = ("llama-3.1-8b", "deepseek-v3", "mamba2-2.7b", "bamba-9b")
UNCOMPILED = "PYTHONDONTWRITEBYTECODE"
"""Python would compile the project's modules in every process, which pip does once."""
RUNS = 5
"""Of a second question, which is answered from the disk; the median counts."""


def asked(name: str, length: int, folder: str) -> dict[str, object]:
    """The figures of one question about a model. folder: where captures are kept"""
    words = ["capture", name, "--micro-batch", "2", "--seq-len", str(length), "--json"]
    begun = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "loadgauge", *words],
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != UNCOMPILED} | {"XDG_CACHE_HOME": folder},
    )
    assert child.stdout is not None
    answer = json.loads(child.stdout.read())
    _, _, used = os.wait4(child.pid, 0)
    return {
        "name": name,
        "wall": round(time.perf_counter() - begun, 2),
        "cpu": round(used.ru_utime + used.ru_stime, 2),
        "GiB": round(used.ru_maxrss / 2**20, 2),
        "formulas": not answer["numbers_only"],
        "cached": answer["cached"],
        "operations": answer["operations"],
    }


def main() -> None:
    """Runs every case, or those that are named."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or MODELS:
            results.append(asked(name, 4096, folder))
            again = sorted((asked(name, 4100, folder) for _ in range(RUNS)), key=lambda one: float(str(one["wall"])))
            results.append(again[RUNS // 2])
    machine = {
        "date": str(date.today()),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "platform": platform.platform(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
    print(json.dumps({"machine": machine, "results": results}, indent=1))


if __name__ == "__main__":
    main()
