"""Rows that a program's own data chooses, stated by line; checks that only stop a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import loadgauge
from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.capture.capture import capture_at
from loadgauge.pytorch.device.read import passing

SAMPLE = 32


class Detector(nn.Module):
    """Stops at bad boxes, keeps rows with a score, and trains a head on a sample of them of a fixed size, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.boxes = nn.Linear(16, 16), nn.Linear(16, 64), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        wrong = boxes[:, 2:] <= boxes[:, :2]
        if wrong.any():
            first = boxes[torch.where(wrong.any(dim=1))[0][0]].tolist()
            raise ValueError(f"not a box: {first}")
        y = self.body(x)
        kept = torch.where(x[:, 0] > 0)[0]  # stated
        marked = torch.zeros(len(x), dtype=torch.uint8)
        marked[kept[torch.randperm(len(kept))[:SAMPLE]]] = 1
        sampled = torch.where(marked)[0]
        return self.head(y[sampled]).square().mean() + self.boxes(y[kept]).abs().mean()


LINE = next(
    f"{Path(__file__).name}:{number}"
    for number, line in enumerate(Path(__file__).read_text(encoding="utf-8").splitlines(), 1)
    if line.endswith("# stated")
)


def inputs(b: int) -> Any:
    return torch.empty(b, 16), torch.empty(3, 4)


def real_flops(rows: int, of: int) -> int:
    """FLOPs of a step on real values, where so many rows have a score."""
    x, boxes = torch.full((of, 16), -1.0), torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 3)
    x[:rows] = 1
    with FlopCounterMode(display=False) as counter:
        Detector()(x, boxes).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("rows", "chosen"), [({LINE: 40}, 40), ({LINE: [7]}, 7), ("most", 100), ({LINE: 4000}, 100)])
def test_stated_rows_give_the_work_of_a_step_that_chooses_as_many(rows: Any, chosen: int) -> None:
    job = loadgauge.capture(Detector, inputs, optimizer="sgd", rows=rows).job
    found = capture_at(job, "", {"b": 100})
    assert found.flops(b=100) == real_flops(chosen, 100)
    assert any(LINE in line and "rows" in line for line in found.assumed)
    assert any("only stops the program" in line for line in found.assumed)
    assert not found.values


def test_rows_that_nobody_states_are_refused_and_a_line_that_asks_for_none_too() -> None:
    with pytest.raises(ConfigError, match=rf"{LINE}.*--rows LINE=NUMBER"):
        loadgauge.capture(Detector, inputs, optimizer="sgd").at(b=100)
    with pytest.raises(ConfigError, match=r"no rows are chosen by data at other\.py:3"):
        loadgauge.capture(Detector, inputs, optimizer="sgd", rows={LINE: 40, "other.py:3": 1}).at(b=100)
    with pytest.raises(ConfigError, match="numbers of rows or most"):
        loadgauge.capture(Detector, inputs, rows={LINE: "some"})


def test_only_checks_that_stop_a_program_are_taken_to_pass(tmp_path: Path) -> None:
    cases = {
        "if x.any(): raise E": False,
        "if not x.all(): torch._assert(False, '')": True,
        "assert x.all()": True,
        "torch._assert(x.all(), '')": True,
        "if x.any(): y = 1": None,
        "if x.any(): y = 1; raise E": False,
        "while x.any(): raise E": None,
        "if x.any() or not y.all(): raise E": None,  # of two on a line, which is asked for is not seen
    }
    for number, (case, value) in enumerate(cases.items()):
        file = tmp_path / f"{number}.py"
        file.write_text(f"{case}\n", encoding="utf-8")
        assert passing(str(file), 1) is value, case
