"""What an expression keeps for backward, against the derivatives, and against hooks that count on their own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from command_line import document, typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.trace.programs.expression import Inputs, saved_by_expression
from loadgauge.pytorch.trace.saved import Saved, saved, saved_by
from torch_kept import keeping, owned, total
from torch_models import build

N = 1024
UNIT = 4 * N
SMALL = Inputs(shape=(N,))


def names(found: Saved) -> list[str]:
    return [f"{one.node}.{one.field}" for one in found.tensors]


@pytest.mark.parametrize(
    ("text", "kept", "units", "beyond"),
    [
        ("torch.sigmoid(x)", ["SigmoidBackward0.result"], 1, 0),  # z' = z (1 - z)
        ("torch.exp(x)", ["ExpBackward0.result"], 1, 0),
        ("torch.tanh(x)", ["TanhBackward0.result"], 1, 0),
        ("torch.sin(x + 1)", ["SinBackward0.self"], 1, 1),
        ("F.silu(x)", ["SiluBackward0.self"], 0, 0),  # the input, which is there
        ("x + y", [], 0, 0),
        ("x * y", ["MulBackward0.other", "MulBackward0.self"], 0, 0),
        ("(x + 1) * (y + 1)", ["MulBackward0.other", "MulBackward0.self"], 2, 2),
        ("(x + 1) * x.detach()", ["MulBackward0.other"], 0, 0),  # the other one only
        ("x.view(32, 32).t().reshape(-1).cos()", ["CosBackward0.self"], 1, 1),  # reshape copies
        ("x.view(32, 32).t().cos()", ["CosBackward0.self"], 0, 0),  # a view lies in its input
        ("(x + 1)[:1].cos()", ["CosBackward0.self"], 1, 1),  # a view holds the whole of its storage
        ("torch.cat([x + 1, y + 1])[:4].cos()", ["CosBackward0.self"], 2, 2),
        ("torch.exp(x) * torch.exp(x).sum() + (lambda e: e * e)(torch.exp(y))", None, 3 + 1 / N, 3 + 1 / N),
    ],
)
def test_what_derivatives_need(text: str, kept: list[str] | None, units: float, beyond: float) -> None:
    found = saved_by_expression(text, SMALL)
    if kept is not None:
        assert sorted(names(found)) == kept
    assert found.total == units * UNIT
    assert found.beyond_result == beyond * UNIT


def test_two_fields_share_a_storage() -> None:
    found = saved_by_expression("(lambda e: e * e.view(32, 32).view(-1))(x.exp())", SMALL)
    assert sorted(names(found)) == ["ExpBackward0.result", "MulBackward0.other", "MulBackward0.self"]
    assert len(found.storages) == 1
    assert found.total == UNIT
    assert sum(one.nbytes for one in found.tensors) == 3 * UNIT


@pytest.mark.parametrize("constant", ["x", "y"])
def test_a_factor_is_kept_for_the_other_one(constant: str) -> None:
    found = saved_by_expression("(x + 1) * (y + 1)", Inputs(shape=(N,), constant=(constant,)))
    assert names(found) == [f"MulBackward0.{'self' if constant == 'x' else 'other'}"]
    assert found.beyond_result == UNIT


def test_parameters_and_buffers_are_apart() -> None:
    found = saved_by_expression("nn.Linear(64, 32)(nn.BatchNorm1d(64)(x)).exp()", Inputs(shape=(16, 64)))
    owners = {one.field: one.owner for one in found.tensors}
    assert owners["mat2"] == "parameter Linear.weight"
    assert owners["running_mean"] == "buffer BatchNorm1d.running_mean"
    assert found.of_parameters == 4 * (64 * 32 + 3 * 64)
    frozen = saved_by_expression("nn.Linear(64, 32).requires_grad_(False)(x)", Inputs(shape=(16, 64)))
    assert [one.owner for one in frozen.tensors] == ["parameter Linear.weight"]
    assert not frozen.total


def test_an_open_index_does_not_run_a_checkpoint_again() -> None:
    """Of `y[:, rows] = x` autograd keeps a list, in which the open index has no tensor; the rest belongs to the checkpoint."""
    runs: list[int] = []

    def put(x: Any) -> Any:
        runs.append(1)
        y = torch.zeros(4, 4)
        y[:, torch.tensor([0, 2])] = x.exp()
        return y

    result = checkpoint(put, torch.randn(4, 2, requires_grad=True), use_reentrant=False)
    saved_by(result)
    assert len(runs) == 1


def test_a_checkpoint_keeps_its_input_only() -> None:
    x = torch.rand(N, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        result: Any = checkpoint(lambda y: y.sin().exp().sqrt(), x + 1, use_reentrant=False)
        return result

    calls: list[int] = []
    found = saved(lambda x: (calls.append(1), run(x))[1], x)
    assert names(found) == ["checkpoint.input"]
    assert found.total == UNIT
    assert [node for node, _ in found.made_again] == ["SinBackward0", "ExpBackward0", "SqrtBackward0"]
    assert len(calls) == 1
    plain = saved(lambda x: (x + 1).sin().exp().sqrt(), x)
    assert plain.total == 3 * UNIT
    assert not plain.made_again


def test_a_function_of_ones_own() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, x + 1)
            ctx.other = x + 2
            return x + 3

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g

    found = saved(Own.apply, torch.rand(N, requires_grad=True))
    assert names(found) == ["OwnBackward.saved_tensors[0]", "OwnBackward.saved_tensors[1]", "OwnBackward.ctx.other"]
    assert [one.owner for one in found.tensors] == ["input 0", "", ""]
    assert found.total == found.beyond_result == 2 * UNIT


def test_what_nothing_holds_any_more_is_not_kept() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        unused = (x + 1).exp()
        del unused
        return x * 2.0

    assert saved(run, torch.rand(N, requires_grad=True)).total == 0


def test_a_freed_graph_is_an_error() -> None:
    z = torch.rand(4, requires_grad=True).exp()
    z.sum().backward()
    with pytest.raises(ConfigError, match="freed by backward"):
        saved_by(z)


@pytest.mark.parametrize(("name", "attention"), [("llama-gqa", "sdpa"), ("gpt2", "eager"), ("bert", "eager")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_models(name: str, attention: str, dtype: torch.dtype, checkpointed: bool) -> None:
    """As many bytes as hooks count that know nothing of graphs, and each in a named module's tensors."""
    built = build(name, attention, dtype)
    if checkpointed:
        built.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = built.ids(32, 2)
    torch.manual_seed(0)
    with keeping(owned(built.model)) as seen:
        outputs = built.model(ids, labels=ids)
        counted = total(seen)
    del outputs, seen
    found = saved(built.model, ids, labels=ids)
    inputs = sum(storage.nbytes for storage in found.storages if storage.owner.startswith("input"))
    assert found.total + inputs == counted
    assert bool(found.made_again) == checkpointed
    weights = {one.owner for one in found.tensors if one.owner.startswith("parameter ")}
    assert weights <= {f"parameter {name}" for name, _ in built.model.named_parameters()}
    assert checkpointed or len(weights) > 10


