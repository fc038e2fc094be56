"""One process that plays a rank against real processes: what is sent, and what each rank holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks

from loadgauge.errors import ConfigError
from loadgauge.measure.collectives import plain
from loadgauge.measure.distributed import World
from loadgauge.measure.script import FunctionJob
from loadgauge.measure.trace import Trace, trace

ROOT = Path(__file__).parents[2]
LAYER = 4 * (2 * ranks.H + 2 * 4 * ranks.H**2 + 5 * ranks.H)
"""Bytes of a layer's parameters."""


def dry(way: str, size: int, rank: int = 0) -> Trace:
    return trace(FunctionJob(getattr(ranks, way), way), "cpu", world=World(size, rank))


def real(way: str, size: int) -> list[dict[str, Any]]:
    """What every rank says, from processes of their own."""
    paths = [str(ROOT / part) for part in ("src", "tests", "tests/oracle")]
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size),
            str(Path(ranks.__file__)), way,
        ],
        capture_output=True, text=True, check=False, timeout=180,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    texts = done.stdout.split("RANK ")[1:]
    assert len(texts) == size, done.stderr[-800:]
    return [json.JSONDecoder().raw_decode(text)[0] for text in texts]


@pytest.mark.parametrize(
    ("way", "size"),
    [("fsdp", 4), ("fsdp_checkpointed", 2), ("tensor_parallel", 4), ("ddp", 2)],
)
def test_collectives_and_peaks_are_those_of_real_processes(way: str, size: int) -> None:
    found = dry(way, size)
    said = real(way, size)
    for one in said:
        calls: dict[str, list[int]] = {}
        for kind, nbytes in one["calls"]:
            calls.setdefault(plain(kind), []).append(nbytes)
        assert {sent.kind: (sent.calls, sent.payload, sent.ranks) for sent in found.collectives} == {
            kind: (len(sizes), sum(sizes), size) for kind, sizes in calls.items()
        }
    least = min(one["peak"] for one in said)
    # gloo's threads let go of a gathered layer when they come to it, after PyTorch has.
    late = LAYER * (1 + 1 / size) if way.startswith("fsdp") else 0
    assert found.peak.total * (1 - 1e-3) <= least <= found.peak.total * (1 + 1e-3) + late


@pytest.mark.parametrize("size", [8, 64, 1024])
def test_fsdp_at_any_size(size: int) -> None:
    """Each rank holds its share; every layer is gathered twice and its gradient scattered once."""
    found = dry("fsdp", size, rank=size - 1)
    sent = {one.kind: one for one in found.collectives}
    shared = sum(-(-rows // size) * size * columns for rows, columns in SHAPES) * 4
    assert (sent["all_gather"].calls, sent["reduce_scatter"].calls) == (2 * ranks.LAYERS, ranks.LAYERS)
    assert sent["all_gather"].payload == 2 * ranks.LAYERS * shared
    assert sent["reduce_scatter"].payload == ranks.LAYERS * shared
    assert {one.ranks for one in found.collectives} == {size}
    assert found.flops.total == dry("fsdp", 1).flops.total


SHAPES = [(ranks.H, 1), (ranks.H, 1), (4 * ranks.H, ranks.H), (4 * ranks.H, 1), (ranks.H, 4 * ranks.H), (ranks.H, 1)]
"""Parameters of a layer; FSDP shares out rows, and fills up what does not divide."""


@pytest.mark.parametrize("size", [2, 8])
def test_flops_of_tensor_parallel_ranks_are_shared(size: int) -> None:
    assert dry("tensor_parallel", size).flops.total * size == dry("tensor_parallel", 1).flops.total


def test_checkpointing_runs_layers_again_and_keeps_less() -> None:
    plain_one, again = dry("fsdp", 4), dry("fsdp_checkpointed", 4)
    assert again.saved_nbytes < plain_one.saved_nbytes
    assert again.flops.total > plain_one.flops.total
    assert again.peak.total < plain_one.peak.total


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="rank 4 is not one of 4"):
        dry("fsdp", 4, rank=4)
