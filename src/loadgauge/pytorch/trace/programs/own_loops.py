"""How a batch reaches a module or a step of one's own, and what stands for a trainer that is not there."""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

BATCHES = frozenset({"batch", "data", "inputs", "sample", "samples", "pair", "pairs", "triplet", "views"})
"""Names of an argument that is a whole batch, and not the first tensor of one."""

BESIDE = re.compile("mask|bias|^hx$|hidden|state|cache|past|return|output|pos")
"""Words in names of arguments for which a number of each sample, such as its label, is not meant."""


STANDS_FOR: dict[str, Any] = {
    "current_epoch": 0, "global_step": 0, "is_global_zero": True, "world_size": 1, "num_devices": 1, "num_nodes": 1,
    "gradient_clip_val": None, "gradient_clip_algorithm": None, "max_epochs": 10, "max_steps": 1000, "accumulate_grad_batches": 1,
    "estimated_stepping_batches": 1000, "num_training_batches": 100, "training": True, "sanity_checking": False,
}  # fmt: skip
"""Figures of a trainer that is not there, for schedules."""


def fitted(
    call: Callable[..., Any], batch: tuple[Any, ...], keywords: Mapping[str, Any], losses: dict[str, None], *before: Any
) -> Callable[..., Any]:
    """Return what takes a batch as `call` does: spread over its arguments, or as one, or the first tensors of it.

    batch, keywords: what is handed over, spread; before: other arguments before it
    losses: takes what a loss is made of, where tensors are left

    >>> fitted(lambda net, batch: batch, (1, 2), {}, {}, "net")(1, 2)
    (1, 2)
    """
    takes = inspect.signature(call.forward if isinstance(call, nn.Module) else call)

    def binds(*batch: Any, **keywords: Any) -> bool:
        try:
            bound = takes.bind(*before, *batch, **keywords).arguments
        except TypeError:
            return False
        beside = [bound[name] for name in bound.keys() - keywords if BESIDE.search(name)]
        return not any(isinstance(value, torch.Tensor) and value.dim() < 2 for value in beside)

    first = next(iter(takes.parameters.values()), None)
    whole_too = before or first is None or first.name in BATCHES or _of_several(first.annotation)
    several = len(batch[0]) if batch and isinstance(batch[0], tuple) and not whole_too else 0
    if several > 1 and len(batch) > 1 and binds(*batch[0]):  # ((tokens, lengths), labels)
        return lambda *batch: _scored(call(*batch[0]), batch[1:], losses)
    whole, plain = _whole(batch, keywords), functools.partial(call, *before)
    if binds(*batch, **keywords):
        return plain
    if isinstance(whole, list) and binds(*whole):
        return lambda whole: plain(*whole)
    free = list(takes.parameters.values())[len(before) :]
    if binds(whole) and (keywords or before or free[0].name in BATCHES or _of_several(free[0].annotation)):
        return lambda *batch, **keywords: plain(_whole(batch, keywords))
    most = next((number for number in reversed(range(1, len(batch))) if binds(*batch[:number])), 0)
    return plain if not most else lambda *batch: _scored(plain(*batch[:most]), batch[most:], losses)


def spread(
    built: Any, step: Callable[..., Any], batch: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return what a step takes before its batch: what was made, or each of several by itself where it has arguments for them.

    >>> net, optimizer = [1, 2]
    >>> spread([net, optimizer], lambda net, optimizer, x: None, (3,), {})
    (1, 2)
    >>> spread([net, optimizer], lambda made, x, y: None, (3, 4), {})
    ([1, 2],)
    """
    takes = inspect.signature(step)
    plain: Any = inspect.unwrap(step)
    used = (plain.__globals__.get(name) for name in getattr(getattr(plain, "__code__", None), "co_names", ()))
    if any(isinstance(value, nn.Module) for value in used):
        with contextlib.suppress(TypeError):  # what it trains is the script's own, and no argument
            takes.bind(*batch, **keywords)
            return ()
    free = [argument.name for argument in takes.parameters.values() if argument.default is argument.empty]
    if not isinstance(built, tuple | list) or not 2 <= len(built) < len(free):
        return (built,)
    whole = len(free) in (1 + len(batch), 2) if not keywords else keywords.keys() <= takes.parameters.keys()
    alone = len(free) == len(built) + 1 and free[-1] in BATCHES
    return tuple(built) if alone or not whole else (built,)


def _whole(batch: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    return keywords or (batch[0] if len(batch) == 1 else batch)


def _of_several(annotation: Any) -> bool:
    return annotation is not inspect.Parameter.empty and any(
        word in str(annotation).lower() for word in ("tuple", "list", "sequence", "dict", "mapping")
    )


def _scored(result: Any, rest: tuple[Any, ...], losses: dict[str, None]) -> Any:
    """The loss of a result against what its module leaves of a batch; the result where the two do not say it."""
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not outputs or len(rest) != 1 or not isinstance(target := rest[0], torch.Tensor) or not outputs[0].dim():
        return result
    values = outputs[0]
    if not target.is_floating_point() and values.dim() == target.dim() + 1:
        losses["the cross entropy of what it returns and the rest of the batch"] = None
        if values.shape[:-1] == target.shape:
            values, target = values.flatten(0, -2), target.flatten()
        return functional.cross_entropy(values, target)
    if target.is_floating_point() and values.shape == target.shape:
        losses["the mean squared error of what it returns and the rest of the batch"] = None
        return functional.mse_loss(values, target)
    return result


def manual_step(module: nn.Module, batch: tuple[Any, ...], keywords: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return the step of a LightningModule that optimizes by itself, with a stand-in for its trainer; None of any other."""
    own: Any = module
    if not takes_steps(module) or getattr(own, "automatic_optimization", True):
        return None
    configured(module)
    return by_batch(module, batch, keywords)


def configured(module: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that a LightningModule configures, with a stand-in for its trainer left in it."""
    trainer: Any = mock.MagicMock(**STANDS_FOR)
    module._trainer = trainer
    module.log = module.log_dict = lambda *_, **__: None
    leaves = tree_leaves(module.configure_optimizers())
    optimizers = [leaf for leaf in leaves if isinstance(leaf, torch.optim.Optimizer)]
    trainer.optimizers = optimizers
    trainer.lr_scheduler_configs = [mock.Mock(scheduler=leaf) for leaf in leaves if hasattr(leaf, "get_last_lr")]
    trainer.strategy = mock.Mock(_lightning_optimizers=optimizers, backward=lambda loss, *_, **__: loss.backward())
    return optimizers


def takes_steps(module: Any) -> bool:
    """Return whether a module is a LightningModule, or written as one."""
    return callable(getattr(module, "training_step", None)) and hasattr(module, "configure_optimizers")


def by_batch(module: Any, batch: tuple[Any, ...], keywords: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a LightningModule's own step, called with a batch and, where it takes one, its number."""
    numbered = len(inspect.signature(module.training_step).parameters) > 1
    return lambda *batch, **keywords: module.training_step(_whole(batch, keywords), *(0,) * numbered)
