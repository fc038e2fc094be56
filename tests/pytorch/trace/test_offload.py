"""What stays on the card with offload: the estimate's peak is that of PyTorch, traced, within 0.1 %.

FSDP2 with its own `CPUOffloadPolicy`, and saved tensors that are kept on the CPU but for parameters, as TRL's and torchtune's
`OffloadActivations` does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from test_gathered import SHAPES, config, how, peak, settings
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import CPUOffloadPolicy

from loadgauge import Layout, RecomputePolicy, estimate, from_dict
from loadgauge.core.definitions.hardware.host import Host
from loadgauge.core.definitions.training.optimizers import OPTIMIZERS
from loadgauge.pytorch.parallel.parallel import ParallelJob
from loadgauge.pytorch.trace.programs.jobs import ConfigJob
from loadgauge.pytorch.trace.trace import trace
from torch_runs import torch_run

TOLERANCE = 1e-3


class OnTheHost(ParallelJob):
    """Its FSDP2 has shards, gradients and the optimizer on the CPU."""

    more: ClassVar[dict[str, Any]] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}

    def _shared(self, model: Any, mesh: Any) -> Any:
        return super()._shared(model, mesh).to("cpu")


class SavedOnTheHost(ConfigJob):
    """What autograd keeps for backward is on the CPU, but for parameters."""

    @contextlib.contextmanager
    def prepared(self, mode: Any, device: str) -> Iterator[Callable[[Any], None]]:
        def pack(kept: Any) -> Any:
            return (
                kept if isinstance(kept, torch.nn.Parameter) or kept.device.type == "cpu" else (kept.device, kept.cpu())
            )

        def unpack(packed: Any) -> Any:
            return packed[1].to(packed[0]) if isinstance(packed, tuple) else packed

        with super().prepared(mode, device) as step:

            def hosted(observer: Any) -> None:
                with saved_tensors_hooks(pack, unpack):
                    step(observer)

            yield hosted


@pytest.mark.parametrize(
    ("framework", "precision", "shape", "recompute", "zero", "world"),
    [
        ("torchtitan", "bf16-autocast", "layers", "none", 3, 2),
        ("torchtitan", "bf16-autocast", "layers", "full", 2, 8),
        ("torchtitan", "bf16-autocast", "ends", "none", 3, 2),
        ("torchtitan", "bf16-autocast", "ends", "full", 2, 8),
        ("torchtitan", "bf16-autocast", "tied", "none", 3, 8),
        ("huggingface", "bf16-pure", "tied", "none", 3, 2),
        ("huggingface", "bf16-pure", "layers", "full", 3, 8),
        ("huggingface", "bf16-pure", "activations", "full", 3, 2),
        ("huggingface", "fp32", "ends", "none", 3, 2),
    ],
)
def test_fsdp_with_weights_and_gradients_on_the_host(
    framework: str, precision: str, shape: str, recompute: str, zero: int, world: int
) -> None:
    keys = dict(SHAPES[shape])
    s = keys.pop("seq_len")
    run = torch_run(
        optimizer="adamw",
        precision=precision,
        seq_len=s,
        gpus=world,
        zero=zero,
        global_batch=world,
        recompute=recompute,
    )
    traced = trace(OnTheHost(config(keys), settings(run, framework)), "cuda", gpus=world)
    layout = Layout(dp=world, zero=zero, seq_len=s, global_batch=world, recompute=RecomputePolicy(mode=recompute))  # type: ignore[arg-type]
    kind = msgspec.structs.replace(how(framework, precision, zero), offload="all")
    memory = estimate(from_dict(config(keys).to_dict()), layout, kind).memory
    assert peak(memory) == pytest.approx(traced.peak.total, rel=TOLERANCE)
    weights = sum(moment.parts["weights"] + moment.parts["gradients"] for moment in memory.moments)
    assert weights == 0


@pytest.mark.parametrize(
    ("shape", "recompute", "word", "tolerance"),
    [
        ("activations", "full", "checkpoints", TOLERANCE),
        ("layers", "full", "all", 2 * TOLERANCE),
        ("loss", "full", "all", TOLERANCE),
        ("loss", "none", "all", TOLERANCE),
        # The tensor that query, key and value share comes back three times, here once.
        ("activations", "none", "all", 10 * TOLERANCE),
    ],
)
def test_activations_on_the_host(shape: str, recompute: str, word: str, tolerance: float) -> None:
    keys = dict(SHAPES[shape])
    s = keys.pop("seq_len")
    run = torch_run(optimizer="sgd", precision="bf16-pure", seq_len=s, recompute=recompute)
    traced = trace(SavedOnTheHost(config(keys), run), "cuda")
    kind = msgspec.structs.replace(
        how("huggingface", "bf16-pure", 0), optimizer=OPTIMIZERS["sgd"], host=Host(activations=word)  # type: ignore[arg-type]
    )  # fmt: skip
    layout = Layout(seq_len=s, recompute=RecomputePolicy(mode=recompute))  # type: ignore[arg-type]
    memory = estimate(from_dict(config(keys).to_dict()), layout, kind).memory
    assert peak(memory) == pytest.approx(traced.peak.total, rel=tolerance)
    assert memory.host > 0
    assert memory.pinned == memory.host
