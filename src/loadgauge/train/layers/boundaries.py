"""Where one sequence ends and the next begins, as it travels through a model.

A flat batch is one row of T tokens. Its boundaries travel in the place of the attention mask: a boolean tensor of shape
(1, 1, 1, T), true at the last token of every sequence ("marks"). transformers hands a four-dimensional mask to every
layer unchanged, checkpointing keeps it as an argument, and `torch.compile` sees an ordinary tensor. What has been worked
out on the host once (`Boundaries`) rides along as an attribute of the tensor; it is worked out again where it is lost.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import Tensor

from loadgauge.core.base.errors import ConfigError


@dataclass(frozen=True)
class Rows:
    """The padded shape that flat tokens came from.

    `index` [tokens]: for each flat token its place in the padded batch, row by row; `batch` sequences of `longest` tokens.
    """

    index: Tensor
    batch: int
    longest: int

    def gather(self, padded: Tensor) -> Tensor:
        """Return the real tokens of a padded tensor: (batch, longest, ...) to (1, tokens, ...)."""
        return padded.flatten(0, 1).index_select(0, self.index)[None]

    def scatter(self, flat: Tensor) -> Tensor:
        """Return a flat tensor padded again with zeros: (1, tokens, ...) to (batch, longest, ...)."""
        rows = flat.new_zeros(self.batch * self.longest, *flat.shape[2:]).index_copy(0, self.index, flat[0])
        return rows.view(self.batch, self.longest, *flat.shape[2:])


@dataclass(frozen=True)
class Boundaries:
    """Lengths of the sequences of a flat batch [tokens], and the padded shape it came from, if any."""

    lengths: tuple[int, ...]
    rows: Rows | None = None
    _cumulative: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tokens(self) -> int:
        """Sum of the lengths [tokens]."""
        return sum(self.lengths)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First token and end of each sequence.

        >>> Boundaries((2, 3)).spans
        [(0, 2), (2, 5)]
        """
        ends = [0]
        for length in self.lengths:
            ends.append(ends[-1] + length)
        return list(itertools.pairwise(ends))

    def cumulative(self, device: torch.device) -> Tensor:
        """Return 0, l_1, l_1 + l_2, ... as int32, (sequences + 1,): the form flash-attn and `torch.nn.attention.varlen` take."""
        if device not in self._cumulative:
            ends = [0, *(end for _, end in self.spans)]
            self._cumulative[device] = torch.tensor(ends, dtype=torch.int32, device=device)
        return self._cumulative[device]

    def marks(self, device: torch.device) -> Tensor:
        """The boolean tensor (1, 1, 1, tokens) that carries these boundaries through a model."""
        marks = torch.zeros(self.tokens, dtype=torch.bool)
        marks[[end - 1 for _, end in self.spans]] = True
        carrier = marks.to(device).view(1, 1, 1, -1)
        carrier.boundaries = self  # type: ignore[attr-defined]
        return carrier

    def positions(self, device: torch.device) -> Tensor:
        """Positions (1, tokens) that start again at 0 with every sequence."""
        return torch.cat([torch.arange(length) for length in self.lengths]).to(device)[None]


def from_lengths(lengths: Sequence[int]) -> Boundaries:
    """Boundaries of sequences of the given lengths; empty ones are left out.

    >>> from_lengths([3, 0, 1])
    Boundaries(lengths=(3, 1), rows=None)
    """
    if any(length < 0 for length in lengths) or not any(lengths):
        raise ConfigError(f"must hold at least one token, got {list(lengths)[:8]}", key="lengths")
    return Boundaries(tuple(int(length) for length in lengths if length))


def from_cumulative(cumulative: Tensor, tokens: int) -> Boundaries:
    """Boundaries from cumulated lengths 0, l_1, l_1 + l_2, ... [tokens], which must end at `tokens`.

    Raises ConfigError where they do not rise from 0 to `tokens`. This waits for the GPU.
    """
    ends = cumulative.tolist()
    if not ends or ends[0] != 0 or ends[-1] != tokens or sorted(ends) != ends:
        raise ConfigError(f"must rise from 0 to the {tokens} tokens of the batch, got {ends[:8]}", key="cu_seq_lens_q")
    return from_lengths([end - start for start, end in itertools.pairwise(ends)])


def from_positions(position_ids: Tensor) -> Boundaries:
    """Boundaries from positions (1, tokens): a sequence starts wherever they do not go on by one.

    >>> from_positions(torch.tensor([[0, 1, 2, 0, 0, 1]])).lengths
    (3, 1, 2)
    """
    positions = position_ids.reshape(-1)
    starts = (positions.diff() != 1).nonzero().flatten() + 1
    ends = [0, *starts.tolist(), len(positions)]
    return from_lengths([end - start for start, end in itertools.pairwise(ends)])


def from_padded(mask: Tensor) -> Boundaries:
    """Boundaries of a padded batch from its mask (batch, longest), 1 at real tokens, wherever the padding stands."""
    batch, longest = mask.shape
    real = mask != 0
    index = real.flatten().nonzero().flatten()
    return Boundaries(from_lengths(real.sum(1).tolist()).lengths, Rows(index, batch, longest))


def is_marks(mask: object, tokens: int) -> TypeGuard[Tensor]:
    """Return whether a mask that reached a layer of `tokens` tokens carries boundaries."""
    return isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == (1, 1, 1, tokens)


def read(marks: Tensor) -> Boundaries:
    """The boundaries that `marks` (1, 1, 1, tokens) carry: its attribute, or else its true entries, each a last token.

    Raises ConfigError where the last token is not the end of a sequence.
    """
    attached = getattr(marks, "boundaries", None)
    if isinstance(attached, Boundaries):
        return attached
    ends = (marks.reshape(-1).nonzero().flatten() + 1).tolist()
    if not ends or ends[-1] != marks.shape[-1]:
        raise ConfigError("the boundaries were changed on their way through the model")
    return from_lengths([end - start for start, end in zip([0, *ends], ends, strict=False)])


def marks_from_cumulative(cumulative: Tensor, tokens: int) -> Tensor:
    """Marks from cumulated lengths by tensor operations alone: nothing is read back, so a compiler keeps one graph."""
    marks = torch.zeros(tokens, dtype=torch.bool, device=cumulative.device)
    marks = marks.index_fill(0, cumulative[1:].long() - 1, True)
    return marks.view(1, 1, 1, -1)
