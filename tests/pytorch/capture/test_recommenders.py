"""Recommenders by name: their parameters, memory beside a real step on the CPU, and what several ranks share and send."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile

import loadgauge
from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.capture.inputs.libraries import library_keys
from loadgauge.pytorch.capture.inputs.recommenders import DLRM, HSTU

SMALL = "dlrm:tables=8,rows=20K,pool=4,dim=64,bottom=128-64,top=256-1"


def live(module: nn.Module, *given: Any) -> int:
    """The most bytes that a step makes on the CPU beside parameters, in its second time."""
    optimizer = torch.optim.Adagrad([one for name, one in module.named_parameters() if name != "tables.weight"])

    def step() -> None:
        module(*given).backward()
        optimizer.step()
        optimizer.zero_grad()

    nn.init.normal_(module.tables.weight)  # has no gradient: its rows are updated in backward
    step()
    with profile(profile_memory=True) as seen:
        step()
    results: Any = seen.profiler
    total = most = 0
    for event in results.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    return most


def predicted(memory: Any) -> Any:
    """The most bytes of tensors in a step."""
    return max(sum(moment["parts"].values()) - moment["parts"]["outside"] for moment in memory["moments"])


def test_published_sizes() -> None:
    rows = library_keys("dlrm-v2")["rows"]
    assert rows == 204_184_588  # as the benchmark's tables have, which are capped at 40 M rows
    with torch.device("meta"):
        made = DLRM(**{key: value for key, value in library_keys("dlrm-v2").items() if key[0] != "_"})
    width, rank = 27 * 128, 512
    towers = (
        sum(a * b + b for a, b in ((13, 512), (512, 256), (256, 128)))
        + 3 * (2 * width * rank + width)
        + sum(a * b + b for a, b in ((width, 1024), (1024, 1024), (1024, 512), (512, 256), (256, 1)))
    )
    assert sum(one.numel() for one in made.parameters()) == rows * 128 + towers + 1  # and the anchor of the tables


@pytest.mark.parametrize("batch", [512, 3000])
def test_memory_is_that_of_a_step_on_the_cpu(batch: int) -> None:
    memory = loadgauge.estimate(SMALL, micro_batch=batch).to_dict()["memory"]
    module = DLRM(8 * 20_000, 8, 64, 13, (128, 64), (256, 1), 0, 1)
    given = torch.randn(batch, 13), torch.randint(0, 20_000, (batch * 32,)), torch.rand(batch)
    states = memory["largest"]["optimizer"]["bytes"]
    dense = 4 * sum(one.numel() for name, one in module.named_parameters() if name != "tables.weight")
    assert states == 4 * 160_000 + dense  # a number for each row, and Adagrad's of the rest
    weights = 4 * sum(one.numel() for one in module.parameters())
    whole = live(module, *given) + weights + states + sum(one.nbytes for one in (*given, module.pairs))
    assert predicted(memory) == pytest.approx(whole, rel=0.02)


def test_sequences_of_items() -> None:
    name = "hstu:rows=50K,dim=64,layers=2,heads=2,qk=32,linear=32,negatives=16"
    memory = loadgauge.estimate(name, micro_batch=8, seq_len=128).to_dict()["memory"]
    module = HSTU(50_000, 64, 2, 2, 32, 32, 16)
    given = torch.randint(0, 50_000, (8, 128)), torch.randint(0, 50_000, (8, 128, 16))
    weights = 4 * sum(one.numel() for one in module.parameters())
    whole = live(module, *given) + weights + memory["largest"]["optimizer"]["bytes"] + sum(one.nbytes for one in given)
    assert predicted(memory) == pytest.approx(whole, rel=0.02)


def test_ranks_share_the_tables_and_exchange_sums() -> None:
    one, eight = (
        loadgauge.estimate(SMALL, micro_batch=1024, gpu="h100", gpus=gpus).to_dict()["memory"] for gpus in (1, 8)
    )
    table = 4 * 160_000 * 64
    assert one["parts"]["weights"] - eight["parts"]["weights"] == table * 7 // 8
    assert one["parts"]["optimizer"] - eight["parts"]["optimizer"] == 4 * 160_000 * 7 // 8


def test_what_it_takes_is_named() -> None:
    with pytest.raises(ConfigError, match="width is none of tables, rows, pool, dim"):
        loadgauge.estimate("dlrm:width=8")
