"""Try to capture a small model of every type that transformers knows, and write docs/models-captured.md.

python tools/captured_models.py out.json [types ...]      results so far, each type in a process of its own
python tools/captured_models.py out.json --page           docs/models-captured.md of them, and data/capture/tried.json

Rows of types that are not in out.json stay as they are on the page, which says which the last run made.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
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

    from loadgauge.core.base.errors import ConfigError
    from loadgauge.core.definitions.job.job import Job
    from loadgauge.pytorch.capture.call import with_rows
    from loadgauge.pytorch.capture.capture import Captures
    from loadgauge.pytorch.capture.inputs.inputs import beside_tokens
    from loadgauge.pytorch.capture.inputs.kinds import model_class, of_config
    from loadgauge.pytorch.capture.inputs.target import SOUND
    from loadgauge.pytorch.capture.symbols.sizes import SAMPLES, SECONDS
    from loadgauge.pytorch.trace.torch_run import TorchRun
    from small_models import precision, rows, small_config

    torch.set_num_threads(1)
    begun = time.process_time()
    config = small_config(kind)
    job = of_config(config, TorchRun.of(Job(model="", seq_len=1, optimizer="sgd", precision=precision(kind))))
    if stated := rows(kind):
        job = with_rows(job, stated)
    sizes = {"b": 3, "s": 96, "t": 80, SOUND: SAMPLES * SECONDS}
    for last in (False, False, True):  # a sequence may be shorter than its picture, and then than its sound
        try:
            found = Captures(job, kind).at(**{name: sizes[name] for name in job.names})
            break
        except ConfigError as error:
            if last or (least := re.search(r"fewer than the (\d+) tokens", str(error))) is None:
                raise
            sizes["s"] = -(-(int(least[1]) + 32) // 16) * 16
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


def forked(kind: str, work: Callable[[str], dict[str, Any]] = tried, limit: int = LIMIT) -> dict[str, Any]:
    """What `work` gives for a type, in a child process with a limit of seconds of CPU."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + limit,) * 2)
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
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if text:
        answer: dict[str, Any] = json.loads(text)
        return answer
    if ended in (-signal.SIGXCPU, -signal.SIGKILL):
        return {"error": f"more than {limit} seconds of CPU"}
    return {"error": f"the process is ended by {signal.Signals(-ended).name if ended < 0 else ended}"}


ROADS = {"Not captured": "not captured", "Numbers only, at the sizes asked for": "numbers", "Formulas": "formulas"}
"""Sections of the page, and what `table` calls what is in them."""


def row(kind: str, one: dict[str, Any]) -> tuple[str, str]:
    """The section of the page that a type belongs to, and its line there."""
    missing, numbers, formulas = ROADS
    if "error" in one:
        return missing, f"| {kind} | {_cause(one['error'])} |"
    if one["plain"]:
        return numbers, f"| {kind} | {_cause(one['plain'])} |"
    guards = ", ".join(one["guards"][:2]) + (f" and {len(one['guards']) - 2} more" if len(one["guards"]) > 2 else "")
    return formulas, f"| {kind} | {', '.join(one['inputs'])} | {_short(one['kept'])} | {_short(guards)} |"


def standing(text: str) -> dict[str, tuple[str, str]]:
    """The same of a page that stands, by type."""
    found, section = {}, ""
    for line in text.splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if section in ROADS and line.startswith("| ") and not line.startswith("| type |"):
            found[line.split(" ")[1]] = (section, line)
    return found


