"""Sharded by FSDP2 over two processes: loss and gradients of the padded, unsharded model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SUPPORT = Path(__file__).parents[1] / "support"
RANKS = SUPPORT / "fsdp_ranks.py"


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.long
def test_two_ranks_make_the_gradients_of_one_padded_model(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    paths = [str(SUPPORT), str(SUPPORT.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANKS), "llama", str(rank), str(tmp_path / "meeting"), str(result)],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said[0] + said[1]
    found = json.loads(result.read_text(encoding="utf-8"))
    assert found["sharded"] == "DTensor"
    assert found["loss"] <= 1e-12
    assert found["gradients"] <= 1e-12
    assert found["leak"] == 0
    assert found["ok"]
    assert "attention layers" in found["how"]
    assert "sharded weights: enable it before fully_shard" in found["refused"]
