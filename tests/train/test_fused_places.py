"""Places in a user's model where a fused operator would keep less: put there, it saves what the trace had said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from loadgauge.pytorch.trace.programs.jobs import of_module
from loadgauge.pytorch.trace.trace import Trace, trace
from loadgauge.train import fused
from torch_models import build

S, B, H = 64, 2, 128


def traced(module: nn.Module, *inputs: Any, **keywords: Any) -> Trace:
    return trace(of_module(module, *inputs, optimizer="sgd", keywords=keywords), "cuda")


class Chain(nn.Module):
    """Sigmoids in a row, in a model of one's own."""

    def __init__(self, fused_chain: bool) -> None:
        super().__init__()
        self.up, self.fused_chain = nn.Linear(H, H), fused_chain
        self.gates = nn.Sequential(*(nn.Sigmoid() for _ in range(5)))

    def forward(self, x: Any) -> Any:
        y = self.up(x)
        return fused.sigmoid_chain(y, 5) if self.fused_chain else self.gates(y)


def test_a_chain_of_sigmoids() -> None:
    x = torch.empty(S, H, device="meta")
    plain, other = traced(Chain(fused_chain=False), x), traced(Chain(fused_chain=True), x)
    (found,) = plain.advice
    assert (found.operator, found.modules) == ("sigmoid_chain", ("gates.0", "gates.1", "gates.2", "gates.3"))
    # What the chain keeps in their stead is its input, which a linear layer does not keep.
    assert found.saves == plain.saved_nbytes - other.saved_nbytes == 4 * (4 * S * H)
    assert other.advice == ()


class Head(nn.Module):
    """A model without its own loss, and a loss in one piece or in chunks."""

    def __init__(self, model: nn.Module, chunked: bool) -> None:
        super().__init__()
        self.model, self.chunked = model, chunked

    def forward(self, ids: Any) -> Any:
        hidden = self.model.model(ids).last_hidden_state[:, :-1].flatten(0, 1)  # type: ignore[union-attr, operator]
        weight, wanted = self.model.lm_head.weight, ids[:, 1:].flatten()  # type: ignore[union-attr]
        if self.chunked:
            return fused.linear_cross_entropy(hidden, weight, wanted, chunk=32)  # type: ignore[arg-type]
        return nn.functional.cross_entropy((hidden @ weight.t()).float(), wanted)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_of_all_logits(dtype: torch.dtype) -> None:
    built = build("llama-gqa", "sdpa", dtype, vocab_size=512)
    ids = torch.zeros(B, S, dtype=torch.long)
    plain, other = traced(Head(built.model, chunked=False), ids), traced(Head(built.model, chunked=True), ids)
    found = next(one for one in plain.advice if one.operator == "linear_cross_entropy")
    tokens = B * (S - 1)
    assert found.saves == 4 * tokens * 512
    # In the stead of the log-softmax: a number a token, and the count of targets; the sum of class weights goes.
    assert plain.saved_nbytes - other.saved_nbytes == pytest.approx(found.saves - 4 * tokens, abs=16)
    assert "linear_cross_entropy" not in {one.operator for one in other.advice}
