"""What a small function leaves behind until backward, and the most it holds at once: article 5's cases, traced."""

from importlib.util import find_spec
from typing import Any

N = 2**29
"""Elements of its tensors, of two bytes each: one GiB."""


CASES = {
    "1": "(x + 1) * (y + 1), no gradient",
    "2": "(x + 1) * (y + 1), x and y need a gradient",
    "3": "(x + 1) * (y + 1), x needs a gradient",
    "4": "the same as an autograd.Function that keeps x and y",
    "5": "1 / (1 + torch.exp(-x)) by hand",
    "6": "torch.sigmoid(x)",
    "7": "torch.sigmoid five times",
}
"""The article's cases, in words."""


def held(case: str, peak: bool) -> float | None:
    """GiB beside the inputs and the result: until backward, or at the peak; None without PyTorch.

    The tensors hold no data, so nothing is allocated.
    """
    if find_spec("torch") is None:
        return None
    import torch

    from loadgauge.pytorch.trace.programs.call import trace_call

    function, of_x, of_y = _cases()[case]
    x = torch.empty(N, dtype=torch.float16, device="meta", requires_grad=of_x)
    y = torch.empty(N, dtype=torch.float16, device="meta", requires_grad=of_y)
    persistent, most = trace_call(function, x, y, device="cuda").extra
    return (most if peak else persistent) / x.nbytes


def _cases() -> dict[str, tuple[Any, bool, bool]]:
    """Return what each case calls, and whether x and y need a gradient."""
    import torch

    class Product(torch.autograd.Function):
        """(x + 1) * (y + 1), which keeps x and y and works the factors out again."""

        @staticmethod
        def forward(ctx: Any, x: Any, y: Any) -> Any:
            ctx.save_for_backward(x, y)
            return (x + 1) * (y + 1)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x, y = ctx.saved_tensors
            return grad * (y + 1), grad * (x + 1)

    def product(x: Any, y: Any) -> Any:
        return (x + 1) * (y + 1)

    def five(x: Any, y: Any) -> Any:
        for _ in range(5):
            x = torch.sigmoid(x)
        return x

    return {
        "1": (product, False, False),
        "2": (product, True, True),
        "3": (product, True, False),
        "4": (Product.apply, True, True),
        "5": (lambda x, y: 1 / (1 + torch.exp(-x)), True, False),
        "6": (lambda x, y: torch.sigmoid(x), True, False),
        "7": (five, True, False),
    }
