"""Sums and lists of what has the same key, in the order in which keys come first."""

from collections.abc import Iterable
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def sums(pairs: Iterable[tuple[Key, Any]]) -> dict[Key, Any]:
    """Return the sum of the values of each key.

    >>> sums([("weights", 2), ("gradients", 4), ("weights", 1)])
    {'weights': 3, 'gradients': 4}
    """
    total: dict[Key, Any] = {}
    for key, value in pairs:
        total[key] = total.get(key, 0) + value
    return total


def largest_first(pairs: Iterable[tuple[Key, Any]]) -> dict[Key, Any]:
    """Return the sum of the values of each key, the largest first.

    >>> largest_first([("mm", 2), ("add", 4), ("mm", 3)])
    {'mm': 5, 'add': 4}
    """
    return dict(sorted(sums(pairs).items(), key=lambda entry: -entry[1]))


def lists(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key.

    >>> lists([("forward", "a"), ("backward", "b"), ("forward", "c")])
    {'forward': ['a', 'c'], 'backward': ['b']}
    """
    listed: dict[Key, list[Value]] = {}
    for key, value in pairs:
        listed.setdefault(key, []).append(value)
    return listed
