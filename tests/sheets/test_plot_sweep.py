"""The figure of a sweep shows what its table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import document, typed
from loadgauge.core.base.units import in_gib

pytest.importorskip("matplotlib")
TABLE = (
    "estimate xlm-roberta-xxl --framework deepspeed --precision fp16 --attention eager --gpu a100-pcie-40gb --gpus 64"
    " --tp 1 --pp 1 --micro-batch 8 --seq-len 512 --sweep zero=0,3 --sweep recompute=none,full"
)


def test_a_grid_has_every_cell_and_its_verdict(tmp_path: Path) -> None:
    file = tmp_path / "grid.svg"
    rows = document(f"{TABLE} --plot {file}")["cells"]
    drawn = file.read_text(encoding="utf-8")
    assert all(f"{in_gib(row['memory_total'], 1)} GiB" in drawn for row in rows)
    assert drawn.count(">does not fit<") == sum(row["outcome"] == "does not fit" for row in rows) == 3


def test_bars_show_activations_and_the_card(tmp_path: Path) -> None:
    file = tmp_path / "bars.svg"
    rows = document(f"estimate gpt2-xl --gpu a100-sxm4-80gb --seq-len 1024 --sweep micro-batch=1,2,4 --plot {file}")[
        "cells"
    ]
    drawn = file.read_text(encoding="utf-8")
    assert "the card" in drawn
    assert all(f"{row['largest_activations'] / 1e9:,.2f} GB" in drawn for row in rows)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--sweep micro-batch=1,2 --plot a.svg", "one or two"),
        ("--plot a.txt", ".svg"),
        ("--plot a.svg --figure time", "one figure"),
    ],
)
def test_what_cannot_be_drawn_is_said(more: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = typed(f"{TABLE.replace('--micro-batch 8 ', '')} {more}")
    assert found.code == 2
    assert said in found.err
