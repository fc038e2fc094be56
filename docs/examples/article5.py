"""Article 5's seven cases, for `loadgauge saved docs/examples/article5.py:case4 --dtype float16 --device cuda`.

Kept until backward / most at once, in tensors: 0/2, 2/2, 1/2, 0/2, 2/3, 0/0, 4/4.
"""

from typing import Any

import torch


def case1(x: Any, y: Any) -> Any:
    """A product; x and y need no gradient (--constant x,y)."""
    return (x + 1) * (y + 1)


case2 = case1
"""The same; both need one."""
case3 = case1
"""The same; x needs one (--constant y)."""


class case4(torch.autograd.Function):
    """The same, which keeps x and y and works the factors out again."""

    @staticmethod
    def forward(ctx: Any, x: Any, y: Any) -> Any:
        ctx.save_for_backward(x, y)
        return (x + 1) * (y + 1)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, y = ctx.saved_tensors
        return grad * (y + 1), grad * (x + 1)


def case5(x: Any) -> Any:
    """A sigmoid by hand."""
    return 1 / (1 + torch.exp(-x))


def case6(x: Any) -> Any:
    """PyTorch's."""
    return torch.sigmoid(x)


def case7(x: Any) -> Any:
    """Five of them, one after the other."""
    for _ in range(5):
        x = torch.sigmoid(x)
    return x


def exercise(x: Any, y: Any) -> Any:
    """The article's exercise: the Function with a lower peak."""
    from loadgauge.train.fused import shifted_product

    return shifted_product(x, y)
