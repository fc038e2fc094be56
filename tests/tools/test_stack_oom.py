"""A sample of `python -m stack.oom`: real Trainer on a simulated card that is too small, what `why` says, and its remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadgauge.core.base.units import MIB

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from stack.limit import segment, sized
from stack.oom import SCRIPTS, fields_of, script, scripts

TOOLS = Path(__file__).parents[2] / "tools"
SAMPLE = (("step", "optimizer=adamw_torch,precision=fp32,checkpointing=non-reentrant,micro_batch=1,seq_len=64"),)
"""What transformers and accelerate do alone."""


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "words"), SAMPLE)
@pytest.mark.long
def test_why_names_phase_and_tensor_and_its_remedy_fits(phase: str, words: str) -> None:
    code = (
        "import sys; from stack.oom import judged, script; found = judged(script(sys.argv[1], sys.argv[2], 0.999));"
        " print(found.phase_right, found.tensor_right, found.fits)"
    )
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(TOOLS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, phase, words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split()[-3:] == ["True", "True", "True"], done.stdout[-500:] + done.stderr[-2000:]


def test_sizes_are_those_of_the_allocators_error() -> None:
    """c10/cuda/CUDACachingAllocator.cpp: `get_allocation_size` and `format_size`."""
    asked = {1: "2.00 MiB", MIB: "2.00 MiB", MIB + 1: "20.00 MiB", 10 * MIB: "10.00 MiB", 10 * MIB + 1: "12.00 MiB"}
    assert {nbytes: sized(segment(nbytes)) for nbytes in asked} == asked


def test_there_are_scripts_for_every_phase() -> None:
    assert len(scripts()) >= 20
    assert {phase for phase, _ in SCRIPTS} >= {"forward", "loss", "backward", "clip", "step", "evaluation", "saving"}


def test_flags_are_read_as_fields() -> None:
    assert fields_of("--recompute full --qlora --no-pin-memory") == {
        "recompute": "full",
        "qlora": True,
        "pin_memory": False,
    }
    assert script("loss", "micro_batch=1", 0.5).case.micro_batch == 1
