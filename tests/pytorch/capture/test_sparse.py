"""Recommendation embeddings, whose gradients are the rows that were looked up: captured, traced, and run for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import profile

import loadgauge
from loadgauge.core.base.errors import Error, NotModelled
from loadgauge.pytorch.capture.capture import compare
from loadgauge.pytorch.capture.record import record
from loadgauge.pytorch.record.allocations import GRADIENTS
from loadgauge.pytorch.record.recording import STEPS

TABLES = 700, 500


class Recommender(nn.Module):
    """Dense features and rows of tables, every pair multiplied (as DLRM, arXiv 1906.00091)."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, 16, mode="sum", sparse=True) for rows in TABLES)
        self.user = nn.Embedding(300, 16, sparse=True)
        self.top = nn.Linear(16 + 16, 1)

    def forward(self, dense: Any, ids: Any, users: Any) -> Any:
        low = self.bottom(dense)
        rows = torch.stack([low, *(bag(one) for bag, one in zip(self.bags, ids, strict=True)), self.user(users)], 1)
        return self.top(torch.cat([low, torch.bmm(rows, rows.transpose(1, 2)).flatten(1)], 1))


def rows(b: int, s: int) -> tuple[Any, ...]:
    return torch.zeros(b, 13), [torch.zeros(b, s, dtype=torch.long) for _ in TABLES], torch.zeros(b, dtype=torch.long)


def test_rows_that_were_looked_up_are_gradients() -> None:
    captures = loadgauge.capture(Recommender, rows, optimizer="sgd")
    found = captures.at(b=6, s=4)
    assert not found.plain
    sizes = {"b": 9, "s": 7}
    assert found.holds(**sizes)
    plain = record(captures.job, sizes)
    compare(found, plain, sizes)

    model = Recommender()
    dense, ids, users = rows(**sizes)
    model(dense, ids, users).mean().backward()
    given = {one.untyped_storage().data_ptr() for one in (*ids, users)}
    storages = []
    for gradient in (parameter.grad for parameter in model.parameters()):
        assert gradient is not None
        sparse = gradient.layout is torch.sparse_coo
        parts = (gradient._indices(), gradient._values()) if sparse else (gradient,)
        storages += [one.untyped_storage() for one in parts]
    real = sum(one.nbytes() for one in storages if one.data_ptr() not in given)  # bags' ids are those that were given
    mine = sum(one.nbytes for one in plain.stream.records if one.category == GRADIENTS)
    assert mine == STEPS * real < 4 * STEPS * sum(one.numel() for one in model.parameters()) // 2


@pytest.mark.parametrize("kind", ["SparseAdam", "Adagrad"])
def test_a_step_on_rows_allocates_what_pytorch_does(kind: str) -> None:
    """Every allocation and release of a step, but single numbers, as PyTorch's profiler sees it; equal rows are joined before."""
    count, width = 50, 24

    def build() -> Any:
        table = nn.Embedding(700, width)
        return table, getattr(torch.optim, kind)(table.parameters())

    def step(made: Any, ids: Any, values: Any) -> None:
        table, optimizer = made
        table.weight.grad = torch.sparse_coo_tensor(ids, values, table.weight.shape, is_coalesced=True)
        optimizer.step()

    def given(n: int) -> Any:
        return torch.arange(n)[None], torch.ones(n, width)

    made, ids_and_values = build(), given(count)
    step(made, *ids_and_values)
    with profile(profile_memory=True) as seen:
        step(made, *ids_and_values)
    results: Any = seen.profiler
    sizes = [one.nbytes() for one in results.kineto_results.events() if one.name() == "[memory]"]
    run = record(loadgauge.capture(build, given, step=step).job, {"n": count})
    mine = [change for change in run.changes[run.ops[run.second].events :] if abs(change) > 8]
    assert mine == [one for one in sizes if abs(one) > 8]
    assert max(mine) == 4 * width * count


def test_adagrad_joins_rows_that_are_taken_to_be_different() -> None:
    captures = loadgauge.capture(Recommender, rows, optimizer="adagrad")
    found = captures.at(b=6, s=4)
    assert not found.plain
    assert any("no two ids" in one for one in found.assumed)
    sizes = {"b": 9, "s": 7}
    assert found.holds(**sizes)
    compare(found, record(captures.job, sizes), sizes)
    assert not found.holds(b=60, s=12)  # more ids than a table has rows


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum"])
def test_what_joins_equal_rows_is_refused_with_the_table(optimizer: str) -> None:
    with pytest.raises(NotModelled, match=r"bags\.0: sparse gradients with .*sparse=False"):
        loadgauge.capture(Recommender, rows, optimizer=optimizer).at(b=6, s=4)


OWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20_000, 64, mode="sum", sparse=True) for _ in range(4))
        self.top = nn.Linear(256, 1)

    def forward(self, *ids):
        return self.top(torch.cat([bag(own) for bag, own in zip(self.bags, ids)], 1))

def batch(b):
    return tuple(torch.zeros(b, 4, dtype=torch.long) for _ in range(4))
"""


def test_an_estimate_has_rows_for_gradients_and_whole_tables_for_states(tmp_path: Path) -> None:
    """Of 4 tables, the rows of 4 ids a sample each lie there in the step; Adagrad joins those of a table at a time."""
    (tmp_path / "own.py").write_text(OWN)
    table, rows, batch = 4 * 20_000 * 64 * 4, 4 * 64 * 4, 4096
    for optimizer, states, joined in (("sgd", 0, 0), (None, table, 3)):
        fields: Any = {} if optimizer is None else {"optimizer": optimizer}
        memory = loadgauge.estimate(f"{tmp_path}/own.py:Model", micro_batch=batch, **fields).to_dict()["memory"]
        assert memory["largest"]["gradients"]["bytes"] == 4 * 257
        assert memory["largest"]["optimizer"]["bytes"] == states + 4 * 257 * bool(states)
        ids = 4 * batch * 4 * 8
        step = next(moment for moment in memory["moments"] if moment["name"] == "optimizer step")
        assert step["parts"]["transient"] == pytest.approx((4 + joined) * batch * rows + ids, rel=0.005)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"optimizer": "adamw"}, "with adamw"),
        ({"global_batch": 16}, "micro-batches"),
        ({"zero": 2, "gpus": 2}, "zero"),
    ],
)
def test_an_estimate_names_what_takes_no_rows(fields: Any, why: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(Error, match=f"{why}.*sparse|sparse.*{why}"):
        loadgauge.estimate(f"{tmp_path}/own.py:Model", micro_batch=8, **fields)
