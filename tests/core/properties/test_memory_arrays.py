"""The memory of many layouts at once, as arrays, is that of each alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loadgauge import Layout
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.phases import moments
from loadgauge.core.estimate.memory.rank_memory import MemoryModel, stages
from loadgauge.core.families.reference import llama_model

MODEL = llama_model(8, 1024, 16, 32000, num_key_value_heads=8)
COLUMNS = {"dp": [1, 2, 4, 4], "tp": [1, 2, 4, 8], "global_batch": [8, 16, 64, 4], "micro_batch": [1, 2, 4, 1]}


def totals(framework: str, zero: int, pp: int, **sizes: Any) -> list[Any]:
    layout = Layout(pp=pp, zero=zero, seq_len=1024, **sizes)
    framework, _, part = framework.partition(" ")
    how = training(framework, offload=f"optimizer:{part}" if part else "none")
    facts = MemoryModel(MODEL, layout, how, view_of(layout, how))
    return [moment.total for stage in stages(MODEL, layout) for moment in moments(facts, stage)]


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "framework", ["megatron", "huggingface", "torchtitan", "deepspeed", "megatron 0.5", "deepspeed 0.4"]
)
def test_an_array_of_layouts(framework: str, zero: int, pp: int) -> None:
    together = totals(framework, zero, pp, **{name: np.array(column, float) for name, column in COLUMNS.items()})
    for index in range(4):
        alone = totals(framework, zero, pp, **{name: column[index] for name, column in COLUMNS.items()})
        assert len(alone) == len(together)
        for whole, one in zip(together, alone, strict=True):
            assert np.broadcast_to(whole, (4,))[index] == pytest.approx(one, rel=1e-12)
