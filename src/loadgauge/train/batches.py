"""Batches by tokens, not by sequences: without padding, tokens are what fills memory.

A budget of tokens is filled with sequences of mixed lengths; batches that run at the same time on several ranks have
nearly the same attention work (sum of squared lengths), so that no rank waits for another.
"""

import bisect
import random
from collections.abc import Iterator, Sequence
from typing import Any

from loadgauge.core.base.errors import ConfigError, refuse

POOL = 2048
"""Sequences packed together: enough to fill a budget closely, few enough to keep batches random."""


class TokenBudgetSampler:
    """Batch sampler: lists of indices whose lengths sum to at most `max_tokens`. Every index once an epoch.

    Of `ranks` processes, `rank` gets every batch of its own; all get the same number (the last ones are repeated). The
    order is drawn anew by `set_epoch`. Give it to a `DataLoader` as `batch_sampler`.

    >>> sampler = TokenBudgetSampler([5, 3, 2, 4, 1], max_tokens=6, shuffle=False)
    >>> [sum([5, 3, 2, 4, 1][i] for i in batch) for batch in sampler]
    [6, 6, 3]
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        ranks: int = 1,
        rank: int = 0,
    ) -> None:
        refuse(not lengths, "no sequences", key="lengths")
        refuse(not 0 <= rank < ranks, f"must be at least 0 and below ranks={ranks}, got {rank}", key="rank")
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        if min(lengths) < 1 or lengths[longest] > max_tokens:
            raise ConfigError(
                f"sequence {longest} has {lengths[longest]} tokens: every length must be at least 1 and fit max_tokens",
                key="max_tokens",
            )
        self.lengths, self.max_tokens = list(lengths), max_tokens
        self.shuffle, self.seed, self.ranks, self.rank = shuffle, seed, ranks, rank
        self.epoch = 0
        self._batches: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Draw another order for this epoch, by its number, as PyTorch's `DistributedSampler` does."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        yield from self._all()[self.rank :: self.ranks]

    def __len__(self) -> int:
        return len(self._all()) // self.ranks

    def _all(self) -> list[list[int]]:
        if self._batches is None or self._batches[0] != self.epoch:
            self._batches = (self.epoch, self._draw(random.Random(f"{self.seed} {self.epoch}")))
        return self._batches[1]

    def _draw(self, source: random.Random) -> list[list[int]]:
        order = list(range(len(self.lengths)))
        if self.shuffle:
            source.shuffle(order)
        batches = [batch for first in range(0, len(order), POOL) for batch in self._pack(order[first : first + POOL])]
        if self.ranks > 1:
            batches.sort(key=self._work)
            batches += batches[-1:] * (-len(batches) % self.ranks)
        steps = [batches[first : first + self.ranks] for first in range(0, len(batches), self.ranks)]
        if self.shuffle:
            source.shuffle(steps)
        return [batch for step in steps for batch in step]

    def _pack(self, pool: list[int]) -> list[list[int]]:
        """Best fit, longest first: each sequence joins the fullest batch that still has room."""
        batches: list[list[int]] = []
        room: list[tuple[int, int]] = []  # (tokens left, batch), rising
        for index in sorted(pool, key=lambda i: -self.lengths[i]):
            length = self.lengths[index]
            at = bisect.bisect_left(room, (length, -1))
            if at == len(room):
                batches.append([index])
                left, batch = self.max_tokens - length, len(batches) - 1
            else:
                left, batch = room.pop(at)
                left -= length
                batches[batch].append(index)
            bisect.insort(room, (left, batch))
        return batches

    def _work(self, batch: list[int]) -> int:
        return sum(self.lengths[index] ** 2 for index in batch)


class TokenBudgetDataset:
    """A data set whose items are whole batches (lists of features) of at most `max_tokens` tokens.

    For trainers that make their own sampler: give it as training data with a batch size of 1 and `Collator` as collator.
    `lengths` defaults to the lengths of `input_ids`.
    """

    def __init__(
        self, data: Any, max_tokens: int, *, lengths: Sequence[int] | None = None, seed: int = 0, shuffle: bool = True
    ) -> None:
        lengths = [len(row["input_ids"]) for row in data] if lengths is None else lengths
        self.data = data
        self.batches = list(TokenBudgetSampler(lengths, max_tokens, seed=seed, shuffle=shuffle))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> list[Any]:
        return [self.data[i] for i in self.batches[index]]
