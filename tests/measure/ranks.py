"""Small models, parallel in several ways. Run under torchrun, it says what each rank really allocates and sends."""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

H, LAYERS, TOKENS, DEVICE = 128, 3, 64, "cpu"


class Layer(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(H), nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.checkpointed = checkpointed

    def inner(self, x: Any) -> Any:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: Any) -> Any:
        if self.checkpointed:
            return x + checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False)
        return x + self.inner(x)


def model(checkpointed: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(checkpointed) for _ in range(LAYERS)))


def train(net: nn.Module) -> Any:
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    x = torch.ones(TOKENS, H, device=DEVICE)

    def step() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step.net, step.optimizer = net, optimizer  # type: ignore[attr-defined]
    return step


def fsdp(checkpointed: bool = False) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = model(checkpointed)
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return train(net)


def fsdp_checkpointed() -> Any:
    return fsdp(True)


def tensor_parallel() -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = model()
    for layer in net:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(net)


def ddp() -> Any:
    return train(nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=100))


class Log(TorchDispatchMode):
    """Each collective, with the bytes of the largest side."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if (
            func.namespace in ("c10d", "_c10d_functional")
            and "wait" not in func._opname
            and "barrier" not in func._opname
        ):
            if "wrap" in func._opname:
                return out
            flat = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            self.calls.append((func._opname, max(x.nbytes for x in flat)))
        return out


def held(net: nn.Module, optimizer: Any) -> int:
    """Bytes of this rank's parameters and states."""
    tensors = [*net.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
    buckets = sum(one.nbytes for one in net.parameters()) if isinstance(net, nn.parallel.DistributedDataParallel) else 0
    return buckets + sum(getattr(one, "_local_tensor", one).untyped_storage().nbytes() for one in tensors)


def main() -> None:
    from torch_peak import _peak

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    step = globals()[sys.argv[1]]()
    step()
    gc.collect()
    peaks = []
    for _ in range(5):  # gloo's threads hold on to tensors for as long as they like: the least is what PyTorch needs
        dist.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        peaks.append(_peak(profiler))
    with Log() as log:
        step()
    base = held(step.net, step.optimizer) + TOKENS * H * 4
    said = {"rank": dist.get_rank(), "peak": base + min(peaks), "calls": log.calls}
    os.write(1, f"RANK {json.dumps(said)}\n".encode())  # at once: ranks share the pipe
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
