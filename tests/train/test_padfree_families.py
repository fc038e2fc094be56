"""Every family, padding-free against padded: logits of every real token, loss, all gradients; and the exact probe."""

from __future__ import annotations

import contextlib
import copy
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from loadgauge.train import Collator, check, describe, enable
from padfree_families import CAUSAL, MASKED, Double, build, padded, ragged

LENGTHS = [13, 3, 22, 1, 9, 4]  # 4 is the number of heads: where layouts guessed from shapes go wrong
NO_FLOAT64 = {"xglm", "gemma2"}  # eager masks overflow: the padded reference itself is not a number


@cache
def pair(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The model as transformers made it, and a padding-free copy."""
    stock = build(name, torch.float32 if name in NO_FLOAT64 else torch.float64)
    stock.config.use_cache = False
    return stock, enable(copy.deepcopy(stock))


def compare(name: str, lengths: list[int], side: str = "right") -> None:
    with contextlib.nullcontext() if name in NO_FLOAT64 else Double():
        equal(name, lengths, side, 1e-5 if name in NO_FLOAT64 else 1e-12)


def equal(name: str, lengths: list[int], side: str, tolerance: float) -> None:
    (stock, model), rows, shifted = pair(name), ragged(lengths), name in CAUSAL
    loss, logits, gradients = run(stock, padded(rows, side, shifted), shifted)
    longest = max(lengths)
    first = [0 if side == "right" else longest - len(row) for row in rows]
    real = torch.cat([logits[i, at : at + len(row)] for i, (at, row) in enumerate(zip(first, rows, strict=True))])

    batch = Collator("causal" if shifted else "token")([{"input_ids": row, "labels": row} for row in rows])
    flat_loss, flat_logits, flat_gradients = run(model, batch, shifted)
    assert flat_logits.shape[:2] == (1, sum(lengths))
    error = float((flat_logits[0] - real).abs().max() / real.abs().max())
    assert error <= tolerance
    if loss.isfinite():
        error = float((flat_loss - loss).abs() / loss.abs())
        assert error <= tolerance
        largest = max(float(g.abs().max()) for g in gradients.values())
        assert flat_gradients.keys() == gradients.keys()
        error = max(float((flat_gradients[key] - gradients[key]).abs().max()) for key in gradients) / largest
        assert error <= tolerance
    found = check(model, batch, gradients=False)
    assert found.leak.worst == 0.0
    assert found.output_error <= tolerance


def run(
    model: torch.nn.Module, batch: dict[str, Any], shifted: bool
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    result = model(**batch)
    labels, logits = batch["labels"], result.logits
    if shifted:
        labels, logits = labels[:, 1:], logits[:, :-1]
    # The loss of transformers is float32 whatever the model is: the one compared to the last digit is made here.
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    if loss.isfinite():
        torch.testing.assert_close(result.loss.double(), loss.detach().double(), rtol=1e-5, atol=1e-6)
        loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), result.logits.detach(), gradients


@pytest.mark.parametrize("name", [*CAUSAL, *MASKED])
def test_equals_padded(name: str) -> None:
    compare(name, LENGTHS)


class OtherOrder(TorchDispatchMode):
    """Every matrix product as a CPU that adds up in another order makes it: off by what its dtype rounds.

    The order depends on the shapes and on nothing else, as it does in a CPU library. `dtypes`: what was multiplied.
    """

    NAMES = ("mm", "addmm", "bmm", "baddbmm")

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        if function.overloadpacket.__name__ not in self.NAMES:
            return result
        self.dtypes.add(result.dtype)
        generator = torch.Generator().manual_seed(hash(tuple(result.shape)) % 2**31)
        noise = torch.rand(result.shape, generator=generator, dtype=torch.float64).to(result.dtype)
        return result * (1 + torch.finfo(result.dtype).eps * noise)


@pytest.mark.parametrize("name", ["deepseek_v32", "cohere2", "bamba", "zamba2", "qwen3_next", "gptj", "llama"])
def test_equals_padded_on_other_cpus(name: str) -> None:
    with OtherOrder() as order:
        compare(name, LENGTHS)
    assert order.dtypes == {torch.float64}


def test_sparse_attention_is_not_taken_for_dense() -> None:
    """Indices of sparse attention are an argument that a dense kernel would drop: such layers run once per sequence."""
    assert "DeepseekV32Attention run once per sequence" in describe(pair("deepseek_v32")[1])  # nothing is cut off yet
    model = enable(build("deepseek_v32", index_topk=4))
    assert "DeepseekV32Attention run once per sequence" in describe(model)
    # Equal scores are cut off by chance, which the length of a padded row changes: each sequence alone is the reference.
    found = check(model, Collator()([{"input_ids": row} for row in ragged(LENGTHS)]))
    assert found.ok, str(found)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "llama4", "bert"])
def test_equals_left_padded(name: str) -> None:
    compare(name, LENGTHS, side="left")


ragged_lengths = st.lists(st.integers(1, 24), min_size=1, max_size=6)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_oss", "llama4", "mpt", "lfm2"])
@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(lengths=ragged_lengths, side=st.sampled_from(["right", "left"]))
@example(lengths=[1, 1, 1], side="right")
@example(lengths=[9, 9, 9], side="right")
@example(lengths=[4, 4], side="left")
@example(lengths=[40, 1, 1, 2, 1], side="right")
def test_any_ragged_batch(name: str, lengths: list[int], side: str) -> None:
    # Left padding reaches recurrent layers and makes rows that see nothing: only attention has such a reference.
    compare(name, lengths, "right" if name in ("lfm2", "mpt") else side)
