"""Models that are parallel in several ways. Run with numbers of ranks, each followed by its ways, it forks the ranks and
says what each really allocates and sends."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from loadgauge.pytorch.trace.subprocess import DEFAULT_KEEP

H, LAYERS, TOKENS, DEVICE = 128, 3, 64, "cpu"


def layers_of_llama(name: str) -> int:
    """Four where stages share them out, one for each in the most; else a first, one between and a last."""
    return 4 if "pp" in SHARED[name][1] else 3


# -- scripts that are parallel by themselves ---------------------------------------------------------------------------


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


SCRIPTS = {one.__name__: one for one in (fsdp, fsdp_checkpointed, tensor_parallel, ddp)}


# -- a model of transformers, shared out by flags ----------------------------------------------------------------------

SHARED: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "zero 3": (4, {}, {}),
    "zero 2, selective": (2, {"zero": 2}, {"recompute": "full", "keep": DEFAULT_KEEP}),
    "replicas": (4, {"replicas": 2}, {"recompute": "full"}),
    "whole copies": (2, {"zero": 0}, {"micro_batches": 2}),
    "tensors": (2, {"tp": 2}, {}),
    "tensors and sequence, zero 3": (4, {"tp": 2, "sequence_parallel": True}, {"recompute": "full"}),
    "1f1b": (4, {"pp": 4}, {"micro_batches": 6}),
    "gpipe": (2, {"pp": 2, "schedule": "gpipe"}, {"micro_batches": 3}),
    "interleaved": (2, {"pp": 2, "vpp": 2, "schedule": "interleaved"}, {"micro_batches": 4}),
    "stages and tensors": (4, {"pp": 2, "tp": 2, "sequence_parallel": True}, {"micro_batches": 2}),
    "stages and zero 3": (4, {"pp": 2, "stage_layers": "1,3"}, {"micro_batches": 2}),
}
"""By name: how many ranks, how they share, how they train."""


def shared(name: str, rank: int) -> Any:
    """A small Llama, as rank `rank` has it."""
    from transformers import LlamaConfig

    from loadgauge.pytorch.parallel.parallel import ParallelJob
    from torch_runs import torch_run

    size, parallel, settings = SHARED[name]
    dp = size // (parallel.get("tp", 1) * parallel.get("pp", 1))
    config = LlamaConfig(
        hidden_size=64, intermediate_size=176, num_attention_heads=8, num_key_value_heads=4,
        num_hidden_layers=layers_of_llama(name), vocab_size=512, max_position_embeddings=256,
        tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    batch = {"global_batch": settings.get("micro_batches", 1) * dp}
    how = {key: value for key, value in settings.items() if key != "micro_batches"}
    fields = {"zero": 3, **parallel, **batch, **how}
    run = torch_run(rank, optimizer="adamw-loop", precision="fp32", seq_len=64, gpus=size, **fields)
    return ParallelJob(config, run, name)


# -- what really happens -----------------------------------------------------------------------------------------------


class Log(TorchDispatchMode):
    """Each collective, with the bytes of the largest side and the ranks of its group."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func._opname
        if func.namespace in ("c10d", "_c10d_functional") and not any(
            word in name for word in ("wait", "barrier", "wrap")
        ):
            flat = [x for x in torch.utils._pytree.tree_leaves((args, out)) if isinstance(x, torch.Tensor)]
            sizes = [sum(x.nbytes for x in torch.utils._pytree.tree_leaves(one) if isinstance(x, torch.Tensor))
                     for one in (*args, out)]  # fmt: skip
            assert flat
            self.calls.append((name, max(sizes), _group(args)))
        return out


def _group(args: Any) -> int:
    for one in args:
        if isinstance(one, torch.ScriptObject):
            with contextlib.suppress(RuntimeError, TypeError):
                return int(dist.ProcessGroup.unbox(one).size())
        if isinstance(one, str) and one not in ("sum", "avg", "max"):
            return int(torch._C._distributed_c10d._resolve_process_group(one).size())
    return 0


PATIENCE = 0.004
"""Gloo's threads hold on to the tensors of a collective for a moment after it is done [s]."""


def patient() -> None:
    """Whoever waits for a collective waits until gloo's thread has let go of its tensors too."""
    import torch.distributed._functional_collectives as functional

    def longer(wait: Any) -> Any:
        def waits(*args: Any) -> Any:
            result = wait(*args)
            time.sleep(PATIENCE)
            return result

        return waits

    dist.Work.wait = longer(dist.Work.wait)
    functional.wait_tensor = longer(functional.wait_tensor)
    functional.AsyncCollectiveTensor.trigger_wait = longer(functional.AsyncCollectiveTensor.trigger_wait)


