"""How many tokens of a sequence stand for its pictures, as the model itself counts them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loadgauge.capture.pictures import Pictures
from loadgauge.capture.values import KeptValues
from loadgauge.errors import ConfigError
from loadgauge.trace.device.fact_kinds import Rows, Tokens
from loadgauge.trace.device.simulated import fake_tensors, simulated_device

_PLACED = "get_placeholder_mask"
"""The method of transformers' models that finds the tokens that vectors of pictures or sounds take the place of."""
_SEEN = "get_image_features"
"""That which makes those vectors, of models without the other."""


class Counted(Exception):
    """The vectors that pictures come to, raised where the model is about to place them."""

    def __init__(self, vectors: int) -> None:
        self.vectors = vectors


class Placing(TorchDispatchMode):
    """Where a model looks for the tokens that vectors take the place of: there are as many as vectors.

    A mask then chooses as many numbers as the vectors have, and a check that it does so holds.
    """

    def __init__(self, numbers: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, with known places instead of a mask."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype is torch.bool or 1
        if func is torch.ops.aten.index.Tensor and any(one is not None and one.dtype is torch.bool for one in args[1]):
            mask = args[1][0]
            rows = self.numbers if mask.dim() == args[0].dim() else self.numbers // args[0].shape[-1]
            places = torch.empty((rows, mask.dim()), dtype=torch.long, device=mask.device)
            args = (args[0], list(places.unbind(1)))
        return func(*args, **(kwargs or {}))


def watch(module: Any, s: Any, b: Any, stop: bool = False) -> None:
    """Have a model refuse sequences that are shorter than what stands for their pictures or sounds.

    With symbols, that they are not shorter is a guard. stop: raise `Counted` instead.
    """
    name = _PLACED if any(hasattr(one, _PLACED) for one in module.modules()) else _SEEN
    for one in module.modules():
        if callable(getattr(type(one), name, None)) and not (name == _SEEN and one is module):
            setattr(one, name, _counting(getattr(type(one), name).__get__(one), name, s, b, stop))


def _counting(method: Any, name: str, s: Any, b: Any, stop: bool) -> Any:
    def counting(*args: Any, **keywords: Any) -> Any:
        if name == _PLACED:
            features = [keywords[key] for key in keywords if key.endswith("features")] or list(args[2:])
            features = _tensors(features)
            _check(features, s, b, stop)
            if not features:
                return method(*args, **keywords)
            with Placing(sum(one.numel() for one in features)):
                return _said(method(*args, **keywords), sum(one.numel() // one.shape[-1] for one in features))
        found = method(*args, **keywords)
        pooled = getattr(found, "pooler_output", found)
        _check(_tensors(pooled), s, b, stop)
        return found

    return counting


def _said(mask: Any, vectors: Any) -> Any:
    """Say of a mask of tokens that it is true for as many as there are vectors: layers may look there again."""
    facts = getattr(getattr(mask, "fake_mode", None), "facts", None)
    if facts is not None and mask.dtype is torch.bool and (mask.dim() == 2 or mask.shape[-1] == 1):
        facts.keep(mask, Rows(vectors))
    return mask


def count_tokens(ids: Any, counts: tuple[tuple[int, Any], ...]) -> None:
    """Say of ids of tokens how often some of them are there. counts: (id, how many)"""
    facts = getattr(getattr(ids, "fake_mode", None), "facts", None)
    if facts is not None and counts:
        facts.keep(ids, Tokens(counts))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor) and one.dtype.is_floating_point]


def _check(tensors: list[torch.Tensor], s: Any, b: Any, stop: bool) -> None:
    if not tensors:
        return
    vectors = sum(one.numel() // one.shape[-1] for one in tensors)
    if stop:
        raise Counted(int(vectors))
    if vectors > b * s:
        raise ConfigError(
            f"s: {int(s)} is fewer than the {int(vectors) // int(b)} tokens of a sequence's pictures or sounds"
        )


def vectors_of(job: Any, each: list[Pictures]) -> list[int]:
    """How many tokens stand for pictures, for each entry of `each`; 0: none, as where text attends to the pictures.

    job: of `of_config`
    """
    found = []
    with fake_tensors(), KeptValues():
        place = simulated_device()
        module = job.build(place)
        for pictures in each:
            given, keywords = job.inputs(place, module, b=1, s=8, pictures=pictures, stop=True)
            try:
                with torch.no_grad():
                    module(*given, **keywords)
                found.append(0)
            except Counted as counted:
                found.append(counted.vectors)
    return found
