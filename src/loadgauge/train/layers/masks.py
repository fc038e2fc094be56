"""Attention spans of a layer, read off the model's own mask function.

transformers builds every mask from a function of (batch, head, query index, key index). Evaluated on chosen indices it
tells whether a layer is causal, sees everything, a window or a chunk; anything else is kept as the function it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

FAR = 1 << 18
"""Index [tokens] around which a mask function is read; a window that reaches further is taken to be without limit."""


@dataclass(frozen=True)
class Reach:
    """Reach of a token within its sequence [tokens]; -1: without limit.

    `left` back, `right` ahead, `chunk` (0: none) width of the pieces that do not see each other. `function` is set when
    none of these says it, and then decides alone.
    """

    left: int = -1
    right: int = 0
    chunk: int = 0
    function: MaskFunction | None = None
    _dense: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        if self.function is not None:
            return "a mask of its own"
        ahead = {0: "causal", -1: "bidirectional"}.get(self.right, f"{self.right} ahead")
        window = "" if self.left < 0 else f", {self.left} back"
        return ahead + window + (f", chunks of {self.chunk}" if self.chunk else "")

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether the token at index `query` sees the one at `key`, by broadcasting.

        >>> Reach(left=1).sees(torch.arange(3)[:, None], torch.arange(3)[None]).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
        """
        if self.function is not None:
            return _evaluate(self.function, query, key)
        offset = key - query
        seen = torch.ones_like(offset, dtype=torch.bool)
        if self.left >= 0:
            seen = seen & (offset >= -self.left)
        if self.right >= 0:
            seen = seen & (offset <= self.right)
        if self.chunk:
            seen = seen & (query // self.chunk == key // self.chunk)
        return seen

    def over(self, length: int, device: torch.device) -> Tensor:
        """Return the visible pairs of a sequence of `length` tokens, boolean (length, length): rows are queries, columns keys."""
        index = torch.arange(length, device=device)
        return self.sees(index[:, None], index[None])

    def dense(self, length: int, device: torch.device) -> Tensor | None:
        """Boolean mask (length, length), or None where a sequence that short is simply causal or sees all of itself."""
        if self.plain(length):
            return None
        mask = self._dense.get((length, device))
        if mask is None:
            mask = self.over(length, device)
            self._dense.clear()  # neighbours in a batch differ in length; only layers of one forward share a mask
            self._dense[length, device] = mask
        return mask

    def plain(self, length: int) -> bool:
        """Return whether no window, chunk or function of this mask is felt within `length` tokens."""
        if self.function is not None or (self.chunk and length > self.chunk):
            return False
        return (self.left < 0 or self.left >= length - 1) and (self.right <= 0 or self.right >= length - 1)


def _evaluate(function: MaskFunction, query: Tensor, key: Tensor) -> Tensor:
    query, key = torch.broadcast_tensors(query, key)
    zero = torch.zeros((), dtype=torch.long, device=query.device)
    return torch.as_tensor(function(zero, zero, query, key)).expand(query.shape).to(torch.bool)


def reach_of(function: MaskFunction) -> Reach:
    """The reach that a mask function describes, checked on rows, the neighbourhood of its edges, and random pairs.

    >>> reach_of(lambda batch, head, query, key: (key <= query) & (key > query - 5))
    Reach(left=4, right=0, chunk=0, function=None)
    >>> str(reach_of(lambda batch, head, query, key: (key <= query) & (query // 8 == key // 8)))
    'causal, chunks of 8'
    """
    other = Reach(function=function)
    try:
        candidates = _candidates(function)
        generator = torch.Generator().manual_seed(0)
        query = torch.randint(FAR, (1 << 14,), generator=generator)
        near = (query + torch.randint(-64, 65, query.shape, generator=generator)).clamp(min=0)
        far = torch.randint(FAR, query.shape, generator=generator)
        small = torch.arange(96)
        pairs = [(query, near), (query, far), (small[:, None], small[None])]
        for candidate in candidates:
            edge = [(query, (query + step).clamp(min=0)) for step in _edges(candidate)]
            if all(torch.equal(candidate.sees(q, k), _evaluate(function, q, k)) for q, k in pairs + edge):
                return candidate
    except (IndexError, RuntimeError, TypeError):
        return other
    return other


def _edges(reach: Reach) -> list[int]:
    return [step for at in (-reach.left, reach.right, reach.chunk, -reach.chunk) if at for step in (at - 1, at, at + 1)]


def _candidates(function: MaskFunction) -> list[Reach]:
    far = torch.tensor(FAR)
    index = torch.arange(2 * FAR)
    row = _evaluate(function, far, index)
    left, right = int(row[:FAR].sum()), int(row[FAR + 1 :].sum())
    window = Reach(-1 if left == FAR else left, -1 if right == FAR - 1 else right)
    # A chunk ends where a token no longer sees the one before it.
    breaks = (~_evaluate(function, index[1:], index[:-1])).nonzero().flatten()
    chunk = int(breaks[0]) + 1 if len(breaks) else 0
    return [window, *(Reach(-1, right_of_chunk, chunk) for right_of_chunk in (0, -1) if chunk)]
