"""Sums of formulas while a list is made: a formula as factors by product, which `Size` freezes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from loadgauge.pytorch.capture.lists.listed import ListedRow, ListedTensor
from loadgauge.pytorch.capture.symbols.sizes import Size

Terms = dict[str, int]
"""A formula as factors by product."""


def divided(size: Size, by: int) -> Size:
    if all(factor % by == 0 for _, factor in size.terms):
        return Size(tuple((product, factor // by) for product, factor in size.terms))
    inner = " + ".join(f"{factor}*{product}" for product, factor in size.terms)
    return Size(((f"(({inner})//{by})", 1),))


def tensor_of(name: str, nbytes: Size, role: Any, itemsize: int) -> ListedTensor:
    """A storage of so many bytes in elements of a dtype, where it has whole ones."""
    if any(factor % itemsize for _, factor in nbytes.terms):
        return ListedTensor(name, nbytes, role)
    return ListedTensor(name, divided(nbytes, itemsize), role, itemsize)


def add(total: Terms, size: Size) -> None:
    for product, factor in size.terms:
        value = total.get(product, 0) + factor
        if value:
            total[product] = value
        else:
            total.pop(product, None)


def terms_of(size: Size) -> Terms:
    return dict(size.terms)


def size_of(terms: Terms) -> Size:
    return Size(tuple(sorted((product, factor) for product, factor in terms.items() if factor)))


def less(total: Terms, other: Terms) -> Size:
    left = dict(total)
    for product, factor in other.items():
        left[product] = left.get(product, 0) - factor
    return size_of(left)


def summed(one: Terms, two: Terms) -> Terms:
    total = dict(one)
    for product, factor in two.items():
        total[product] = total.get(product, 0) + factor
    return total


def pruned(rows: Iterable[ListedRow], *, apart: bool) -> tuple[ListedRow, ...]:
    """Rows without those that another one is never below. apart: rows of several operations are compared with their own alone"""
    kept: list[tuple[ListedRow, Terms]] = []
    for row in rows:
        terms = terms_of(row.live)
        if any(_covers(other, more, row, terms, apart) for other, more in kept):
            continue
        kept = [(other, more) for other, more in kept if not _covers(row, terms, other, more, apart)]
        kept.append((row, terms))
    return tuple(row for row, _ in kept)


def _covers(one: ListedRow, more: Terms, two: ListedRow, terms: Terms, apart: bool) -> bool:
    if (apart and one.at != two.at) or one.gradients < two.gradients or one.latest < two.latest:
        return False
    return all(more.get(product, 0) >= terms.get(product, 0) for product in {*more, *terms})
