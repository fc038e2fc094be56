"""DeepSpeed's engine against DeepSpeed itself: peaks of its own code, run on the simulated device.

Recorded with deepspeed 0.19.8, transformers 5.23.0 and torch 2.13.0 by `python -m stack.run` (tools/stack), the settings put
into the configuration that the trainer is given: a Llama of 40 layers, width 2048, MLP 5632, 32 and 16 heads, 32,000 words, a
sequence of 1,024 tokens, on rank 0 of eight (of ZeRO 2 the last). Bytes are of PyTorch's allocator, of the second step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from loadgauge.core.base.units import MIB
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.memory.phases import Phase
from loadgauge.core.families.hf import from_dict
from loadgauge.core.resolve.resolve import resolve_job

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 16, "vocab_size": 32000,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


class Traced(NamedTuple):
    """What DeepSpeed held at most in each phase [MiB]."""

    forward: int
    loss: int
    backward: int
    clip: int
    step: int


CASES: dict[str, tuple[dict[str, Any], Traced]] = {
    "ahead": ({"zero": 3}, Traced(10259, 10630, 10425, 6248, 5767)),
    "recomputed": ({"zero": 3, "recompute": "full"}, Traced(7028, 7281, 7905, 6248, 5767)),
    "fewer live": (
        {"zero": 3, "engine": "stage3_max_live_parameters=3e8"}, Traced(9182, 9678, 9199, 6248, 5767),
    ),
    "none ahead": (
        {"zero": 3, "engine": "stage3_prefetch_bucket_size=0"}, Traced(9182, 9678, 9199, 6248, 5767),
    ),
    "none again": (
        {"zero": 3, "engine": "stage3_prefetch_bucket_size=0,stage3_max_reuse_distance=0"},
        Traced(8368, 8721, 8535, 6248, 5767),
    ),
    "as transformers fills it in": (
        {"zero": 3, "recompute": "full", "engine": "reduce_bucket_size=auto,stage3_prefetch_bucket_size=auto,"
         "stage3_param_persistence_threshold=auto"},
        Traced(5985, 6335, 6131, 5302, 4821),
    ),
    "small groups": ({"zero": 3, "engine": "sub_group_size=5e7"}, Traced(10259, 10630, 10425, 5090, 4999)),
    "offloaded": (
        {"zero": 3, "offload": "all", "global_batch": 16,
         "engine": "stage3_max_live_parameters=3e8,reduce_bucket_size=2e8"},
        Traced(4759, 5255, 4776, 800, 382),
    ),
    "two buckets": ({"zero": 2, "engine": "overlap_comm=true"}, Traced(10284, 12312, 12339, 9130, 8186)),
    "two small ones": (
        {"zero": 2, "engine": "overlap_comm=true,reduce_bucket_size=2e8"}, Traced(10284, 11168, 11299, 8667, 8186),
    ),
    "round robin": (  # and what shares tensors out in turn
        {"zero": 2, "engine": "reduce_bucket_size=2e8"}, Traced(10284, 10786, 10917, 8666, 8185),
    ),
}  # fmt: skip
PHASES = {Phase.FORWARD: "forward", Phase.LOSS: "loss", Phase.CLIP: "clip", Phase.STEP: "step"}


@pytest.mark.parametrize("name", CASES)
def test_each_phase_holds_what_deepspeed_holds(name: str) -> None:
    given, traced = CASES[name]
    job = Job(model="", framework="deepspeed", gpus=8, seq_len=1024, micro_batch=1, **given)
    found: dict[str, float] = {}
    for moment in resolve_job(job, from_dict(CONFIG)).estimate().memory.moments:
        phase = PHASES.get(moment.phase, "backward")
        found[phase] = max(found.get(phase, 0.0), float(moment.total - moment.parts["outside"]))
    for phase, most in traced._asdict().items():
        # In a layer, weights come in requests of a few tensors; the formula takes the largest request there may be.
        assert found[phase] == pytest.approx(
            most * MIB, rel=0.09 if phase in ("forward", "backward") else 0.015, abs=100 * MIB
        ), phase
    peak = max(traced) * MIB
    assert max(found.values()) == pytest.approx(peak, rel=0.015)
