"""How fast a trace is: two training steps at full depth, against PyTorch's own MemTracker on the same work.

    python benchmarks/trace.py [NAME ...]

Prints one JSON document: seconds, host memory, and the machine. Each case runs in a process of its own; the time of
imports is apart. Run it on a quiet machine.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from datetime import date

CASES = (
    "llama-3.1-8b",
    "llama-3.1-405b",
    "llama-3.1-405b by TP8 x FSDP128",
    "llama-3.1-405b by TP8 x PP16 x FSDP8",
    "llama-3.1-8b by MemTracker",
)
SHARED = {
    "TP8 x FSDP128": {"tp": 8, "sequence_parallel": True, "zero": 3, "gpus": 1024, "recompute": "full"},
    "TP8 x PP16 x FSDP8": {
        "tp": 8, "sequence_parallel": True, "pp": 16, "stage_layers": ",".join(["7", *["8"] * 14, "7"]), "zero": 3,
        "gpus": 1024, "global_batch": 16 * 8, "recompute": "full",
    },
}  # fmt: skip
"""By name: fields of the job. Rank 0 is simulated."""


def one(name: str) -> dict[str, object]:
    """One case, in this process."""
    begun = time.perf_counter()
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    from loadgauge.core.definitions.job.job import Job
    from loadgauge.pytorch.trace.programs.jobs import ConfigJob
    from loadgauge.pytorch.trace.programs.target import hugging_face
    from loadgauge.pytorch.trace.torch_run import TorchRun
    from loadgauge.pytorch.trace.trace import trace

    model, _, by = name.partition(" by ")
    config, run = hugging_face(model), TorchRun.of(Job(model=""))
    imported = time.perf_counter()
    if by in SHARED:
        peak = one_of_many(config, by)
    else:
        peak = by_memtracker(config, run) if by else trace(ConfigJob(config, run)).peak.total
    done = time.perf_counter()
    return {
        "name": name,
        "seconds": round(done - imported, 2),
        "imports": round(imported - begun, 2),
        "host_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "peak": peak,
        "torch": str(torch.__version__),
    }


def one_of_many(config: object, by: str) -> int:
    """Two steps of one rank."""
    import logging

    from loadgauge.core.definitions.job.job import Job
    from loadgauge.pytorch.trace.programs.target import config_job
    from loadgauge.pytorch.trace.torch_run import TorchRun
    from loadgauge.pytorch.trace.trace import trace

    logging.disable(logging.CRITICAL)
    run = TorchRun.of(Job(model="", **SHARED[by]))  # type: ignore[arg-type]
    return trace(config_job(config, run), gpus=int(run.layout.gpus)).peak.total


def by_memtracker(config: object, run: object) -> int:
    """The same two steps under PyTorch's fake tensors and its tracker, on fake CPU tensors."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from loadgauge.pytorch.device.patches import no_packed_sequences
    from loadgauge.pytorch.trace.programs.jobs import build_model

    with FakeTensorMode(), torch.device("cpu"), no_packed_sequences():
        model = build_model(config, run, "cpu")  # type: ignore[arg-type]
        ids = torch.zeros(1, 4096, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, ids)
        with tracker:
            for number in range(2):
                if number:
                    tracker.reset_mod_stats()
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        return max(sum(parts.values()) - parts["Total"] for parts in tracker.get_tracker_snapshot("peak").values())


def main() -> None:
    """Every case, one after the other."""
    results = []
    for name in sys.argv[1:] or CASES:
        done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        results.append(json.loads(lines[-1]) if lines else {"name": name, "error": done.stderr[-300:]})
    load = os.getloadavg()[0]
    machine = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "date": str(date.today()),
        "load": round(load, 1),
    }
    print(json.dumps({"machine": machine, "results": results}, indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(sys.argv[2])), flush=True)
        os._exit(0)
    main()
