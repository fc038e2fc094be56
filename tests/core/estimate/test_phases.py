"""The last layer's forward as the peak: its explanation adds up too."""

from __future__ import annotations

import pytest

from loadgauge import Layout, estimate
from loadgauge.core.definitions.training.training import training
from loadgauge.core.estimate.memory.ledger import NOT_ITEMISED
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.families import from_dict

WRITTEN_OUT = {
    "model_type": "gpt_oss", "vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2,
    "sliding_window": 64, "max_position_embeddings": 512,
}  # fmt: skip
"""Both masks are alive while the layers run, and the loss is small."""


@pytest.mark.parametrize("part", PARTS)
def test_a_forward_that_is_the_peak_is_explained(part: str) -> None:
    how = training("huggingface", "fp32", attention="eager")
    found = estimate(from_dict(WRITTEN_OUT), Layout(seq_len=256, micro_batch=2, global_batch=2), how)
    assert found.memory.moment == "forward of layer 2"
    told = found.explain(part)
    assert sum(step.nbytes for step in told.steps) == pytest.approx(found.memory.parts[part], rel=1e-12)
    assert NOT_ITEMISED not in [step.what for step in told.steps]


def test_backward_goes_from_the_last_layer_to_the_first() -> None:
    """Of a model with layers of two kinds: its gradients come one by one, so that the first and the last of each are moments."""
    moments = estimate("gemma-3-4b", gpu="h100").memory.moments
    layers = [int(moment.name.rpartition(" ")[2]) for moment in moments if moment.name.startswith("backward of layer")]
    assert len(layers) == 4
    assert layers == sorted(layers, reverse=True)
