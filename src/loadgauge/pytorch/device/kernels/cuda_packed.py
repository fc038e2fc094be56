"""Packed sequences (`torch.nn.utils.rnn`): how many rows there are hangs on lengths, which are values.

Where the lengths are not known, every sequence is taken to be as long as the longest, which is the most there can be. What is
allocated is what ATen/native/PackedSequence.cpp of PyTorch 2.13 allocates.
"""

import contextlib
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from loadgauge.pytorch.device.facts.fact_kinds import Known, Number, Same
from loadgauge.pytorch.device.patches import replaced
from loadgauge.pytorch.device.read import asking

ASSUMED = "sequences of a batch are as long as the longest: with shorter ones there are fewer rows"


def register_packed(library: torch.library.Library) -> None:
    """Give the simulated device packed sequences. library: of `aten`, which lives as long as the process"""
    library.impl("_pack_padded_sequence", pack, "AutogradPrivateUse1")
    library.impl("_pad_packed_sequence", pad, "AutogradPrivateUse1")


@contextlib.contextmanager
def padded_to_symbols() -> Iterator[None]:
    """`pad_packed_sequence` in its body keeps a length that is a symbol; PyTorch's own takes a number only."""
    own = torch._VF._pad_packed_sequence

    def padded(data: Any, *padding: Any) -> Any:
        return pad(data, *padding) if isinstance(padding[-1], torch.SymInt) else own(data, *padding)

    with replaced((torch._VF, "_pad_packed_sequence", padded)):
        yield


class Pack(torch.autograd.Function):
    """The rows of padded sequences, position after position."""

    @staticmethod
    def forward(ctx: Any, x: Any, runs: list[tuple[Any, Any]], batch_first: bool) -> Any:
        """Return (rows, ...) of x: (positions, batch, ...), or batch first. runs: positions with sequences in each, in order"""
        ctx.shape, ctx.runs, ctx.batch_first = x.shape, runs, batch_first
        steps, begin = [], 0
        for positions, sequences in runs:
            part = _positions(x, batch_first)[begin : begin + positions, :sequences].contiguous()
            steps.append(part.view(positions * sequences, *part.shape[2:]))
            begin += positions
        del part
        return torch.cat(steps)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient of x: 0 where a sequence has ended."""
        (grad,) = grads
        first, second, *rest = ctx.shape
        gradient = grad.new_zeros((second, first, *rest) if ctx.batch_first else tuple(ctx.shape))
        return _positions(gradient, ctx.batch_first), None, None


def _positions(x: Any, batch_first: bool) -> Any:
    return x.transpose(0, 1) if batch_first else x


def pack(x: Any, lengths: Any, batch_first: bool) -> Any:
    """Compute `torch._pack_padded_sequence`: the rows, and how many sequences each position has."""
    values = _values(lengths)
    batch, longest = (x.shape[0], x.shape[1]) if batch_first else (x.shape[1], x.shape[0])
    facts = running_facts()
    if values is None:
        if facts is not None:
            facts.assumed[asking() or "the packed sequences"] = ASSUMED
        runs: list[tuple[Any, Any]] = [(longest, batch)]
    else:
        if len(values) != batch:
            raise RuntimeError(f"{len(values)} lengths of {batch} sequences")
        longest = values[0]
        there = [sum(length > position for length in values) for position in range(longest)]
        runs = _runs(there)
    sizes = (
        torch.tensor(there, dtype=torch.int64) if len(runs) > 1 else torch.full((longest,), batch, dtype=torch.int64)
    )
    if facts is not None and len(runs) == 1:
        facts.keep(sizes, Number(batch))
    return Pack.apply(x, runs, batch_first), sizes


def pad(data: Any, sizes: Any, batch_first: bool, value: float, total: int) -> Any:
    """Compute `torch._pad_packed_sequence`: (positions, batch, ...), or batch first, and the lengths."""
    longest = sizes.shape[0]
    facts = running_facts()
    fact = None if facts is None else facts.of(sizes)
    there = None if isinstance(fact, Number) else _values(sizes)
    if there is None:
        runs: list[tuple[Any, Any]] = [(longest, fact.value if isinstance(fact, Number) else data.shape[0] // longest)]
    else:
        runs = _runs(there)
    batch = runs[0][1]
    out = data.new_full((total if total > 0 else longest, batch, *data.shape[1:]), value)
    begin = row = 0
    for positions, sequences in runs:
        part = data[row : row + positions * sequences].view(positions, sequences, *data.shape[1:])
        out[begin : begin + positions, :sequences].copy_(part)
        begin, row = begin + positions, row + positions * sequences
    lengths = torch.full((batch,), longest, dtype=torch.int64)
    return _positions(out, batch_first), lengths


def _runs(there: list[int]) -> list[tuple[Any, Any]]:
    """Positions with equally many sequences, one after another. there: sequences at each position"""
    return [(len(list(group)), sequences) for sequences, group in groupby(there)]


def _values(numbers: Any) -> list[int] | None:
    """The numbers of a tensor of one dimension, the largest first; None where they are not known."""
    real = known_value(numbers)
    if real is None or type(numbers.shape[0]) is not int:
        return None
    with _disable_current_modes():
        return sorted(real.expand(numbers.shape[0]).tolist(), reverse=True)


def known_value(numbers: Any) -> Any:
    """Return the real tensor that a fake one is known to be; None where nobody knows."""
    facts = running_facts()
    fact = None if facts is None else facts.of(numbers)
    return fact.value if isinstance(fact, Known | Same) else getattr(numbers, "_loadgauge_value", None)


def running_facts() -> Any:
    """Return the facts of the fake mode that runs; None outside."""
    return next((facts for mode in _get_current_dispatch_mode_stack() if (facts := getattr(mode, "facts", None))), None)
