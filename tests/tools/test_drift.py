"""The table of what moved: a formula that is off by 1 % is a row with its part and its cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import drift
from loadgauge.core.layers import block
from loadgauge.core.layers.feed_forward import mlp

JOBS = (
    "estimate gpt2 --micro-batch 2",
    "estimate gpt2 --micro-batch 2 --recompute full",
    "estimate qwen3-0.6b --seq-len 1024",
    "estimate smollm2-135m --zero 1 --gpus 8",
)


def documents() -> dict[str, object]:
    return {line: drift.document_of(line) for line in JOBS}


def test_a_formula_that_is_off_by_a_hundredth_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    before = documents()
    assert drift.text(drift.table(before, documents()), len(JOBS)) == "4 jobs: nothing moved by more than 0.1%."
    original = mlp.Tensor
    monkeypatch.setattr(mlp, "Tensor", lambda name, numel, *rest, **more: original(name, 1.01 * numel, *rest, **more))
    block.block_layers.cache_clear()  # type: ignore[attr-defined]
    rows = {row.figure: row for row in drift.table(before, documents())}
    block.block_layers.cache_clear()  # type: ignore[attr-defined]
    moved = rows["memory.parts.activations"]
    assert 0.001 < moved.most <= 0.0101
    assert moved.of == len(JOBS)
    assert "model.params" not in rows
    assert "| memory.parts.activations | " in drift.text(list(rows.values()), len(JOBS))


def test_what_is_refused_now_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "before.json").write_text(json.dumps({"estimate gpt2 --tp 7": {"time": {"step": 1.0}}}))
    drift.write_answers(tmp_path)
    before, after = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("before", "after"))
    assert {row.figure for row in drift.table(before, after)} == {"error", "time"}
