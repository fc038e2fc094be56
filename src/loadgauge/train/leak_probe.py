"""The exact leak probe: no output of one sequence may depend on another, to the last bit."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loadgauge.train.inspect_model import first_tensor, whole


@dataclass(frozen=True)
class Leak:
    """`worst`: largest gradient of one sequence's outputs with respect to another's input embeddings, as a share of the
    largest with respect to its own; 0 means exactly 0. `pair`: (sequence that sees, sequence that is seen).
    """

    worst: float
    pair: tuple[int, int] | None


@contextlib.contextmanager
def embeddings(model: nn.Module) -> Iterator[list[Tensor]]:
    """A context that yields a list, to which the input embeddings of each call are added as leaves of the graph.

    Each entry: (batch, positions, width). Parameters are frozen meanwhile.
    """
    leaves: list[Tensor] = []

    def cut(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_()
        leaves.append(leaf)
        return leaf * 1  # some models change their embeddings in place, which a leaf does not allow

    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    handle = whole(model).get_input_embeddings().register_forward_hook(cut)
    try:
        for parameter in frozen:
            parameter.requires_grad_(False)
        yield leaves
    finally:
        handle.remove()
        for parameter in frozen:
            parameter.requires_grad_(True)


def leak(model: nn.Module, batch: dict[str, Any], lengths: Sequence[int]) -> Leak:
    """Probe `model(**batch)`: a flat row of sequences of these lengths. One forward, one backward a sequence.

    Gradients come from whole backward passes with frozen parameters, so both kinds of checkpointing are probed as they
    run. Outputs are one row of tokens (1, T, ...) or one row a sequence (B, ...).
    """
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad(), embeddings(model) as leaves:
        output = first_tensor(model(**batch))
        leaf = leaves[0]
        by_token = output.shape[0] == 1 and output.shape[1] == sum(lengths)
        weights = torch.randn(output.shape, generator=generator).to(output)
        worst, pair, start = 0.0, None, 0
        for index, length in enumerate(lengths):
            of = output[:, start : start + length] if by_token else output[index : index + 1]
            by = weights[:, start : start + length] if by_token else weights[index : index + 1]
            leaf.grad = None
            of.backward(by, retain_graph=index + 1 < len(lengths))
            size = _by_token(leaf)
            own = float(size[start : start + length].max())
            first = 0
            for other, width in enumerate(lengths):
                seen = float(size[first : first + width].max()) if other != index else 0.0
                first += width
                if seen != 0.0 and (pair is None or seen / own > worst):
                    worst, pair = (seen / own if own else float("inf")), (index, other)
            start += length
    return Leak(worst, pair)


def _by_token(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad.double().abs().flatten(0, -2).amax(-1)
