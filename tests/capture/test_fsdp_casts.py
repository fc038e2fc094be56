"""Under FSDP2 whole parameters are cast, and autocast has none to cast: written and captured models against a dry run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

import loadgauge
from loadgauge.spec.training import training

KEYS: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 640, "intermediate_size": 160,
    "num_hidden_layers": 4,
}  # fmt: skip


def test_the_residual_stream_is_in_16_bits_under_fsdp_alone(tmp_path: Path) -> None:
    file = tmp_path / "llama.json"
    file.write_text(json.dumps(KEYS | {"model_type": "llama"}))
    asked: dict[str, Any] = {
        "micro_batch": 8,
        "seq_len": 200,
        "precision": "bf16-autocast",
        "optimizer": "sgd",
        "gpus": 4,
    }
    for zero, units in ((0, {}), (3, {"end_units": "root"})):
        found = loadgauge.estimate(str(file), framework="huggingface", road="written", zero=zero, **units, **asked)
        traced = loadgauge.trace(LlamaConfig(**KEYS), zero=zero, global_batch=32, **asked)
        peak = max(float(moment.total) - float(moment.parts["outside"]) for moment in found.workings.phases)
        assert peak == pytest.approx(traced.peak.total, rel=5e-3)
    recipe = training("huggingface", "bf16-autocast")
    assert [recipe.under(zero).kernels.dtypes.residual for zero in (0, 1, 2, 3)] == [4, 4, None, None]
    assert recipe.under(3).under(0) == recipe
