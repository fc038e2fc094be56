"""What a rank has of a model under transformers' plans, against transformers' own sharding of it; and what cannot be split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import loadgauge
from loadgauge.core.base.errors import NotModelled
from loadgauge.pytorch.capture.inputs.kinds import model_class
from loadgauge.pytorch.capture.lists.blocks import blocks
from loadgauge.pytorch.capture.lists.listed import Ragged
from loadgauge.pytorch.capture.lists.listing import Lister
from loadgauge.pytorch.capture.recognise import recognised
from loadgauge.pytorch.capture.record import record
from loadgauge.pytorch.capture.requests.sharding import mark_experts, shard, splits_of
from small_models import small_config

RANKS = 2


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Two ranks, of which this process is the first; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def built(kind: str) -> Any:
    config = small_config(kind, 4)  # DeepSeek-V3 has dense layers first
    with torch.device("meta"):
        return model_class(config)._from_config(config)


def sizes(model: nn.Module) -> dict[str, int]:
    """Elements of each parameter that this rank has."""
    return {
        name: (one.to_local() if isinstance(one, DTensor) else one).numel() for name, one in model.named_parameters()
    }


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "deepseek_v3"])
def test_a_tensor_parallel_rank_is_that_of_transformers(kind: str, mesh: Any) -> None:
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    own, theirs, whole = built(kind), built(kind), sizes(built(kind))
    shard(own, RANKS, 1)
    plan, _, _ = theirs._resolve_parallel_plans(DistributedConfig(tp_size=RANKS))
    apply_tensor_parallelism(theirs, mesh, plan)
    assert sizes(own) == sizes(theirs)
    # What the ranks have together is the whole, and what each has whole.
    together = {name: one.numel() * getattr(one, "shards", 1) for name, one in own.named_parameters()}
    assert together == whole


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_an_expert_parallel_rank_is_that_of_transformers(kind: str, mesh: Any) -> None:
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    own, theirs = built(kind), built(kind)
    mark_experts(own)
    shard(own, 1, RANKS)
    _, plan, _ = theirs._resolve_parallel_plans(DistributedConfig(ep_size=RANKS, fsdp_size=RANKS))
    named = dict(theirs.named_parameters())
    for path in plan.keys() & named.keys():
        holder, _, name = path.rpartition(".")
        ALL_PARALLEL_STYLES[plan[path]].shard_param(theirs.get_submodule(holder), name, mesh)
    assert sizes(own) == sizes(theirs)
    split = {name for name, one in own.named_parameters() if getattr(one, "shards", 1) > 1}
    assert split == {name for name, one in own.named_parameters() if getattr(one, "of_experts", False)} != set()


def test_what_cannot_be_split_says_why() -> None:
    assert splits_of(built("bitnet")).tp_closed.startswith("no plan of tensor parallelism is stated")
    mixture = splits_of(built("mixtral"))
    assert list(mixture.problems(ep=3)) == [
        f"num_experts over ep: {mixture.experts} over 3 leaves {mixture.experts % 3}"
    ]
    assert list(mixture.problems(tp=2, ep=2)) == ["tp = 2, ep = 2: captured experts are divided by one of both"]
    assert list(mixture.problems()) == []
    with pytest.raises(NotModelled, match="leaves"):
        shard(built("mixtral"), 1, 3)


def test_a_term_that_is_linear_in_neither_is_refused() -> None:
    batch = Ragged(tokens=30, pairs=500, sequences=2, longest=20)
    assert [batch.of(term) for term in ("1", "b", "s", "b*s", "b*s*s", "s*s")] == [1, 2, 20, 30, 500, 400]
    one = Ragged(tokens=30, pairs=900, sequences=1, longest=40, single=True)
    assert [one.of(term) for term in ("1", "s", "s*s")] == [1, 30, 900]
    for term in ("b*b", "b*s*s*s", "b*((s)//(2))"):
        with pytest.raises(NotModelled, match="linear neither in tokens nor in query-key pairs"):
            batch.of(term)


class Block(nn.Module):
    """Attention and an MLP; `between`: a module before each of their last matrices."""

    def __init__(self, between: type[nn.Module]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.norm = nn.LayerNorm(32)
        self.first, self.second = (nn.Softmax(-1) if between is nn.Softmax else between(width) for width in (32, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (one(y).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        context = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(self.first(context.transpose(1, 2).flatten(2)))
        y = self.norm(x)
        return x + self.down(self.second(nn.functional.silu(self.gate(y)) * self.up(y)))


class Net(nn.Module):
    def __init__(self, between: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block(between) for _ in range(2)), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def columns(b: int, s: int) -> torch.Tensor:
    return torch.empty(b, s, 32)


@pytest.mark.parametrize("between", [nn.Identity, nn.LayerNorm, nn.Softmax])
def test_matrices_that_follow_one_another_are_recognised(between: Any) -> None:
    def make() -> nn.Module:
        return Net(between)

    run = record(loadgauge.capture(make, columns).job, {"b": 2, "s": 16})
    found = recognised(Lister(run, blocks(make()), None, 4))
    split = {f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "gate", "up")}
    split |= {f"blocks.*.{name}": "rowwise" for name in ("o", "down")}
    # A norm or a softmax over columns needs all of them on each rank.
    assert found == (split if between is nn.Identity else {})
