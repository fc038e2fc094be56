"""Parameters of one rank, as a capture splits a model, against transformers' own sharding of it.

python tools/capture_ranks.py [RANKS] [type ...]    (2 ranks; all types with a causal head; no memory, no GPU, nothing is sent)
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from loadgauge.pytorch.capture.inputs.kinds import model_class
from loadgauge.pytorch.capture.requests.sharding import shard, splits_of
from small_models import small_config


def built(kind: str) -> Any:
    """A small model of a type, without memory."""
    config = small_config(kind, 2)
    with torch.device("meta"):
        return model_class(config)._from_config(config)


def reference(kind: str, axis: str, mesh: Any, ranks: int) -> int:
    """Parameters of the first rank, as transformers' styles shard them."""
    model = built(kind)
    more: dict[str, Any] = {"tp_size": ranks} if axis == "tp" else {"ep_size": ranks, "fsdp_size": ranks}
    plans = model._resolve_parallel_plans(DistributedConfig(**more))
    named = dict(model.named_parameters())
    for path, style in plans[0 if axis == "tp" else 1].items():
        if path in named:  # a tied one once
            holder, _, name = path.rpartition(".")
            ALL_PARALLEL_STYLES[style].shard_param(model.get_submodule(holder), name, mesh)
    model.tie_weights()
    return sum((one.to_local() if isinstance(one, DTensor) else one).numel() for one in model.parameters())


def result(kind: str, axis: str, mesh: Any, ranks: int) -> str:
    """How a type compares on an axis."""
    problems = list(splits_of(built(kind)).problems(**{axis: ranks}))
    if problems:
        return f"closed: {problems[0].partition(':')[2].partition(' for ')[0].strip() or problems[0]}"
    own = built(kind)
    shard(own, ranks if axis == "tp" else 1, ranks if axis == "ep" else 1)
    mine, theirs = sum(one.numel() for one in own.parameters()), reference(kind, axis, mesh, ranks)
    return "equal" if mine == theirs else f"differs: {mine} and {theirs}"


def main(kinds: list[str]) -> None:
    """Print what differs, and how many of each kind of result there are."""
    ranks = int(kinds.pop(0)) if kinds and kinds[0].isdecimal() else 2
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    counts: Counter[tuple[str, str]] = Counter()
    for kind in kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        for axis in ("tp", "ep"):
            try:
                found = result(kind, axis, mesh, ranks)
            except Exception as error:
                found = f"error: {type(error).__name__}: {str(error)[:80]}"
            if not found.startswith(("equal", "closed")):
                print(kind, axis, found, flush=True)
            counts[axis, found.partition(":")[0]] += 1
    for (axis, found), count in sorted(counts.items()):
        print(f"{axis}: {count} {found}")


if __name__ == "__main__":
    main(sys.argv[1:])
