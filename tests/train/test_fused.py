"""Operators that keep less: the same value and gradient as the plain formula, and the bytes they promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.measure.profile import measured
from loadgauge.pytorch.trace.programs.call import trace_call
from loadgauge.pytorch.trace.saved import saved
from loadgauge.train import fused

T, H, V, CHUNK = 96, 64, 256, 32
SMALL = 64
"""Bytes that scalars may take."""


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers writes it."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def cross_entropy(hidden: Tensor, weight: Tensor) -> Tensor:
    logits = (hidden @ weight.t()).to(torch.promote_types(hidden.dtype, torch.float32))
    return functional.cross_entropy(logits, targets(len(hidden), len(weight)).to(hidden.device))


def targets(tokens: int, vocabulary: int) -> Tensor:
    numbers = torch.arange(tokens) * 7 % vocabulary
    return numbers.where(torch.arange(tokens) % 5 != 0, -100)


class Case(NamedTuple):
    fused: Callable[..., Tensor]
    plain: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    persistent: int
    """Bytes kept in float32 beside the inputs and the result."""
    peak: int
    """Bytes above the inputs and the result in forward, at most."""


TENSOR = 4 * T * H
CASES = {
    "product": Case(fused.shifted_product, lambda x, y: (x + 1) * (y + 1), ((T, H), (T, H)), 0, TENSOR),
    "sigmoid chain": Case(
        lambda x: fused.sigmoid_chain(x, 5),
        lambda x: torch.nn.Sequential(*(torch.nn.Sigmoid() for _ in range(5)))(x),
        ((T, H),), 0, 0,
    ),
    "swiglu": Case(fused.swiglu, lambda g, u: functional.silu(g) * u, ((T, H), (T, H)), 0, 0),
    "rms norm": Case(fused.rms_norm, rms, ((T, H), (H,)), 4 * T, TENSOR + 8 * T),
    "cross entropy": Case(
        lambda h, w: fused.linear_cross_entropy(h, w, targets(len(h), len(w)).to(h.device), chunk=CHUNK),
        cross_entropy,
        ((T, H), (V, H)), 4 * T + 8 * T, 4 * CHUNK * V + 64 * T,
    ),
}  # fmt: skip
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def inputs(case: Case, dtype: torch.dtype, *, tiny: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [tuple(-(-size // 16) for size in shape) for shape in case.shapes] if tiny else case.shapes
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def gradients(function: Callable[..., Tensor], given: list[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    result = function(*given)
    weights = torch.linspace(0.5, 1.5, result.numel(), dtype=result.dtype).view(result.shape)
    return result, torch.autograd.grad((result * weights).sum(), given)


@cases
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]
)
def test_value_and_gradient(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    given = inputs(case, dtype)
    value, slopes = gradients(case.fused, given)
    expected, expected_slopes = gradients(case.plain, given)
    assert value.dtype == expected.dtype
    for got, want in zip((value, *slopes), (expected, *expected_slopes), strict=True):
        assert got.dtype == want.dtype
        assert float((got - want).abs().max()) <= tolerance * float(want.abs().max())


@cases
def test_gradcheck(case: Case) -> None:
    given = inputs(case, torch.float64, tiny=True)
    assert torch.autograd.gradcheck(case.fused, given)


@cases
def test_only_what_is_asked_for(case: Case) -> None:
    """A gradient of one input is right where the others need none."""
    for number in range(len(case.shapes)):
        given = inputs(case, torch.float64, tiny=True)
        for other, tensor in enumerate(given):
            tensor.requires_grad_(other == number)
        (got,) = torch.autograd.grad(case.fused(*given).sum(), given[number])
        (want,) = torch.autograd.grad(case.plain(*given).sum(), given[number])
        assert torch.allclose(got, want)


@cases
def test_bytes_kept(case: Case) -> None:
    """By the graph, by trace and by the allocator."""
    given = inputs(case, torch.float32)
    if case is CASES["cross entropy"]:  # its targets belong to the caller
        wanted = targets(T, V)
        kept = saved(lambda h, w: fused.linear_cross_entropy(h, w, wanted, chunk=CHUNK), *given, names={"t": wanted})
        assert kept.beyond_result == 4 * T + 8  # and the count of targets
    else:
        assert saved(case.fused, *given).beyond_result == case.persistent
    plain = saved(case.plain, *given)
    assert plain.beyond_result > case.persistent + T * H
    with measured("cpu") as block:
        result = case.fused(*given)
    persistent, peak = block.usage.beyond(result)
    assert case.persistent <= persistent <= case.persistent + SMALL
    assert peak <= case.peak + SMALL
    with measured("cpu") as block:
        result = case.plain(*given)
    assert block.usage.beyond(result)[1] >= peak
    traced = trace_call(case.fused, *given, device="cpu").extra
    assert traced == pytest.approx((persistent, peak), abs=SMALL)


BACKWARD = {"product": 0, "sigmoid chain": 1, "swiglu": 0, "rms norm": 2, "cross entropy": None}
"""Tensors of the size of x above the gradients themselves, at most, while backward runs."""


@pytest.mark.parametrize("name", [name for name, extra in BACKWARD.items() if extra is not None])
def test_peak_of_backward(name: str) -> None:
    """By the allocator and by trace: what backward leaves are the gradients; what it takes beside them is stated."""
    case, extra = CASES[name], BACKWARD[name]
    assert extra is not None
    given = inputs(case, torch.float32)
    result = case.fused(*given)
    upstream = torch.ones_like(result)
    with measured("cpu") as block:
        slopes = torch.autograd.grad(result, given, upstream)
    persistent, peak = block.usage.beyond(*slopes)
    assert 0 <= persistent <= SMALL
    rows = 4 * T + SMALL  # a number a row
    assert extra * TENSOR <= peak <= extra * TENSOR + 2 * rows

    def step(*tensors: Tensor) -> Any:
        return torch.autograd.grad(case.fused(*tensors), tensors, torch.ones(T, H, device=tensors[0].device))

    whole = trace_call(step, *given, device="cpu")
    with measured("cpu") as block:
        slopes = step(*given)
    assert whole.peak == pytest.approx(block.usage.peak, abs=2 * rows)


def test_backward_of_the_loss_makes_no_logits() -> None:
    hidden, weight = (tensor.detach().requires_grad_() for tensor in inputs(CASES["cross entropy"], torch.float32))
    logits = 4 * T * V
    loss = CASES["cross entropy"].fused(hidden, weight)
    with measured("cpu") as block:
        loss.backward()
    made = hidden.nbytes + weight.nbytes
    assert block.usage.persistent == pytest.approx(made, abs=SMALL)
    assert block.usage.peak < made + weight.nbytes + 3 * 4 * CHUNK * V
    loss = CASES["cross entropy"].plain(hidden, weight)
    with measured("cpu") as block:
        loss.backward()
    assert block.usage.peak >= 2 * logits


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: fused.shifted_product(x, x[:1]), r"\(4, 4\) and \(1, 4\)"),
        (lambda x: fused.swiglu(x, x[:1]), "differ"),
        (lambda x: fused.sigmoid_chain(x, 0), "at least 1"),
        (lambda x: fused.rms_norm(x, x[0, :3]), r"weight has shape \(3,\)"),
        (lambda x: fused.linear_cross_entropy(x, x[:, :3], torch.zeros(4, dtype=torch.long)), "wants hidden"),
        (lambda x: fused.linear_cross_entropy(x, x, torch.zeros(3, dtype=torch.long)), "4 tokens"),
        (lambda x: fused.linear_cross_entropy(x, x, torch.zeros(4, dtype=torch.long), chunk=0), "at least 1"),
    ],
)
def test_errors(call: Callable[[Tensor], Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call(torch.rand(4, 4))
