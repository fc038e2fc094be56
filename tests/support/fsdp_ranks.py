"""One of two ranks that train a padding-free model sharded by FSDP2; run by `test_padfree_sharded.py`.

Arguments: the family, rank, file that the ranks meet at, file for the result.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from loadgauge.core.base.errors import ConfigError
from loadgauge.train import Collator, check, describe, enable, target_count
from padfree_families import Double, build, padded, ragged

ROWS = ([9, 1, 14], [4, 4])
"""Lengths of each rank's batch."""


def main(name: str, rank: int, meeting: str, result: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    rows = [ragged(lengths, seed=index) for index, lengths in enumerate(ROWS)]
    flat = [Collator()([{"input_ids": row, "labels": row} for row in own]) for own in rows]
    items = target_count(*flat)

    whole = build(name)  # padded, unsharded, both batches
    loss = sum(whole(**padded(own), num_items_in_batch=items, use_cache=False).loss for own in rows)
    loss.backward()

    model = enable(build(name))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    own = model(**flat[rank], num_items_in_batch=items).loss
    (2 * own).backward()  # FSDP divides by the ranks
    total = own.detach().clone()
    dist.all_reduce(total)
    worst = 0.0
    for (_, ours), (_, theirs) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        gradient: Any = ours.grad
        assert type(gradient).__name__ == "DTensor"
        difference = (gradient.full_tensor() - theirs.grad).abs().max() / theirs.grad.abs().max().clamp(min=1e-30)
        worst = max(worst, float(difference))
    try:
        enable(model)
    except ConfigError as error:
        refused = str(error)
    found = check(model, flat[0])  # the same on both ranks: each of its steps gathers the weights
    if rank == 0:
        told = {
            "loss": float((total - loss.detach()).abs() / loss.detach().abs()),
            "gradients": worst,
            "leak": found.leak.worst,
            "ok": found.ok,
            "how": describe(model),
            "refused": refused,
            "sharded": type(next(model.parameters())).__name__,
        }
        with open(result, "w", encoding="utf-8") as file:
            json.dump(told, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with Double():
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
    sys.stderr.flush()
    os._exit(
        0
    )  # at a usual exit, a thread of gloo that still closes its connection would end the process with an error
