"""What FSDP gathers and reduces in a step: as predicted, and as a rank of a dry run sends it.

The dry run is held against real processes in `test_distributed.py`.
"""

from __future__ import annotations

import msgspec
import pytest
from transformers import LlamaConfig

from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.rank_memory import MemoryModel, stages
from loadgauge.core.estimate.time.collectives import Fabric
from loadgauge.core.estimate.time.traffic import stage_traffic
from loadgauge.core.families.hf import from_dict
from loadgauge.pytorch.parallel.parallel import ParallelJob
from loadgauge.pytorch.trace.trace import trace
from torch_runs import torch_run

FABRIC = Fabric(domain=8, inner_bandwidth=400e9, outer_bandwidth=50e9, inner_latency=3e-6, outer_latency=14e-6)
S = 64
CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=192, num_attention_heads=8, num_key_value_heads=4, head_dim=8, num_hidden_layers=4,
    vocab_size=512, max_position_embeddings=256, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
)  # fmt: skip
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def sent(framework: str, zero: int, batches: int, pp: int, replicas: int) -> dict[str, float]:
    """Bytes of a step by kind of collective, as rank 0 of a dry run sends them."""
    world = 8
    fields = {"zero": zero, "pp": pp, "replicas": replicas, "global_batch": batches * world // pp}
    run = torch_run(0, optimizer="adamw-loop", precision="fp32", seq_len=S, gpus=world, **fields)
    own = msgspec.structs.replace(
        run.training, framework=FRAMEWORKS[framework], ends_apart=training(framework).ends_apart
    )
    run = msgspec.structs.replace(run, training=own)
    found = trace(ParallelJob(CONFIG, run), "cpu", gpus=world)
    # Single numbers, as the loss, are no part of it.
    return {
        kind: sum(one.payload for one in found.collectives if one.kind == kind and one.payload > 1000) for kind in KINDS
    }


def predicted(framework: str, zero: int, batches: int, pp: int, replicas: int) -> dict[str, float]:
    """The same, as estimated."""
    model, how, dp = from_dict(CONFIG.to_dict(), "", "llama"), training(framework, "fp32"), 8 // pp
    layout = Layout(dp=dp, pp=pp, zero=zero, replicas=replicas, global_batch=batches * dp, seq_len=S)
    memory = MemoryModel(model, layout, how, view_of(layout, how))
    rows = stage_traffic(memory, FABRIC, next(iter(stages(model, layout))))
    return {
        kind: sum(row.calls_per_step * row.payload for row in rows if row.collective == kind and row.lane != "pp")
        for kind in KINDS
    }


@pytest.mark.parametrize(
    ("framework", "zero", "batches", "pp", "replicas"),
    [
        ("torchtitan", 3, 1, 1, 1),
        ("torchtitan", 3, 3, 1, 1),
        ("torchtitan", 2, 1, 1, 1),
        ("torchtitan", 2, 3, 1, 1),
        ("torchtitan", 2, 3, 1, 2),
        ("torchtitan", 2, 4, 2, 1),
        ("huggingface", 2, 3, 1, 1),
        pytest.param(
            "huggingface",
            3,
            3,
            1,
            1,
            marks=pytest.mark.xfail(
                strict=True, reason="an embedding that is a unit of its own is gathered for backward too"
            ),
        ),
    ],
)
def test_fsdp_sends_what_is_predicted(framework: str, zero: int, batches: int, pp: int, replicas: int) -> None:
    """Accumulation with and without `no_sync`, replicas, and PyTorch's pipelines, which reduce once a step."""
    found = sent(framework, zero, batches, pp, replicas)
    expected = predicted(framework, zero, batches, pp, replicas)
    assert found["reduce_scatter"] == expected["reduce_scatter"] > 0
    assert found["all_reduce"] == expected["all_reduce"]
    assert found["all_gather"] == expected["all_gather"]


def test_a_stage_gathers_for_its_backward_alone() -> None:
    """ZeRO 3 in PyTorch's pipelines: what a backward gathered serves the next forward."""
    found, expected = sent("torchtitan", 3, 6, 2, 1), predicted("torchtitan", 3, 6, 2, 1)
    assert found["reduce_scatter"] == expected["reduce_scatter"]
    assert expected["all_gather"] == pytest.approx(found["all_gather"], rel=0.25)
