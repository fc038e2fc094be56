"""The bytes that the kernels of a written-out norm move, as PyTorch runs them one by one."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
llama = pytest.importorskip("transformers.models.llama.modeling_llama")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from loadgauge.core.definitions.model.kernels import WRITTEN_KERNELS, written_norm_bytes  # noqa: E402

ROWS, WIDTH = 64, 512
VIEWS = ("expand", "view", "_unsafe_view", "detach", "alias")


class Moved(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of what each operation reads and writes, and how many of them run."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self.kernels = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in VIEWS:
            sizes = [self.stored(leaf) for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
            self.nbytes += sum(sizes)
            self.kernels += 1
        return out

    @staticmethod
    def stored(tensor: Any) -> int:
        return (
            tensor.element_size()
            * torch.Size(
                size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            ).numel()
        )


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("x", "gain"), [("bfloat16", "bfloat16"), ("float32", "float32"), ("bfloat16", "float32")])
def test_a_written_out_norm_moves_the_bytes_of_its_kernels(x: str, gain: str, trained: bool):
    norm = llama.LlamaRMSNorm(WIDTH).to(getattr(torch, gain))
    norm.weight.requires_grad_(trained)
    value = torch.randn(ROWS, WIDTH, dtype=getattr(torch, x), requires_grad=True)
    with Moved() as forward:
        result = norm(value)
    ones = torch.ones_like(result)
    with Moved() as backward:
        result.backward(ones)
    sizes = written_norm_bytes(value.element_size(), result.element_size(), trained=trained)
    for moved, nbytes, kernels in zip((forward, backward), sizes, WRITTEN_KERNELS, strict=True):
        # What belongs to a row or to the gain is a few thousandths of it.
        assert moved.nbytes == pytest.approx(nbytes * ROWS * WIDTH, rel=0.005)
        assert abs(moved.kernels - kernels) <= 3