def page(done: dict[str, Any], before: dict[str, tuple[str, str]], heads: dict[str, str], releases: str) -> str:
    """docs/models-captured.md. before: rows of types that are not in `done`"""
    rows = {**before, **{kind: row(kind, one) for kind, one in done.items()}}
    rows = {kind: rows[kind] for kind in heads if kind in rows}
    lines = [
        "# Models captured",
        "",
        f"Made by `python tools/captured_models.py`, with {releases}: every model type with a head",
        "for causal, sequence-to-sequence or masked language modelling, or for pictures and text. Each is a small model: the",
        "defaults of its class with two layers and what `tools/small_models.toml` states, with the inputs of",
        "`data/capture/inputs.toml`. It runs two steps with SGD; its formulas are compared with a plain run at other sizes,",
        "operation by operation: bytes live and kept, FLOPs. Some types need torchvision or timm beside them.",
        "",
        "This compares one tracer with itself. It shows that formulas say what the tracer says, not that a GPU does.",
        "Which types train on a real CPU as they are stated is asked by `python tools/real_steps.py`, and not subtracted here.",
        "",
        "| head | types | formulas, equal to the plain run | numbers only | not captured |",
        "|---|--:|--:|--:|--:|",
    ]
    for head in (*dict.fromkeys(heads.values()), ""):
        of_head = [rows[kind][0] for kind in rows if not head or heads[kind] == head]
        missing, numbers, formulas = (of_head.count(section) for section in ROADS)
        name = head.replace("_", " ").lower() or "all"
        lines.append(f"| {name} | {len(of_head)} | {formulas} | {numbers} | {missing} |")
    again = [f"`{kind}`" for kind in heads if kind in done]
    if len(again) < len(rows):
        lines += [
            "",
            f"The last run made {len(again)} rows; the others are of earlier states of the code: {', '.join(again)}.",
        ]
    if absent := [f"`{kind}`" for kind in heads if kind not in rows]:
        lines += ["", f"Not tried yet with these tables: {', '.join(absent)}."]
    for section in ROADS:
        columns = ("type", "beside tokens", "bytes kept for backward", "holds where") if section == "Formulas" else (
            "type", "what stops it" if section == "Not captured" else "why")  # fmt: skip
        lines += ["", f"## {section}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
        lines += [line for at, line in rows.values() if at == section]
    return "\n".join(lines) + "\n"


def table(done: dict[str, Any], before: dict[str, Any], heads: dict[str, str], transformers: str, torch: str) -> str:
    """data/capture/tried.json: the road and its reason of each type. before: those of types that are not in `done`"""
    types = {
        **before,
        **{
            kind: (ROADS[row(kind, one)[0]], _cause(one.get("error") or one["plain"])[:200])
            for kind, one in done.items()
        },
    }
    rows = ",\n".join(f"{json.dumps(kind)}: {json.dumps(types[kind])}" for kind in heads if kind in types)
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


def ready() -> tuple[str, str]:
    """Import what all children need, once, and return the releases of transformers and PyTorch."""
    warnings.filterwarnings("ignore")
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    import torch
    import transformers
    from transformers import CONFIG_MAPPING  # noqa: F401

    importlib.import_module("loadgauge.pytorch.capture.capture")
    return transformers.__version__, torch.__version__.partition("+")[0]


def results(path: Path) -> dict[str, Any]:
    """What was written so far."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def run_each(
    path: Path, done: dict[str, Any], kinds: Iterable[str], work: Callable[[str], Any], said: Callable[[Any], str]
) -> None:
    """Write what `work` gives after each type. said: the line that is printed of it"""
    for kind in kinds:
        done[kind] = work(kind)
        print(kind, said(done[kind]), flush=True)
        path.write_text(json.dumps(done, indent=0), encoding="utf-8")


if __name__ == "__main__":
    versions = ready()
    from small_models import model_types

    path, given = Path(sys.argv[1]), sys.argv[2:]
    done = results(path)
    if given == ["--page"]:
        before = json.loads(TABLE.read_text(encoding="utf-8"))["types"]
        releases = "transformers {} and PyTorch {}".format(*versions)
        PAGE.write_text(page(done, standing(PAGE.read_text(encoding="utf-8")), model_types(), releases))
        TABLE.write_text(table(done, before, model_types(), *versions))
        sys.exit()
    missing = [kind for kind in model_types() if kind not in done]
    run_each(path, done, given or missing, forked, lambda one: one.get("error") or one["plain"] or one["kept"])
