"""`estimate --sweep`: every cell is the estimate that its own command gives, and cells that do not fit say so."""

from __future__ import annotations

import csv
import io
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from command_line import document, typed
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.plan.space.estimates import MOST_CELLS, read_axes

XXL = (
    "estimate xlm-roberta-xxl --framework deepspeed --precision fp16 --attention eager --gpu a100-pcie-40gb --gpus 64"
    " --micro-batch 8 --seq-len 512"
)
TABLE = f"{XXL} --tp 1 --pp 1 --sweep zero=0..3 --sweep recompute=none,full"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("micro-batch=1,2,4..64", (1, 2, 4, 8, 16, 32, 64)),
        ("micro-batch=1,2..5", (1, 2, 4)),
        ("micro-batch=2,4,6..10", (2, 4, 6, 8, 10)),
        ("micro-batch=1,3..9", (1, 3, 9)),
        ("micro-batch=4,6..10", (4, 6, 8, 10)),
        ("zero=0..3", (0, 1, 2, 3)),
        ("zero=3,1,3", (3, 1)),
        ("--seq_len=1_024", (1024,)),
        ("recompute=none,full", ("none", "full")),
        ("recompute=attention,mlp;full", ("attention,mlp", "full")),
        ("sequence-parallel=true,false", (True, False)),
        ("model=gpt2,gpt2-xl", ("gpt2", "gpt2-xl")),
    ],
)
def test_values(text: str, values: tuple[Any, ...]) -> None:
    ((_, read),) = read_axes([text]).items()
    assert read == values


@pytest.mark.parametrize(
    "text", ["zero", "zero=", "zero=7", "zer=1", "micro-batch=4..2", "micro-batch=2,2..8", "micro-batch=a..b", "lengthss=1",
             f"micro-batch=1..{MOST_CELLS + 2}", "recompute=none --sweep recompute=full", "attention=eager,none"]
)  # fmt: skip
def test_what_cannot_be_read_is_refused(text: str) -> None:
    found = typed(f"estimate gpt2 --sweep {text}")
    assert found.code == 2
    assert "sweep" in found.err
    assert found.err.count("\n") == 1


def test_cells_are_the_estimates_of_their_commands() -> None:
    cells = document(TABLE)["cells"]
    assert [(cell["zero"], cell["recompute"]) for cell in cells] == [(z, r) for z in range(4) for r in ("none", "full")]
    for cell in cells[2:6]:
        alone = document(cell["command"].removeprefix("loadgauge "))
        memory = alone["memory"]
        assert (cell["memory_total"], cell["memory_low"], cell["memory_high"], cell["outcome"]) == (
            memory["total"], memory["low"], memory["high"], memory["verdict"],
        )  # fmt: skip
        assert sum(cell[part] for part in memory["parts"]) == pytest.approx(cell["memory_total"])
        assert cell["missing"] == max(0, memory["high"] - memory["capacity"])
        assert cell["flops_hardware"] == alone["flops"]["hardware_per_step"]


def test_what_the_article_says_of_a_40_gb_card() -> None:
    """Neither ZeRO 1 nor its checkpointing fits; a stage more with checkpointing is the first that may."""
    found = typed(TABLE)
    cells = document(TABLE)["cells"]
    outcome = {(cell["zero"], cell["recompute"]): cell["outcome"] for cell in cells}
    assert {place for place, word in outcome.items() if word != "does not fit"} == {(2, "full"), (3, "full")}
    assert found.code == 0
    assert found.out.count("DOES NOT FIT") == 6
    grid = found.out.partition("Memory of the fullest rank [GiB]")[2]
    assert grid.count(" NO") == 6
    for cell in cells:
        assert f"{cell['memory_total'] / 2**30:,.1f}" in grid


def test_activations_are_linear_in_the_batch() -> None:
    """A layer keeps bytes in proportion to b (Korthikanti et al., equation 1)."""
    line = "estimate xlm-roberta-xxl --attention eager --seq-len 512 --sweep micro-batch=1,2,4..64"
    cells = {cell["micro_batch"]: cell["largest_activations"] for cell in document(line)["cells"]}
    assert list(cells) == [1, 2, 4, 8, 16, 32, 64]
    assert cells[64] == pytest.approx(64 * cells[1], rel=1e-3)
    assert cells[2] - cells[1] == pytest.approx((cells[64] - cells[32]) / 32, rel=1e-9)


def test_a_cell_that_is_no_run_says_why() -> None:
    line = "estimate gpt2 --gpu a100-sxm4-80gb --gpus 14 --gpus-per-node 7 --sweep tp=1,7"
    found = typed(line)
    assert found.code == 0
    assert "cannot tell: num_attention_heads over tp" in found.out
    assert "2 cells: 1 fits, 1 cannot be told." in found.out
    none = typed(line.replace("tp=1,7", "tp=7"))
    assert none.code == 2
    assert "no cell of the sweep is a run: num_attention_heads over tp" in none.err
    assert typed("estimate llama-3.1-8b --gpu rtx4090 --sweep micro-batch=1,2").code == 1


def test_a_field_is_swept_or_given() -> None:
    found = typed("estimate gpt2 --zero 1 --sweep zero=1,2")
    assert found.code == 2
    assert "zero" in found.err
    for flags in ("--explain weights", "--table flops", "--plot x.txt", "--csv --json", "--output x.xls"):
        assert typed(f"estimate gpt2 --sweep zero=1,2 {flags}").code == 2
    assert typed("estimate gpt2 --output x.csv").code == 2


def test_files(tmp_path: Path) -> None:
    line = "estimate gpt2 --gpu t4 --sweep micro-batch=1,2 --sweep recompute=none,full"
    cells = document(line)["cells"]
    for kind in ("csv", "json", "parquet"):
        typed(f"{line} --output {shlex.quote(str(tmp_path / f'cells.{kind}'))}")
    assert json.loads((tmp_path / "cells.json").read_text()) == cells
    rows = list(csv.DictReader(io.StringIO((tmp_path / "cells.csv").read_text())))
    assert (tmp_path / "cells.csv").read_text() == typed(f"{line} --csv").out
    assert [float(row["memory_total"]) for row in rows] == [cell["memory_total"] for cell in cells]
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(tmp_path / "cells.parquet").to_pylist()
    assert [{name: value for name, value in row.items() if value is not None} for row in table] == [
        {name: value for name, value in cell.items() if value is not None} for cell in cells
    ]


def test_the_command_of_a_cell_is_the_job() -> None:
    (cell,) = document("estimate gpt2 --gpu t4 --sweep micro-batch=2")["cells"]
    assert cell["command"] == Job("gpt2", gpu="t4", micro_batch=2).command()
