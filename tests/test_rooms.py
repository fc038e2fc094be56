"""The doors are real: the core answers alone, byte for byte, and each other room can be taken out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import loadgauge

PACKAGE = Path(loadgauge.__file__).parent
ROOMS = ("evidence", "fleets", "job_files", "page", "pytorch", "sheets", "train")
CORE = (
    "estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3",
    "estimate llama-3.1-8b --gpu h100 --gpus 8 --zero 3 --json",
    "estimate mixtral-8x7b --gpu h100 --gpus 64 --tp 2 --ep 8 --explain activations",
    "estimate llama-3.1-8b --gpu h100 --gpus 8 --task dpo",
    "estimate llama-3.1-8b --gpu h100 --gpus 8 --task grpo --prompts 8 --samples 8 --prompt-len 512 --answers 1024",
    "estimate llama-3.1-8b --gpu h100 --task generate --context 4096 --batch 8",
    "plan llama-3.1-8b --gpu h100 --gpus 8 --global-batch 64 --seq-len 4096 --no-progress",
    "network llama-3.1-8b --gpu h100 --gpus 64 --tp 8",
    "equation activations --layer gpt --tp",
    "gpus h100",
    "models qwen3",
    "schema",
    "estimate llama-3.1-8b --gpu a-card-that-is-none",
)
OTHERS = {
    "evidence": ("validate --source none", "article 1 --brief"),
    "fleets": ("fleet llama-3.1-8b --gpu h100 --gpus 64 --tokens 1T",),
    "job_files": ("check job.yaml --memory 80GiB",),
    "page": ("serve --help",),
    "pytorch": ("why error.txt",),
    "sheets": (),
    "train": (),
}
"""What each other room answers, or refuses."""


def built(folder: Path, *rooms: str) -> Path:
    """A package with the core and these rooms."""
    package = folder / "loadgauge"
    package.mkdir()
    for entry in PACKAGE.iterdir():
        if entry.name in ("__pycache__", *(set(ROOMS) - set(rooms))):
            continue
        (package / entry.name).symlink_to(entry)
    return folder


def answers(path: Path, lines: tuple[str, ...], here: Path) -> list[tuple[str, str, int]]:
    """What command lines print on stdout and stderr, and their exit codes, in one fresh process."""
    code = (
        "import sys, io, contextlib, shlex, json\nfrom loadgauge.core.command_line.main import run\nfound = []\n"
        "for line in json.loads(sys.argv[1]):\n    out, err = io.StringIO(), io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):\n        code = run(shlex.split(line))\n"
        "    found.append([out.getvalue(), err.getvalue(), code])\nprint(json.dumps(found))\n"
    )
    import json

    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(lines)], cwd=here, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(path), "COLUMNS": "120"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [(out, err, code) for out, err, code in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, int]]:
    return answers(PACKAGE.parent, CORE, tmp_path_factory.mktemp("whole"))


def test_the_core_alone_answers_byte_for_byte(whole: list[tuple[str, str, int]], tmp_path: Path) -> None:
    alone = answers(built(tmp_path), CORE, tmp_path)
    for line, want, have in zip(CORE, whole, alone, strict=True):
        assert have == want, line
    assert {code for _, _, code in whole} == {0, 1, 2}


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.long
def test_a_room_can_be_taken_out(room: str, whole: list[tuple[str, str, int]], tmp_path: Path) -> None:
    """The core answers as before, the others too, and what the room did is refused in a line."""
    (tmp_path / "job.yaml").write_text("base_model: meta-llama/Llama-3.1-8B\nmicro_batch_size: 1\n", encoding="utf-8")
    (tmp_path / "error.txt").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    path = built(tmp_path, *(other for other in ROOMS if other != room))
    lines = [(other, line) for other, each in OTHERS.items() for line in each]
    core, *others = answers(path, (CORE[0], *(line for _, line in lines)), tmp_path)
    assert core == whole[0]
    for (out, err, code), (other, line) in zip(others, lines, strict=True):
        assert "Traceback" not in out + err
        assert "is a defect" not in err, line
        if other == room:
            assert (code, len(err.splitlines())) == (2, 1), line
        else:
            assert "not installed" not in err, line
