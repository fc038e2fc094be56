"""Representative blocks to run, and the map from every block to its representative."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from loadgauge.core.base.errors import NotModelled
from loadgauge.pytorch.capture.lists.blocks import Blocks, Stack, blocks
from loadgauge.pytorch.capture.lists.compose import leave, left
from loadgauge.pytorch.capture.lists.listed import Listing


class Shown:
    """As few blocks as show each kind first, last and between, with and without something that is trained before it.

    all, few: the module's blocks, and those that are run; keeps: for each list of blocks, the places of those
    """

    def __init__(self, every: Blocks, keeps: list[tuple[int, ...]], like: list[tuple[int, ...]]) -> None:
        self.all, self.keeps, self.like = every, keeps, like
        self.few = Blocks(tuple(left(stack, keep) for stack, keep in zip(every.stacks, keeps, strict=True)))

    @classmethod
    def of(cls, module: nn.Module, config: Any) -> Shown:
        """Choose the blocks of a module, whose frozen parameters say so themselves."""
        every = blocks(module, config)
        keeps, likes = [], []
        for stack in every.stacks:
            ways = _ways(module, stack)
            keep = tuple(place for place, way in enumerate(ways) if ways.index(way) == place)
            keeps.append(keep)
            likes.append(tuple(keep.index(ways.index(way)) for way in ways))
        numbered = all(path.rpartition(".")[2].isdigit() for stack in every.stacks for path in stack.paths)
        return cls(every, keeps, likes) if numbered else cls.of_all(every)

    @classmethod
    def of_all(cls, every: Blocks) -> Shown:
        """Choose all."""
        places = [tuple(range(len(stack.paths))) for stack in every.stacks]
        shown = cls(every, places, places)
        shown.few = every
        return shown

    @contextlib.contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """Leave the other blocks out in the body, in the module and in its configuration."""
        with contextlib.ExitStack() as back:
            for stack, keep in zip(self.all.stacks, self.keeps, strict=True):
                if len(keep) < len(stack.paths):
                    leave(module, stack, keep, back)
            yield

    def pattern(self, listing: Listing) -> tuple[int, ...]:
        """For each block of the module, in the order in which they run, the place of its like in a list. Raises NotModelled."""
        order = list(dict.fromkeys(place.rpartition(".")[0] for place in listing.places))
        stacks = {few.path: (few, like) for few, like in zip(self.few.stacks, self.like, strict=True)}
        missing = [path for path in stacks if path not in order]
        if missing:
            raise NotModelled(f"{missing[0]} does not run in a training step")
        return tuple(listing.places.index(stacks[path][0].paths[place]) for path in order for place in stacks[path][1])


def _ways(module: nn.Module, stack: Stack) -> list[tuple[int, bool, bool, bool]]:
    """Of each block: its kind, whether it is the first or the last, and whether something in the list is trained before it."""
    found, below = [], False
    for place, (path, kind) in enumerate(zip(stack.paths, stack.pattern, strict=True)):
        found.append((kind, place == 0, place == len(stack.paths) - 1, below))
        below = below or any(one.requires_grad for one in module.get_submodule(path).parameters())
    return found
