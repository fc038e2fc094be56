"""What is made again without asking PyTorch is what PyTorch makes, and leaves the same guards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from torch import nn
from transformers.utils import import_utils

import loadgauge
from loadgauge.pytorch.capture.captured import Captured
from loadgauge.pytorch.capture.record import record
from loadgauge.pytorch.capture.symbols.symbolic import Env, Repeats
from loadgauge.pytorch.device.fake import FakeMode
from loadgauge.pytorch.trace.no_compiler import last_lines


class Blocks(nn.Module):
    """Equal blocks with views, a slice of odd length, heads in one storage, and rows rounded up and down."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            q, k, v = block(x).unflatten(-1, (4, 24)).transpose(1, 2).chunk(3, -1)
            y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
            padded = nn.functional.pad(y, (0, 0, 0, -y.shape[1] % 8))
            whole = y[:, : x.shape[1] - (8 - x.shape[1] % 8) % 8].cos()
            x = x + padded[:, : x.shape[1]].mul_(2) + y[:, 3:].mean(1, keepdim=True) + whole.mean(1, keepdim=True)
        return x.square().mean()


def rows(b: int, s: int) -> torch.Tensor:
    return torch.empty(b, s, 32)


@pytest.mark.long
def test_repeated_operations_leave_the_answer_and_its_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anything asked, while a result is made again, that no guard answers: it would be remembered without one."""
    asked: list[bool] = []
    again, evaluate = Repeats.again, Env.evaluate_sym_node
    answers: list[Any] = []

    def watched(self: Repeats, key: Any) -> Any:
        out = again(self, key)
        asked.append(out is None)
        return out

    def question(self: Env, node: Any, *args: Any, **kwargs: Any) -> Any:
        known = self._maybe_evaluate_static(node.expr) if self._suppress_guards_tls() else None
        out = evaluate(self, node, *args, **kwargs)  # raises where a result is only tried
        if self._suppress_guards_tls():
            answers.append(known)
        return out

    def answer() -> Captured:
        found = loadgauge.capture(Blocks, rows, optimizer="adamw").at(b=3, s=50)
        return msgspec.structs.replace(found, seconds=0.0)

    monkeypatch.setattr(Repeats, "again", watched)
    monkeypatch.setattr(Env, "evaluate_sym_node", question)
    quick = answer()
    assert sum(asked) < len(asked) / 2
    assert answers
    assert None not in answers
    monkeypatch.setattr(Repeats, "again", lambda *_: None)
    assert answer() == quick
    assert not quick.plain
    assert quick.guards


def test_lists_of_parameters_are_run_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    job = loadgauge.capture(Blocks, rows, optimizer="adamw").job
    quick = record(job, {"b": 2, "s": 9})
    monkeypatch.setattr(FakeMode, "_of_columns", lambda *_: None)
    whole = record(job, {"b": 2, "s": 9})
    assert any(op.name.startswith("aten::_foreach_sqrt") for op in whole.ops)
    assert (quick.ids, quick.changes, quick.kept) == (whole.ids, whole.changes, whole.kept)
    assert [(op.name, op.reads, op.makes) for op in quick.ops] == [(op.name, op.reads, op.makes) for op in whole.ops]


def test_the_end_of_a_file_says_what_it_exports() -> None:
    folder = Path(transformers.__file__).parent / "models"
    for file in sorted(folder.glob("[bl]*/*.py")):
        text = file.read_text(encoding="utf-8")
        assert last_lines(import_utils.fetch__all__)(text) == import_utils.fetch__all__(text), file
