"""GPT-NeoX takes its keys with dashes or with underscores, as `NeoXArgs.from_ymls` makes one of the other."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from command_line import document
from loadgauge.core.base.errors import ConfigError
from loadgauge.job_files.exchange import read

WITH_UNDERSCORES = {
    "pipe_parallel_size": 0, "model_parallel_size": 1, "num_layers": 6, "hidden_size": 128, "num_attention_heads": 4,
    "seq_length": 2048, "max_position_embeddings": 2048, "pos_emb": '"rotary"', "no_weight_tying": "true",
    "attention_config": '[[["flash"], 6]]', "checkpoint_activations": "false",
    "zero_optimization": '{"stage": 0, "cpu_offload": false}', "train_micro_batch_size_per_gpu": 32,
}  # fmt: skip


def test_keys_with_dashes_are_those_with_underscores(tmp_path: Path) -> None:
    totals = []
    for spelt in ("_", "-"):
        lines = [
            f'"{key if key.startswith(("zero", "train")) else key.replace("_", spelt)}": {value}'
            for key, value in WITH_UNDERSCORES.items()
        ]
        place = tmp_path / f"{'under' if spelt == '_' else 'dash'}.yml"
        place.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        answer = document(f"estimate {place} --gpu h100-sxm5-80gb --gpus 8")
        totals.append((answer["memory"]["total"], answer["time"]["step"]))
    assert totals[0] == totals[1]


@pytest.mark.parametrize("value", ["[true]", "[[]]", "3", "[[[global], 2]]"])
def test_layers_that_are_no_lists_are_no_defect(value: str) -> None:
    text = f"hidden_size: 64\nnum_layers: 2\nnum_attention_heads: 4\nseq_length: 8\nattention_config: {value}\n"
    with contextlib.suppress(ConfigError):
        read(text, "gpt-neox", file="job.yml")
