"""Runs command lines inside the test's own process, and takes down what they print."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from loadgauge.core.command_line.main import run

FITS = "estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3"
TOO_BIG = "estimate llama-3.1-8b --gpu rtx4090"
PIPELINE = "estimate llama-3.1-70b --gpu h100-sxm5-80gb --gpus 64 --tp 8 --pp 4 --micro-batch 1 --global-batch 64"

TRACED = "trace gpt2 --seq-len 64 --layers 1 --gpus 2 --zero 2"
TINY = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 64,
    "vocab_size": 512,
}  # fmt: skip
"""A model that is quick to train on any CPU."""


class Outcome(NamedTuple):
    """What a command line gives."""

    code: int
    out: str
    err: str


def typed(line: str | list[str]) -> Outcome:
    """What comes of a command line, as text or as words."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(shlex.split(line) if isinstance(line, str) else line)
    return Outcome(code, out.getvalue(), err.getvalue())


def document(line: str) -> dict[str, Any]:
    """The JSON document of a command line."""
    found = typed(f"{line} --json")
    assert not found.err
    value: dict[str, Any] = json.loads(found.out)
    return value


def written(line: str, folder: Path) -> str:
    """The line with the files that it names."""
    jobs, snapshot, sweep, trace, tiny = (
        folder / name for name in ("jobs.toml", "snapshot.pickle", "sweep.toml", "trace.json", "tiny.json")
    )
    if "{jobs}" in line:
        jobs.write_text('gpus = 64\n[[jobs]]\nname = "a"\ngpus = 64\ndays = 2\n[[jobs]]\ngpus = 16\ndays = 1\n')
    if "{snapshot}" in line:
        events = [{"action": "alloc", "addr": 0, "size": 512, "stream": 0, "frames": []}]
        blocks = [{"address": 0, "size": 512, "requested_size": 512, "state": "active_allocated", "frames": []}]
        segment = {
            "device": 0,
            "address": 0,
            "total_size": 2048,
            "stream": 0,
            "segment_type": "small",
            "blocks": blocks,
        }
        snapshot.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [events]}))
    if "{sweep}" in line:
        sweep.write_text(
            'model = "qwen3-0.6b"\ngpu = "h100-sxm5-80gb"\ngpus = [1, 3]\nseq-len = 2048\nglobal-batch = 8\n'
            "pp = 1\ncp = 1\nmicro-batch = 1\n"
        )
    if "{tiny}" in line:
        tiny.write_text(json.dumps(TINY))
    if "{trace}" in line:
        trace.write_text(typed(f"{TRACED} --json").out)
    return line.format(
        jobs=jobs, snapshot=snapshot, sweep=sweep, trace=trace, tiny=tiny, folder=folder / "results"
    )  # fmt: skip