def test_a_plain_module_of_nested_results() -> None:
    lstm = nn.LSTM(8, 8)
    found = saved(lstm, torch.rand(4, 2, 8, requires_grad=True))
    assert found.total > 0
    assert {one.owner for one in found.tensors if "parameter" in one.owner} >= {"parameter weight_ih_l0"}


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command() -> None:
    found = typed("saved torch.nn.Sigmoid()(x)")
    assert found.code == 0
    assert "SigmoidBackward0.result" in found.out
    assert "4,194,304 bytes in 1 storage" in found.out
    said = document("saved '(x + 1) * (y + 1)' --constant y --shape 4,8 --dtype bfloat16")
    assert said["total"] == said["beyond_result"] == 4 * 8 * 2
    assert [one["field"] for one in said["tensors"]] == ["other"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("saved 'x +'", "not one Python expression"),
        ("saved 'import os'", "not one Python expression"),
        ("saved 'unknown(x)'", "NameError: name 'unknown' is not defined"),
        ("saved 'exit()'", "SystemExit"),
        ("saved 'x @ y' --shape 4,5", "cannot be multiplied (4x5 and 4x5)"),
        ("saved x.shape", "gives Size, not a tensor"),
        ("saved torch.nn.Sigmoid()", "call it, as in torch.nn.Sigmoid()(x)"),
        ("saved x --shape 99999,99999", "must have 0 to"),
        ("saved x --shape 1,-1", "must be sizes such as 4,1024"),
        ("saved x --constant w", "the tensors are called x, y and z"),
        ("saved x --dtype int8", "--dtype"),
    ],
)
def test_what_goes_wrong_is_one_line(line: str, says: str) -> None:
    found = typed(line)
    assert found.code == 2
    assert not found.out
    assert says in found.err
    assert found.err.count("\n") == 1


def test_the_default_dtype_comes_back() -> None:
    typed("saved 'nn.Linear(4, 4)(x)' --shape 4,4 --dtype bfloat16")
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("case", "constant", "kept", "peak"),
    [(1, "x,y", 0, 2), (2, "", 2, 2), (3, "y", 1, 2), (4, "", 0, 2), (5, "", 2, 3), (6, "", 0, 0), (7, "", 4, 4)],
)
def test_article_5_from_a_file(case: int, constant: str, kept: int, peak: int) -> None:
    """The article's own tensors of 2^29 elements, which hold no data."""
    file = Path(__file__).parents[3] / "docs" / "examples" / f"article5.py:case{case}"
    line = f"saved {shlex.quote(str(file))} --constant '{constant}' --dtype float16 --device cuda --shape 512,1024,1024"
    found = document(line)
    assert (found["persistent"] / 2**30, found["peak"] / 2**30) == (kept, peak)


