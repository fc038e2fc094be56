"""Liger's fused losses over pairs and sequences, beside what its own benchmark measured of one loss (linkedin/Liger-Kernel,
`benchmark/data/all_benchmark_data.csv`, commit ead96b6, A100, bfloat16, vocabulary of 128,256) [MiB].

The benchmark also holds matrices of its own, the same in every row: so rows are compared with one another.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from loadgauge.core.base.units import MIB
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.estimate.memory.liveness import forward_peak
from loadgauge.core.families.catalogue import find_model
from loadgauge.core.layers import View, head_layer
from loadgauge.core.post_training.memory import memory
from loadgauge.core.resolve.posttrain import resolve_posttrain

ORPO = {
    (1024, 2): 8161.3,
    (1024, 4): 8209.4,
    (1024, 16): 8497.5,
    (4096, 2): 14556.6,
    (4096, 4): 14748.7,
    (4096, 16): 15901.1,
}
"""By tokens of a sequence and sequences; the hidden size is 4096."""
KTO = {(512, 4): 3349.0, (512, 8): 3361.0, (512, 32): 3433.1}
"""Of a hidden size of 1024."""


def peak(kind: Literal["pairs", "rows", "policy"], hidden: int, tokens: int, sequences: int) -> float:
    model = msgspec.structs.replace(find_model("llama-3.1-8b"), hidden_size=hidden)
    kernels = Kernels(loss="liger", logprobs=kind)
    return float(forward_peak(head_layer(model, View.of(tokens, sequences, kernels=kernels)))) / MIB


@pytest.mark.parametrize(("kind", "hidden", "rows"), [("pairs", 4096, ORPO), ("rows", 1024, KTO)])
def test_peaks_of_a_loss_differ_as_measured(
    kind: Literal["pairs", "rows"], hidden: int, rows: dict[tuple[int, int], float]
) -> None:
    (first, base), *others = rows.items()
    beside = base - peak(kind, hidden, *first)
    for row, measured in others:
        assert peak(kind, hidden, *row) + beside == pytest.approx(measured, rel=0.02)


def test_a_pair_has_logits_their_float32_scatter_and_gradient() -> None:
    """Inductor's code of the fused function has a buffer of 2, 4 and 2 bytes of each logit of a pair, beside the head's gradient,
    and of all of them what enters the last norm, what leaves it, and its gradient."""
    columns, hidden = 128_256, 4096
    pair = 8 * 2 * 4096 * columns
    assert peak("pairs", hidden, 4096, 2) * MIB == pytest.approx(
        pair + 2 * columns * hidden + 3 * 2 * 2 * 4096 * hidden, rel=1e-3
    )


def test_one_sequence_s_tiles_of_a_policy_s_loss() -> None:
    """2048 tokens x 4096 columns of three float32 copies and a 16-bit one; a head's gradient in float32 and its sum in 16 bits."""
    columns, hidden, tokens = 128_256, 4096, 8192
    found = peak("policy", hidden, tokens, 1) * MIB
    tile = 2048 * 4096
    expected = (6 * columns + 4 * tokens + 3 * 2 * tokens) * hidden
    assert found == pytest.approx(expected + max(12 * tile, 2 * (columns + tokens) * hidden) + 2 * tile, rel=1e-3)


def test_a_task_runs_the_form_that_is_its_own() -> None:
    """A pair is two sequences of the logits, so that DPO under Liger needs less than plain float32 logits of eight."""
    rollout = {"prompts": 8, "samples": 1, "prompt_len": 512, "answers": "512"}
    found = {}
    for task, loss in (("dpo", "liger"), ("dpo", "float32"), ("kto", "liger"), ("grpo", "liger")):
        given = rollout if task == "grpo" else {"seq_len": 1024}
        job = Job("qwen2.5-0.5b", task=task, loss=loss, micro_batch=4, recompute="full", **given)  # type: ignore[arg-type]
        run, _ = resolve_posttrain(job)
        found[task, loss] = run.trained.training.kernels.logprobs, memory(run).phases[-1 if task != "grpo" else 0].total
    assert [found[key][0] for key in found] == ["pairs", "pairs", "rows", "policy"]
    assert found["dpo", "liger"][1] < found["dpo", "float32"][1]
