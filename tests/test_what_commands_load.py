"""The ways of commands through the package: which folders each enters, and which it leaves alone (docs/design/ways.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import loadgauge

SRC = Path(loadgauge.__file__).parent.parent
FLAGS = "--gpu h100 --gpus 8 --zero 3"
ROLLOUT = "--task grpo --prompts 8 --samples 8 --prompt-len 512 --answers 1024"
ROOMS = {"evidence", "fleets", "page", "pytorch", "sheets", "train"}
SEARCHING = {"core/resolve", "core/plan"}
WAYS: dict[str, set[str]] = {
    "gpus h100": ROOMS | SEARCHING | {"job_files"},
    "models qwen3": ROOMS | SEARCHING | {"job_files"},
    f"estimate llama-3.1-8b {FLAGS}": ROOMS - {"pytorch"},
    f"estimate llama-3.1-8b {FLAGS} {ROLLOUT}": ROOMS - {"pytorch"},
    "plan llama-3.1-8b --gpu h100 --gpus 8 --global-batch 64 --seq-len 4096": ROOMS - {"pytorch", "fleets"},
    "fleet llama-3.1-8b --gpu h100 --gpus 8 --zero 2 --micro-batch 1 --tokens 1B": ROOMS - {"pytorch", "fleets"},
    "why oom.txt": (ROOMS - {"pytorch"}) | {"core/estimate", "core/layers", "core/plan"},
}
"""Command lines, and the rooms and folders of the core that each has no use for."""


def entered(line: str, here: Path) -> set[str]:
    """The rooms, and the folders of the core, of which a command imports more than that they are there."""
    code = (
        "import sys, io, contextlib, shlex, json\nfrom loadgauge.core.command_line.main import run\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n    run(shlex.split(sys.argv[1]))\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('loadgauge.')]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, line], cwd=here, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "is a defect" not in done.stderr
    names = [name.split(".")[1:] for name in json.loads(done.stdout)]
    deep = [name for name in names if len(name) > 1 and name[-1] != "room"]
    return {"/".join(name[:2]) if name[0] == "core" else name[0] for name in deep}


@pytest.mark.slow
@pytest.mark.parametrize("line", WAYS)
def test_a_command_leaves_alone_what_it_has_no_use_for(line: str, tmp_path: Path) -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    (tmp_path / "oom.txt").write_text(text, encoding="utf-8")
    assert entered(line, tmp_path) & WAYS[line] == set()