def test_article_5_in_one_command() -> None:
    found = document("saved --cases")["cases"]
    shown = [f"{one['kept']:g}/{one['peak']:g}" for one in found]
    assert shown == ["0/2", "2/2", "1/2", "0/2", "2/3", "0/0", "4/4"]
    assert all(text in typed("saved --cases").out for text in shown)


def test_cuda_keeps_a_byte_for_each_element_of_a_mask() -> None:
    (mask,) = document("saved 'F.dropout(x)' --device cuda --dtype float16 --shape 1024")["tensors"]
    assert (mask["dtype"], mask["nbytes"]) == ("bool", 1024)


def test_tensors_are_named_by_what_made_them() -> None:
    found = saved_by_expression("(x + 1) * torch.exp(-y).view(2, -1).sum()", SMALL)
    assert {one.made_by for one in found.tensors if not one.owner} >= {"x + 1", "torch.exp(-y)"}
    text = typed("saved '(x + 1) * (y + 1)' --constant y").out
    assert "y + 1" in text
    assert "1 / 2 of x" in text


def test_what_depends_on_data_has_no_peak() -> None:
    found = document("saved 'x[x > 0.5].exp()'")
    assert found["peak"] is None
    assert found["total"] > 0


@pytest.mark.parametrize(("target", "said"), [("nothing.py:f", "no such file"), ("", "EXPRESSION")])
def test_files_that_cannot_be_used(target: str, said: str) -> None:
    found = typed(["saved", target] if target else ["saved"])
    assert found.code == 2
    assert said in found.err


# -- names by address --------------------------------------------------------------------------------------------------

FREED = [
    "1 / (1 + torch.exp(-x))",
    "3 / (2 + torch.exp(-(x * 2)))",
    "torch.log(1 + torch.exp(-x)).sin() / (x + 2)",
    "1 / torch.sqrt(1 + (-x).abs())",
    "F.layer_norm(-(x + 1), (64,)) * (1 / (-x + 3)).sum()",
    "(lambda e: 1 / (e + 1))(torch.exp(-x)) * F.gelu(-x - 1)",
    "(-x).view(64, 64).t().reshape(-1).cos() / (1 + (x * 2).view(-1))",
]
"""Expressions whose parts are freed on the way, so that later storages lie where they lay."""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("text", FREED)
def test_a_storage_is_not_named_after_what_lay_there_before(text: str, device: str) -> None:
    """The value of each part that names a storage is what PyTorch's own graph keeps under that node's field."""
    x = torch.rand(64, 64, requires_grad=True)
    scope = {"x": x, "torch": torch, "F": nn.functional}
    ours: list[tuple[str, str, torch.Tensor]] = []
    waiting = [eval(text, dict(scope)).grad_fn]
    while waiting:
        node = waiting.pop()
        for name in dir(node):
            if name.startswith("_saved_") and isinstance(getattr(node, name), torch.Tensor):
                ours.append((node.name(), name.removeprefix("_saved_"), getattr(node, name).flatten()))
        waiting += [follower for follower, _ in node.next_functions if follower is not None]
    kept = saved_by_expression(text, Inputs(shape=(64, 64), device=device)).tensors
    named = [one for one in kept if one.made_by and not one.made_by.startswith("inside ")]
    assert any(one.made_by.startswith("inside ") for one in kept) or len(named) > 1
    for one in named:
        value = eval(one.made_by, {**scope, "e": torch.exp(-x)}).flatten()
        assert any((one.node, one.field) == (node, field) and torch.equal(value, held) for node, field, held in ours), (
            one
        )


def test_the_reciprocal_of_a_sigmoid_by_hand_has_its_own_name() -> None:
    (name,) = (
        one.made_by for one in saved_by_expression("1 / (1 + torch.exp(-x))", SMALL).tensors if "Recip" in one.node
    )
    assert name == "inside 1 / (1 + torch.exp(-x))"


def test_strides_and_the_kernel_of_attention_are_said() -> None:
    (one,) = saved_by_expression("(x.t() + 1).cos()", Inputs(shape=(4, 8))).tensors
    assert (one.shape, one.stride) == ((8, 4), (1, 8))
    line = "saved 'F.scaled_dot_product_attention(x, y, z)' --device cuda --dtype bfloat16 --shape 1,2,64,"
    assert "attention ran in FlashAttention" in typed(f"{line}64").out
    assert "attention ran in the memory-efficient kernel" in typed(f"{line}512").out
