"""The commands that the documents show, as a reader would type them."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHELLS = {"", "sh", "bash", "console", "shell"}
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Every command line of loadgauge in a Markdown text: in blocks, and in backticks where it stands for itself.

    What the shell does with it (a pipe, a file, a second command) and comments are left out.

    >>> commands('''Type `loadgauge estimate gpt2`, or
    ... ```
    ... $ loadgauge network gpt2 \\\\
    ...     --gpus 8
    ... it prints this
    ... ```
    ... ''')
    ['loadgauge network gpt2 --gpus 8', 'loadgauge estimate gpt2']
    """
    found = []
    for block in FENCE.finditer(text):
        if block["language"] in SHELLS:
            body = re.sub(r" *\\\n\s*", " ", block["body"])
            found += [
                line for raw in body.splitlines() if (line := raw.strip().removeprefix("$ ")).startswith("loadgauge ")
            ]
    prose = FENCE.sub("", text)
    found += list(re.findall(r"(?<!`)`(loadgauge [^`\n]+)`(?!`)", prose))
    lines = (re.split(r" (?:&&|\|\|?|>|#) ", line.replace("\\|", "|"))[0].strip() for line in found)
    return list(dict.fromkeys(lines))


def workplace(folder: Path) -> Path:
    """A folder with the files that the documents name: those of `examples/`, and a snapshot of a GPU's memory."""
    shutil.copytree(ROOT / "examples", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "snapshot.pickle").write_bytes(pickle.dumps(_snapshot()))
    return folder


def _snapshot() -> dict[str, Any]:
    """What `torch.cuda.memory._dump_snapshot` writes, of two tensors and a third that does not fit."""

    def event(action: str, address: int, size: int, name: str) -> dict[str, Any]:
        return {
            "action": action, "addr": address, "size": size, "stream": 0,
            "frames": [{"name": name, "filename": "train.py", "line": 41}],
        }  # fmt: skip

    gib = 2**30
    blocks = [
        {"address": 0, "size": 12 * gib, "state": "active_allocated", "frames": []},
        {"address": 12 * gib, "size": 8 * gib, "state": "active_allocated", "frames": []},
    ]
    events = [
        event("alloc", 0, 12 * gib, "weights"), event("alloc", 12 * gib, 8 * gib, "forward"), event("oom", 0, 4 * gib, "loss"),
    ]  # fmt: skip
    segment = {"device": 0, "address": 0, "total_size": 20 * gib, "blocks": blocks}
    return {"segments": [segment], "device_traces": [events]}
