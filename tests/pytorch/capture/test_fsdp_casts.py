"""FSDP2 casts whole parameters as it gathers them, so that autocast has none to cast (docs/captured-dry-runs.md compares peaks)."""

from __future__ import annotations

from collections import Counter

import torch
from torch import distributed, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.training.training import training
from loadgauge.pytorch.capture.call import module_of
from loadgauge.pytorch.capture.requests.tuning import cast_by_fsdp
from loadgauge.pytorch.trace.torch_run import TorchRun


def test_the_residual_stream_is_in_16_bits_under_fsdp_alone() -> None:
    recipe = training("huggingface", "bf16-autocast")
    assert [recipe.under(zero).kernels.dtypes.residual for zero in (0, 1, 2, 3)] == [4, 4, None, None]
    assert [recipe.under(zero).precision.weight for zero in (0, 3)] == [4, 4]
    assert recipe.under(3).under(0).kernels == recipe.kernels


class Biased(nn.Module):
    """Blocks that add a float32 table to 16-bit values, and logits with a float32 bias, as BART's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("table", torch.zeros(5, 8))
        self.register_buffer("bias", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x + self.table).tanh()
        return (x + self.bias).softmax(-1)


def kept(module: nn.Module, x: torch.Tensor) -> tuple[Counter[tuple[tuple[int, ...], torch.dtype]], torch.dtype]:
    """What autograd saves in a forward, of activations; and the result's dtype."""
    found: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 3:
            found[tuple(tensor.shape), tensor.dtype] += 1
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        result = module(x)
    return found, result.dtype


def test_buffers_stay_in_float32_as_fully_shard_leaves_them() -> None:
    job = module_of(Biased, lambda b: torch.zeros(b, 5, 8), TorchRun.of(Job(model="", seq_len=1, precision="fp32")))
    cast = cast_by_fsdp(job)
    mine = kept(cast.build("cpu"), cast.inputs("cpu", None, b=2)[0][0])
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = Biased()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        theirs = kept(model, torch.zeros(2, 5, 8))
    finally:
        distributed.destroy_process_group()
    assert mine == theirs
    assert mine[1] == torch.float32
