"""Lengths of the sequences of a data set, and what to expect of a batch of them: exactly, without simulation.

A batch is `b` independent draws (with replacement). The bytes a layer keeps are linear in tokens and query-key pairs,
so the expected bytes are those of a `View` with the expected tokens and pairs: padded, b E[K] and b E[K^2] with K the
longest of the batch; padding-free, E[sum s] and E[sum s^2]. FLOPs are linear in them too.

Legend: v_1 < v_2 < ... the distinct lengths, F_i the share of lengths that are at most v_i. K <= v_i has probability
F_i^b, so E[K] = v_m - sum over i < m of F_i^b (v_{i+1} - v_i), and alike with squares for E[K^2] (source: padfree2024).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.lengths.files import read, whole

if TYPE_CHECKING:
    from pathlib import Path


class RankGroups(NamedTuple):
    """Groups of ranks that sequences are shared over by their lengths.

    largest: ranks of the longest; mean: ranks of a sequence; held, pairs: most tokens and query-key pairs of one on a rank
    passed: tokens that travel, each once to every other rank of its group, over the tokens
    """

    largest: int
    mean: float
    held: float
    pairs: float
    passed: float


class Lengths(msgspec.Struct, frozen=True):
    """A distribution of sequence lengths [tokens].

    `values`: the distinct lengths, rising; `cumulative`: how many sequences are at most that long.
    """

    values: Sequence[int]
    cumulative: Sequence[int]

    @classmethod
    def uniform(cls, longest: int) -> Lengths:
        """Return the uniform distribution from 1 to `longest` tokens: U{1..N}.

        >>> Lengths.uniform(8192).mean
        4096.5
        """
        every = range(1, whole(longest, key="longest") + 1)
        return cls(every, every)

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Lengths:
        """Return the distribution of the lengths of a data set [tokens].

        >>> Lengths.of([512, 512, 1024]).mean_square == (2 * 512**2 + 1024**2) / 3
        True
        """
        return cls._counted(Counter(whole(length) for length in lengths))

    @classmethod
    def histogram(cls, counts: Mapping[int, int], file: str = "") -> Lengths:
        """Return the distribution of a histogram: the number of sequences of each length [tokens].

        >>> Lengths.histogram({512: 2, 1024: 1}) == Lengths.of([512, 512, 1024])
        True
        """
        for length, count in counts.items():
            whole(length, file=file)
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ConfigError(f"must be whole numbers, got {count!r} of length {length}", key="counts", file=file)
        return cls._counted(Counter({length: count for length, count in counts.items() if count}), file)

    def shifted(self, more: int) -> Lengths:
        """Return the distribution of lengths that are so many tokens more, such as those of a prompt before an answer.

        >>> Lengths.of([512, 1024]).shifted(100).mean
        868.0
        """
        return Lengths(tuple(value + more for value in self.values), tuple(self.cumulative))

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read lengths from `uniform:N`, a file, or `FILE:COLUMN` of a data set. Raises `ConfigError`.

        >>> Lengths.parse("uniform:8192") == Lengths.uniform(8192)
        True
        """
        if "\0" in text:
            raise ConfigError("no file name has a zero byte in it", key="lengths")
        from pathlib import Path

        start, colon, rest = text.rpartition(":")
        if not colon or Path(text).exists():
            return cls.from_file(text)
        if start == "uniform":
            if not (rest.isascii() and rest.isdecimal() and len(rest) <= 20):
                raise ConfigError(f"must be like uniform:8192, got {text!r}", key="lengths")
            return cls.uniform(int(rest))
        return cls.from_file(start, rest) if Path(start).exists() else cls.from_file(text)

    @classmethod
    def from_file(cls, path: str | Path, column: str | None = None) -> Lengths:
        """Read lengths [tokens] from a file. Raises `ConfigError`.

        The file is a text (one whole number a line, or separated by commas), a JSON list, a histogram (CSV with a column
        `count` next to the lengths, or a JSON object of counts by length), or a data set: CSV, JSON lines, Parquet, Arrow,
        or a folder of the last two, of which `column` is read.

        A data set's lengths are in `column`, by default `length` or `lengths`; token ids (by default `input_ids`) are
        counted. Told apart by content; anything else raises `ConfigError`, and so does a column of text, whose tokens
        depend on the tokenizer.
        """
        import csv
        from pathlib import Path

        name, counts = str(path), Counter[int]()
        try:
            for length, count in read(Path(path), name, column):
                counts[length] += count
        except OSError as error:
            raise ConfigError(f"cannot be read ({error.strerror or error})", file=name) from None
        except UnicodeDecodeError:
            raise ConfigError("is not a text file (UTF-8)", file=name) from None
        except csv.Error as error:
            raise ConfigError(f"cannot be read as CSV ({error})", file=name) from None
        return cls.histogram(counts, file=name)

    @classmethod
    def _counted(cls, counts: Counter[int], file: str = "") -> Lengths:
        if not counts:
            raise ConfigError("no lengths given", key="lengths", file=file)
        values = tuple(sorted(counts))
        return cls(values, tuple(itertools.accumulate(counts[value] for value in values)))

    # -- one sequence -------------------------------------------------------------------------------------------------

    @property
    def mean(self) -> float:
        """Mean length [tokens]."""
        return self._moment(1)

    @property
    def mean_square(self) -> float:
        """Mean of the squared length [query-key pairs]."""
        return self._moment(2)

    @property
    def longest(self) -> int:
        """Longest length [tokens]."""
        return self.values[-1]

    # -- a batch of b independent draws -------------------------------------------------------------------------------

    def expected_max(self, b: int) -> float:
        """E[K], the longest of a batch [tokens]; padding makes all its sequences that long.

        >>> round(Lengths.uniform(8192).expected_max(8))
        7282
        """
        return self._largest(b, 1)

    def expected_max_square(self, b: int) -> float:
        """E[K^2], the square of the longest of a batch [query-key pairs]; not the square of E[K].

        >>> Lengths.of([1, 2]).expected_max_square(1)
        2.5
        """
        return self._largest(b, 2)

    def expected_sum(self, b: int) -> float:
        """E[sum s], the tokens of a batch without padding [tokens].

        >>> Lengths.uniform(8192).expected_sum(8)
        32772.0
        """
        return _batch(b) * self.mean

    def expected_sum_square(self, b: int) -> float:
        """E[sum s^2], the query-key pairs of a batch without padding; not the square of the sum.

        >>> Lengths.of([1, 2]).expected_sum_square(2)
        5.0
        """
        return _batch(b) * self.mean_square

    def padded(self, b: int) -> tuple[float, float]:
        """Return the expected tokens and query-key pairs of a batch padded to its longest: b E[K] and b E[K^2].

        >>> Lengths.of([1, 2]).padded(1)
        (1.5, 2.5)
        """
        return b * self.expected_max(b), b * self.expected_max_square(b)

    def unpadded(self, b: int) -> tuple[float, float]:
        """Return the expected tokens and query-key pairs of a batch without padding: E[sum s] and E[sum s^2].

        >>> Lengths.of([1, 2]).unpadded(2)
        (3.0, 5.0)
        """
        return self.expected_sum(b), self.expected_sum_square(b)

    def expected_fullest(self, b: int) -> float:
        """Return the tokens of the fullest of the batches of one epoch, without padding: the median of that maximum [tokens].

        An epoch has as many batches as the data set has sequences for. With F the distribution of a batch's tokens, by
        convolution over `BINS` steps of length, and n batches, the smallest x with F(x)^n >= 1/2.

        >>> Lengths.of([10, 20, 1000]).expected_fullest(1)
        1000.0
        """
        draws, count = _batch(b), self.cumulative[-1]
        batches = max(1, count // draws)
        if draws == 1:
            return float(
                self.values[next(i for i, upto in enumerate(self.cumulative) if (upto / count) ** batches >= 0.5)]
            )
        return _fullest(self, draws, batches)

    def over_ranks(self, most: int) -> RankGroups:
        """Return the groups in which no rank holds more than `most` tokens of a sequence: of 1, 2, 4, ... ranks.

        Megatron-Core takes the next power of two of length over that limit (`BalancedCPScheduler.gpus_needed`).

        >>> Lengths.of([1000, 3000]).over_ranks(1000)
        RankGroups(largest=4, mean=2.5, held=1000.0, pairs=2250000.0, passed=2.25)
        """
        below, ranks, passed, tokens, held, pairs, group = 0, 0, 0, 0, 0.0, 0.0, 1
        for value, upto in zip(self.values, self.cumulative, strict=True):
            count, below, group = upto - below, upto, 1 << (-(-value // most) - 1).bit_length()
            ranks, tokens, passed = ranks + count * group, tokens + count * value, passed + count * value * (group - 1)
            held, pairs = max(held, value / group), max(pairs, value**2 / group)
        return RankGroups(group, ranks / below, held, pairs, passed / tokens)

    def _moment(self, power: int) -> float:
        below, total = 0, 0
        for value, upto in zip(self.values, self.cumulative, strict=True):
            total += (upto - below) * value**power
            below = upto
        return total / below

    def _largest(self, b: int, power: int) -> float:
        draws, count = _batch(b), self.cumulative[-1]
        steps = itertools.pairwise(self.values)
        missing = math.fsum(
            (upto / count) ** draws * (after**power - value**power)
            for (value, after), upto in zip(steps, self.cumulative, strict=False)
        )
        return float(self.longest**power) - missing


BINS = 1024
"""Steps of length in the distribution of a batch's tokens, at most; longer data are rounded up to them."""
MEAN_BELOW = 16
"""Bins below which the fullest batch is taken for the mean one."""
POINTS = 2**20
"""Points of that distribution at most; a batch of more sequences than these allow bins for has nearly its mean."""


@functools.lru_cache(8)
def _fullest(lengths: Lengths, draws: int, batches: int) -> float:
    import numpy  # only for this, and only where there are lengths

    bins = min(BINS, lengths.longest, POINTS // draws)
    if bins < MEAN_BELOW:
        return draws * lengths.mean
    step = lengths.longest / bins
    values, cumulative = numpy.asarray(lengths.values), numpy.asarray(lengths.cumulative)
    shares = (
        numpy.bincount(numpy.ceil(values / step - 1e-9).astype(int), numpy.diff(cumulative, prepend=0), bins + 1)
        / cumulative[-1]
    )
    size = 1 << (bins * draws).bit_length()
    sums = numpy.fft.irfft(numpy.fft.rfft(shares, size) ** draws, size)
    # What lies beyond, instead of what lies below, keeps its digits.
    beyond = numpy.cumsum(sums[::-1])[::-1]
    # No more than 1 - 2^(-1/n) of all batches may lie beyond.
    allowed = -math.expm1(-math.log(2) / batches)
    return float(step * (numpy.flatnonzero(beyond > allowed)[-1]))


def _batch(b: int) -> int:
    if not isinstance(b, int) or isinstance(b, bool) or b < 1:
        raise ConfigError(f"must be a whole number of at least 1, got {b!r}", key="batch")
    return b
