"""How a batch reaches a module or a step of one's own, and what stands for a trainer that is not there."""

import contextlib
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from loadgauge.core.base.errors import ConfigError

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


STEPS = "train_step", "training_step", "step", "update"
"""Names of the function of a script that trains what another one makes; else the only one with a word of `TRAINS` is it."""
CONFIGURES = re.compile("Config|Arg|Options|Param|Settings")
"""Words in names of classes that configure."""
TRAINS = re.compile("step|train|update|optimi[sz]e")


class OwnLoop(nn.Module):
    """The modules that a script's step trains, as a LightningModule that optimizes by itself.

    parts: modules and optimizers by name, as the script made them; handed: what the step takes before its batch
    """

    automatic_optimization = False

    def __init__(self, step: Callable[..., Any], parts: Mapping[str, Any], handed: Any = None) -> None:
        super().__init__()
        self.given = step, handed, [value for value in parts.values() if isinstance(value, torch.optim.Optimizer)]
        for name, value in parts.items():
            if isinstance(value, nn.Module):
                self.add_module(name, value)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that the script made."""
        return self.given[2]

    def training_step(self, batch: Any) -> Any:
        """Return what the step returns for a batch. Raises ConfigError where it takes something else."""
        step, handed, _ = self.given
        inputs, keywords = (
            ((), batch) if isinstance(batch, dict) else (batch if isinstance(batch, tuple) else (batch,), {})
        )
        before = () if handed is None else spread(handed, step, inputs, keywords)
        call = fitted(step, inputs, keywords, {}, *before)
        try:
            inspect.signature(call).bind(*inputs, **keywords)
        except TypeError as error:
            takes = ", ".join(inspect.signature(step).parameters)
            raise ConfigError(
                f"{step.__name__} takes {takes}, and the batch does not fit ({error}): a function that returns what it trains"
                f" may be named instead, with the step called {STEPS[0]} beside it",
                key="target",
            ) from None
        return call(*inputs, **keywords)


def looped(result: Any, maker: Any) -> nn.Module:
    """Return the loop of a step, or of what a function made, whose script has a step of a usual name.

    Raises ConfigError where there is neither.
    """
    if inspect.isfunction(result):
        return OwnLoop(result, _used(result, set()))
    own = {name: value for name, value in getattr(maker, "__globals__", {}).items() if is_step(value)}
    alike = [name for name, value in own.items() if TRAINS.search(name) and value.__module__ == maker.__module__]
    names = [name for name in STEPS if name in own] or alike * (len(alike) == 1)
    if not names or not isinstance(result, tuple | list | dict):
        more = f": several, with their optimizers, need a function {STEPS[0]} beside it that trains them once"
        raise ConfigError(
            f"must make a torch.nn.Module, made {type(result).__name__}"
            + more * isinstance(result, tuple | list | dict),
            key="target",
        )
    named = result if isinstance(result, dict) else {f"made_{index}": value for index, value in enumerate(result)}
    return OwnLoop(own[names[0]], named, result)


def is_step(maker: Any) -> bool:
    """Return whether a function trains: it needs a batch, where one that makes a module needs nothing, or a configuration.

    >>> is_step(lambda batch: None), is_step(lambda width=64: None), is_step(nn.Linear)
    (True, False, False)
    """
    return inspect.isfunction(maker) and None in settings(maker).values()


def settings(maker: Any) -> dict[str, Any]:
    """Return what a function or class must be called with by name: its script's configuration; None where there is none.

    That is a value of the script with the argument's name, or one of the argument's own class, which needs nothing itself.

    >>> settings(nn.Linear), settings(lambda width=64: None)
    ({'in_features': None, 'out_features': None}, {})
    """
    needed = _needed(maker)
    if not needed:
        return {}
    plain = inspect.unwrap(maker.__init__ if inspect.isclass(maker) else maker)
    script = getattr(plain, "__globals__", {})
    hints: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # names that are there for a type checker alone
        hints = typing.get_type_hints(plain)
    named = {
        name: None if callable(value := script.get(name)) or isinstance(value, torch.Tensor) else value
        for name in needed
    }
    for name in needed:
        kind: Any = hints.get(name)
        own = dataclasses.is_dataclass(kind) or (inspect.isclass(kind) and CONFIGURES.search(kind.__name__))
        if named[name] is None and own and not _needed(kind):
            named[name] = kind()
    return named


def _needed(maker: Any) -> list[str]:
    """Names of the arguments without which a function or class cannot be called."""
    try:
        takes = inspect.signature(maker).parameters
    except (TypeError, ValueError):
        return []
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, taken in takes.items() if taken.default is taken.empty and taken.kind in plain]


def _used(function: Any, seen: set[Any]) -> dict[str, Any]:
    """The values that a function reads of its script, by name, with what the script's functions that it calls read."""
    used: dict[str, Any] = {}
    plain = inspect.unwrap(function)
    if plain in seen or not (code := getattr(plain, "__code__", None)):
        return used
    for name in code.co_names:
        value = plain.__globals__.get(name)
        called = inspect.isfunction(value) and value.__globals__ is plain.__globals__
        used |= _used(value, seen | {plain}) if called else {name: value}
    return used


def takes_steps(module: Any) -> bool:
    """Return whether a module is a LightningModule, or written as one."""
    return callable(getattr(module, "training_step", None)) and hasattr(module, "configure_optimizers")


def by_batch(module: Any, batch: tuple[Any, ...], keywords: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a LightningModule's own step, called with a batch and, where it takes one, its number."""
    numbered = len(inspect.signature(module.training_step).parameters) > 1
    return lambda *batch, **keywords: module.training_step(_whole(batch, keywords), *(0,) * numbered)
