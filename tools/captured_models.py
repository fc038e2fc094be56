"""Try to capture a small model of every type that transformers knows, and write docs/models-captured.md.

    python tools/captured_models.py out.json [types ...]      results so far, each type in a process of its own
    python tools/captured_models.py out.json --page           docs/models-captured.md of them
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LIMIT = 60
"""Seconds of CPU that a type may take."""


def tried(kind: str) -> dict[str, Any]:
    """What capturing one type comes to."""
    import torch

    from loadgauge.capture.capture import Captures
    from loadgauge.capture.kinds import of_config
    from loadgauge.capture.small import small_config
    from loadgauge.spec.job import Job
    from loadgauge.trace.torch_run import TorchRun

    torch.set_num_threads(1)
    begun = time.process_time()
    job = of_config(small_config(kind), TorchRun.of(Job(model="", seq_len=1, optimizer="sgd")))
    sizes = {"b": 3, "s": getattr(job, "least", 0) or 96, "t": 80}
    found = Captures(job, kind).at(**{name: sizes[name] for name in job.names})
    return {
        "plain": found.plain,
        "guards": list(found.guards),
        "kept": str(found.kept_formula),
        "parameters": sum(found.parameters.values()),
        "operations": len(found.operations),
        "values": list(found.values),
        "uncounted": list(found.uncounted),
        "seconds": round(time.process_time() - begun, 1),
    }


def forked(kind: str) -> dict[str, Any]:
    """`tried` in a child process with a limit."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + LIMIT,) * 2)
        try:
            out = tried(kind)
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            at = [f"{Path(one.filename).name}:{one.lineno}" for one in frames if "transformers" in one.filename]
            out = {"error": f"{type(error).__name__}: {str(error).strip()[:300]}", "at": at[-1:]}
        with os.fdopen(write, "w") as file:
            json.dump(out, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"more than {LIMIT} seconds of CPU"}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    import transformers  # once, for all children
    from transformers import CONFIG_MAPPING  # noqa: F401

    import loadgauge.capture.capture
    from loadgauge.capture.small import model_types

    path = Path(sys.argv[1])
    done = json.loads(path.read_text()) if path.exists() else {}
    for kind in sys.argv[2:] or [kind for kind in model_types() if kind not in done]:
        done[kind] = forked(kind)
        if sys.argv[2:]:
            print(kind, json.dumps(done[kind], indent=1))
        path.write_text(json.dumps(done, indent=0))