class Unseen:
    """In the place of a tracker and its observer."""

    suspended = 0

    def __init__(self) -> None:
        self.tracker = self

    def claim(self, *_: Any) -> None: ...
    def name(self, *_: Any) -> None: ...


@contextlib.contextmanager
def prepared(way: str) -> Any:
    """A function that trains one step."""
    if way in SCRIPTS:
        yield SCRIPTS[way]()
        return
    job = shared(way, dist.get_rank())
    with job.prepared(None, "cpu") as step:
        job.introduce(Unseen())
        yield lambda: step(None)


def peak(profiler: Any) -> tuple[int, int]:
    """The most that was allocated in a `window`, of all that was allocated since the profiler began: without and with
    what gloo takes for itself inside a collective (a second copy of what it gathers, a copy of what it scatters).

    Gloo's threads do not report what they free when they are the last to hold it: that is known when its place is
    given out again. Until then it counts, so of several windows the least is what is closest.
    """
    waiting = [(event, False) for event in profiler.profiler.kineto_results.experimental_event_tree()]
    changes: list[tuple[int, int, int, bool]] = []
    while waiting:
        event, inside = waiting.pop()
        inside = inside or event.name.startswith(("c10d::", "gloo:"))
        waiting.extend((child, inside) for child in event.children)
        if event.typed[0] == torch._C._profiler._EventType.Allocation:
            changes.append((event.start_time_ns, event.typed[1].alloc_size, event.typed[1].ptr, inside))
        elif event.name == "window":
            changes += [(event.start_time_ns, 0, 0, False), (event.end_time_ns, 0, 1, False)]
    held: dict[int, tuple[int, bool]] = {}
    live, gloos, inside_window = 0, 0, False
    highest: list[tuple[int, int]] = []
    for _, change, place, inside in sorted(changes, key=lambda one: one[0]):
        if not change:
            inside_window = not place
            if inside_window:
                highest.append((0, 0))
        elif change > 0 or held.get(place, (0, False))[0] == -change:
            size, was_gloos = held.pop(place, (0, False))
            live, gloos = live - size * (not was_gloos), gloos - size * was_gloos
            if change > 0:
                held[place] = change, inside
                live, gloos = live + change * (not inside), gloos + change * inside
        if inside_window:
            without, everything = highest[-1]
            highest[-1] = max(without, live), max(everything, live + gloos)
    return min(one for one, _ in highest), min(one for _, one in highest)


def measured(way: str, windows: int) -> tuple[tuple[int, int], list[tuple[str, int, int]]]:
    """The least peak of so many steps that are not the first, and the calls of one more."""
    with contextlib.ExitStack() as stack:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            step = stack.enter_context(prepared(way))
            gc.collect()
            step()
            dist.barrier()
            for _ in range(windows):
                with torch.profiler.record_function("window"):
                    step()
        with Log() as log:
            step()
    return peak(profiler), log.calls


def main(rank: int, size: int, meeting: str, ways: list[str], say: Callable[[bytes], Any]) -> None:
    """One rank of so many, which meet at a file."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    torch.set_num_threads(1)
    patient()
    for way in ways:
        # DDP exchanges its buckets once, in no window that comes again: the least is taken of whole runs instead.
        runs = [measured(way, 1) for _ in range(4)] if way == "ddp" or "copies" in way else [measured(way, 2)]
        highest, calls = min(one for one, _ in runs), runs[-1][1]
        said = {"way": way, "rank": dist.get_rank(), "peak": highest[0], "with_gloo": highest[1], "calls": calls}
        say(f"RANK {json.dumps(said)}\n".encode())  # at once: ranks share the pipe
        dist.barrier()
    dist.destroy_process_group()


def warm() -> None:
    """What every rank imports is imported once, and never looked through for garbage."""
    import transformers.models.llama.modeling_llama  # noqa: F401

    gc.collect()
    gc.freeze()


def fork(size: int, ways: list[str]) -> int:
    """Ranks that are forked; 1 where one of them fails."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(size):
            child = os.fork()
            if not child:
                code = 1
                try:
                    main(rank, size, f"{folder}/meeting", ways, lambda text: os.write(1, text))
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(child)
        return int(any(os.waitpid(child, 0)[1] for child in children))


if __name__ == "__main__":
    warm()
    sys.exit(max(fork(int(size), ways.split(";")) for size, ways in zip(sys.argv[1::2], sys.argv[2::2], strict=True)))
