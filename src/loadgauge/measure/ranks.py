"""A process that torchrun has started joins the others; any other is alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist


@contextlib.contextmanager
def join_ranks(device: str) -> Iterator[int]:
    """A process group over the ranks of torchrun, by NCCL on CUDA and gloo on a CPU; gives the rank, 0 without one."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield 0
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
