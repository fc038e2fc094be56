"""Try to capture a small model of every type that transformers knows, and write docs/models-captured.md.

python tools/captured_models.py out.json [types ...]      results so far, each type in a process of its own
python tools/captured_models.py out.json --page           docs/models-captured.md of them, and data/capture/tried.json
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models-captured.md"
TABLE = ROOT / "src" / "loadgauge" / "data" / "capture" / "tried.json"
LIMIT = 300
"""Seconds of CPU that a type may take, on a machine with other work."""


def tried(kind: str) -> dict[str, Any]:
    """What capturing one type comes to."""
    import torch

    from loadgauge.capture.capture import Captures
    from loadgauge.capture.inputs import beside_tokens
    from loadgauge.capture.kinds import model_class, of_config
    from loadgauge.capture.small import precision, small_config
    from loadgauge.errors import ConfigError
    from loadgauge.spec.job import Job
    from loadgauge.trace.torch_run import TorchRun

    torch.set_num_threads(1)
    begun = time.process_time()
    config = small_config(kind)
    job = of_config(config, TorchRun.of(Job(model="", seq_len=1, optimizer="sgd", precision=precision(kind))))
    sizes = {"b": 3, "s": 96, "t": 80}
    try:
        found = Captures(job, kind).at(**{name: sizes[name] for name in job.names})
    except ConfigError as error:  # a sequence shorter than its picture
        if (least := re.search(r"fewer than the (\d+) tokens", str(error))) is None:
            raise
        sizes["s"] = -(-(int(least[1]) + 32) // 16) * 16
        found = Captures(job, kind).at(**{name: sizes[name] for name in job.names})
    return {
        "plain": found.plain,
        "guards": list(found.guards),
        "kept": str(found.kept_formula),
        "parameters": sum(found.parameters.values()),
        "operations": len(found.operations),
        "values": list(found.values),
        "uncounted": list(found.uncounted),
        "inputs": sorted(beside_tokens(config, inspect.signature(model_class(config).forward).parameters)),
        "seconds": round(time.process_time() - begun, 1),
    }


def forked(kind: str, work: Callable[[str], dict[str, Any]] = tried) -> dict[str, Any]:
    """What `work` gives for a type, in a child process with a limit."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + LIMIT,) * 2)
        try:
            out = work(kind)
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


def page(done: dict[str, Any], heads: dict[str, str], releases: str) -> str:
    """docs/models-captured.md."""
    exact = {kind for kind, one in done.items() if "error" not in one and not one["plain"]}
    plain = {kind for kind, one in done.items() if "error" not in one and one["plain"]}
    lines = [
        "# Models captured",
        "",
        f"Made by `python tools/captured_models.py`, with {releases}: every model type with a head",
        "for causal, sequence-to-sequence or masked language modelling, or for pictures and text. Each is a small model: the",
        "defaults of its class with two layers and what `data/capture/small.toml` states, with the inputs of",
        "`data/capture/inputs.toml`. It runs two steps with SGD; its formulas are compared with a plain run at other sizes,",
        "operation by operation: bytes live and kept, FLOPs.",
        "",
        "This compares one tracer with itself. It shows that formulas say what the tracer says, not that a GPU does.",
        "Which types train on a real CPU as they are stated is asked by `python tools/real_steps.py`, and not subtracted here.",
        "",
        "| head | types | formulas, equal to the plain run | numbers only | not captured |",
        "|---|--:|--:|--:|--:|",
    ]
    for head in (*dict.fromkeys(heads.values()), ""):
        kinds = {kind for kind in done if not head or heads.get(kind) == head}
        name = head.replace("_", " ").lower() or "all"
        rest = len(kinds - exact - plain)
        lines.append(f"| {name} | {len(kinds)} | {len(kinds & exact)} | {len(kinds & plain)} | {rest} |")
    tried = [kind for kind in heads if kind not in done]
    if tried:
        lines += ["", "Not tried yet with these tables: " + ", ".join(f"`{kind}`" for kind in tried) + "."]
    lines += ["", "## Not captured", "", "| type | what stops it |", "|---|---|"]
    lines += [f"| {kind} | {_cause(done[kind]['error'])} |" for kind in heads if kind in done and "error" in done[kind]]
    lines += ["", "## Numbers only, at the sizes asked for", "", "| type | why |", "|---|---|"]
    lines += [f"| {kind} | {_cause(done[kind]['plain'])} |" for kind in heads if kind in plain]
    lines += [
        "",
        "## Formulas",
        "",
        "| type | beside tokens | bytes kept for backward | holds where |",
        "|---|---|---|---|",
    ]
    for kind in heads:
        if kind in exact:
            one = done[kind]
            guards = ", ".join(one["guards"][:2]) + (
                f" and {len(one['guards']) - 2} more" if len(one["guards"]) > 2 else ""
            )
            lines.append(f"| {kind} | {', '.join(one['inputs'])} | {_short(one['kept'])} | {_short(guards)} |")
    return "\n".join(lines) + "\n"


def table(done: dict[str, Any], heads: dict[str, str], transformers: str, torch: str) -> str:
    """data/capture/tried.json: the road and its reason of each type."""
    types = {
        kind: ("not captured", _cause(one["error"])[:200]) if "error" in one
        else ("numbers", _cause(one["plain"])[:200]) if one["plain"] else ("formulas", "")
        for kind in heads if (one := done.get(kind))
    }  # fmt: skip
    rows = ",\n".join(f"{json.dumps(kind)}: {json.dumps(row)}" for kind, row in types.items())
    return f'{{"transformers": "{transformers}", "torch": "{torch}", "types": {{\n{rows}\n}}}}\n'


def _short(text: str) -> str:
    text = text.replace("|", "\\|")
    return f"`{text}`" if 0 < len(text) <= 90 else f"`{text[:87]}...`" if text else ""


def _cause(text: str) -> str:
    text = re.sub(r"/\S*?/(transformers|torch)/", r"\1/", text).replace("\n", " ").replace("|", "\\|")
    return (
        text.partition(": ")[2].partition(" cannot be captured: ")[2] or text
        if text.startswith("ConfigError")
        else text
    )


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    import torch
    import transformers  # once, for all children
    from transformers import CONFIG_MAPPING  # noqa: F401

    importlib.import_module("loadgauge.capture.capture")
    from loadgauge.capture.small import model_types

    path, given = Path(sys.argv[1]), sys.argv[2:]
    done = json.loads(path.read_text()) if path.exists() else {}
    if given == ["--page"]:
        releases = f"transformers {transformers.__version__} and PyTorch {torch.__version__.partition('+')[0]}"
        PAGE.write_text(page(done, model_types(), releases))
        TABLE.write_text(table(done, model_types(), transformers.__version__, torch.__version__.partition("+")[0]))
        sys.exit()
    for kind in given or [kind for kind in model_types() if kind not in done]:
        done[kind] = forked(kind)
        print(kind, done[kind].get("error") or done[kind]["plain"] or done[kind]["kept"], flush=True)
        path.write_text(json.dumps(done, indent=0))
