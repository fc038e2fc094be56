"""Token mixers that do not know boundaries: attention outside the interface, state space, convolution, linear attention.

Such a module is run once per sequence on slices of its arguments, while everything else stays flat. How its arguments
follow the tokens is not guessed from names but read off three calls of the model: two sequences alone, and the flat row
of both. A dimension that changes with the length holds tokens; an argument of the flat call that equals the ones alone,
put end to end, is sliced; one that only starts like them (a bias by position) is cut to length; a mask over pairs of
tokens is built again for each length.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from loadgauge.core.base.errors import NotModelled
from loadgauge.train.hooks import FLAT_KEYS, arguments, by_name
from loadgauge.train.layers import boundaries
from loadgauge.train.layers.boundaries import Boundaries
from loadgauge.train.layers.masks import MaskFunction, Reach, reach_of


@dataclass
class Convention:
    """Rules by which one mixer's arguments follow the tokens, by name; a tuple of tensors holds one rule for each of its leaves."""

    rules: dict[str, list[tuple[str, int]]]
    masks: dict[str, tuple[str, Tensor, Reach]]
    outputs: list[int | None]
    takes: tuple[str, ...]
    source: str = ""
    calls: int = 0


@dataclass
class Notes:
    """Calls noted while a model is looked at: arguments and output, by run ("first", "second", "flat")."""

    run: str = ""
    calls: dict[str, tuple[dict[str, Any], Any]] = field(default_factory=dict)


def leaves(value: Any) -> list[Any]:
    """Return the leaves of an argument in any nesting: tensors, numbers, None."""
    flat: list[Any] = tree_flatten(value)[0]
    return flat or [None]


def token_dims(first: Any, second: Any, lengths: tuple[int, int]) -> list[int]:
    """Return the dimensions that follow the length, from the same tensor of two sequences of `lengths` tokens."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor) and first.dim() == second.dim()):
        return []
    return [d for d in range(first.dim()) if (first.shape[d], second.shape[d]) == lengths]


def learn(module: nn.Module, notes: Notes, lengths: tuple[int, int], reaches: tuple[Reach, ...]) -> Convention:
    """The convention of a mixer from its three noted calls. `reaches`: of the masks its model makes.

    Raises `NotModelled` where an argument fits no rule, or a mask could hold a window that short sequences do not show.
    """
    (first, output_first), (second, output_second) = notes.calls["first"], notes.calls["second"]
    flat, _ = notes.calls["flat"]
    convention = Convention({}, {}, [], arguments(module))
    made_by = {name: getattr(value, "made_by", None) for name, value in notes.calls.get("probe", ({}, None))[0].items()}
    for name, value in first.items():
        if value is None and (function := made_by.get(name)) is not None:  # left out for so short a sequence
            reach = reach_of(function)
            convention.masks[name] = ("needed", torch.empty(1, 1, 1, 1, dtype=torch.bool), reach)
            continue
        convention.rules[name] = []
        beside = leaves(flat.get(name))
        beside += [None] * (len(leaves(value)) - len(beside))
        for short, two, whole in zip(leaves(value), leaves(second.get(name)), beside, strict=False):
            rule = _rule(short, two, whole, lengths)
            if rule is None:
                argument = f"{type(module).__name__}: its argument {name}"
                convention.masks[name] = _mask(short, made_by.get(name), reaches, argument)
                rule = ("mask", 0)
            convention.rules[name].append(rule)
    convention.source = _source(flat, sum(lengths))
    for short, two in zip(leaves(output_first), leaves(output_second), strict=False):
        dims = token_dims(short, two, lengths)
        convention.outputs.append(dims[0] if len(dims) == 1 else None)
    if convention.outputs[0] is None:
        raise NotModelled(f"{type(module).__name__}: its output does not follow the tokens")
    return convention


def _rule(short: Any, two: Any, whole: Any, lengths: tuple[int, int]) -> tuple[str, int] | None:
    dims = token_dims(short, two, lengths)
    if isinstance(short, Tensor) and two is None:  # a mask that only the longer of the two needed
        return None
    if not isinstance(short, Tensor) or not dims:
        return ("whole", 0) if isinstance(short, Tensor) and isinstance(whole, Tensor) else ("same", 0)
    if len(dims) > 1 or not isinstance(whole, Tensor):
        return None
    dim, (a, b) = dims[0], lengths
    if whole.dim() != short.dim() or whole.shape[dim] != a + b:
        return None
    if _close(whole.narrow(dim, 0, a), short) and _close(whole.narrow(dim, a, b), two):
        return "slice", dim
    return ("head", dim) if _close(whole.narrow(dim, 0, b), two) else None


def _close(first: Tensor, two: Tensor) -> bool:
    if first.shape != two.shape or first.dtype != two.dtype:
        return False
    tolerance = 1e-2 if first.dtype in (torch.bfloat16, torch.float16) else 1e-4
    return torch.allclose(first.double(), two.double(), rtol=tolerance, atol=tolerance)


def _mask(
    mask: Tensor, made_by: MaskFunction | None, reaches: tuple[Reach, ...], argument: str
) -> tuple[str, Tensor, Reach]:
    if made_by is None and len(reaches) != 1:
        raise NotModelled(f"{argument} is a mask of unknown reach")
    reach = reaches[0] if made_by is None else reach_of(made_by)
    form = _mask_form(mask, reach)
    if form is None:
        raise NotModelled(f"{argument} follows neither tokens nor a known mask")
    return *form, reach


def _mask_form(mask: Tensor, reach: Reach) -> tuple[str, Tensor] | None:
    """Return which way a model writes its mask, recognised from the one of a short sequence."""
    if mask.dim() != 4 or mask.shape[-1] != mask.shape[-2]:
        return None
    seen = reach.over(mask.shape[-1], mask.device)
    if mask.dtype == torch.bool:
        forms = {"seen": seen, "hidden": ~seen}
        return next(((form, mask[..., :1, :1]) for form, like in forms.items() if bool((mask == like).all())), None)
    lowest = torch.finfo(mask.dtype).min
    if bool((mask == torch.zeros_like(mask).masked_fill(~seen, lowest)).all()):
        return "additive", mask[..., :1, :1]
    biased = mask[..., -1:, :].expand_as(mask).masked_fill(~seen, lowest)
    return ("biased", mask[..., :1, :1]) if bool((mask == biased).all()) else None


def build_mask(
    form: str, like: Tensor, reach: Reach, length: int, like_mask: Any, device: torch.device
) -> Tensor | None:
    """The mask (.., length, length) that the model would have written for a sequence alone; None where it needs none."""
    if form == "needed" and reach.plain(length):
        return None
    seen = reach.over(length, device)
    if form in ("needed", "seen", "hidden"):
        return (~seen if form == "hidden" else seen).expand(*like.shape[:-2], -1, -1)
    lowest = torch.finfo(like.dtype).min
    if form == "additive":
        return torch.zeros(*like.shape[:-2], length, length, dtype=like.dtype, device=device).masked_fill(~seen, lowest)
    bias: Tensor = like_mask[..., -1:, :length]
    return bias.expand(*bias.shape[:-2], length, length).masked_fill(~seen, lowest)


def _source(flat: dict[str, Any], tokens: int) -> str:
    """The argument through which boundaries reach this mixer."""
    if flat.get("cu_seq_lens_q") is not None:
        return "cu_seq_lens_q"
    for name, value in flat.items():
        if boundaries.is_marks(value, tokens) and bool(value[..., -1].all()) and not bool(value.all()):
            return name
    return "position_ids" if flat.get("position_ids") is not None else ""


def where_from(source: str, call: dict[str, Any]) -> Boundaries | None:
    """The boundaries of a call, or None for a call without.

    source: the argument that carries them: `cu_seq_lens_q`, `position_ids`, or a mask
    call: the arguments of the call, by name
    """
    value = call.get(source)
    if not isinstance(value, Tensor):
        return None
    attached = getattr(value, "boundaries", None)
    if isinstance(attached, Boundaries):
        return attached
    if source == "cu_seq_lens_q":
        return boundaries.from_cumulative(value, int(value[-1]))
    if source == "position_ids":
        return boundaries.from_positions(value) if value.shape[0] == 1 else None
    # Without its attribute a mask over one token cannot be told from marks, and need not be.
    return boundaries.read(value) if boundaries.is_marks(value, value.shape[-1]) and value.shape[-1] > 1 else None


def run_per_sequence(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of a mixer of an enabled model: the mixer's own on each sequence, and the outputs joined.

    module: the mixer; args, kwargs: those of its `forward`, with which it is called as it is where no boundaries came
    """
    original = module.__dict__.get("padding_free_forward") or types.MethodType(type(module).forward, module)
    convention = module.__dict__.get("padding_free_mixer")
    if isinstance(convention, Notes):
        return _note(convention, original, by_name(arguments(module), args, kwargs), args, kwargs)
    if not isinstance(convention, Convention):
        return original(*args, **kwargs)
    call = by_name(convention.takes, args, kwargs)
    where = where_from(convention.source, call)
    if where is None:
        return original(*args, **kwargs)
    convention.calls += 1
    outputs = [original(**_part(convention, call, start, end)) for start, end in where.spans]
    flat = [tree_flatten(output)[0] for output in outputs]
    joined = [
        torch.cat([part[i] for part in flat], dim) if dim is not None else None
        for i, dim in enumerate(convention.outputs[: len(flat[0])])
    ]
    return tree_unflatten(joined + [None] * (len(flat[0]) - len(joined)), tree_flatten(outputs[0])[1])


def _note(notes: Notes, original: Callable[..., Any], call: dict[str, Any], args: Any, kwargs: Any) -> Any:
    if notes.run == "flat":
        # The mixer cannot run on the flat row yet; what it gave for each sequence alone stands in.
        notes.calls["flat"] = (call, None)
        first, second = (tree_flatten(notes.calls[run][1]) for run in ("first", "second"))
        joined = [
            torch.cat([short, two], next(d for d in range(short.dim()) if short.shape[d] != two.shape[d]))
            if isinstance(short, Tensor)
            and short.dim()
            and short.shape != two.shape
            and short.shape[-1] == two.shape[-1]
            else None
            for short, two in zip(first[0], second[0], strict=True)
        ]
        return tree_unflatten(joined, first[1])
    output = original(*args, **kwargs)
    notes.calls[notes.run] = (dict(call), output)
    return output


def _part(convention: Convention, call: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    part: dict[str, Any] = {}
    for name, (form, like, reach) in convention.masks.items():
        device = next(value.device for value in call.values() if isinstance(value, Tensor))
        part[name] = build_mask(form, like, reach, end - start, call.get(name), device)
    for name, rules in convention.rules.items():
        if name in FLAT_KEYS or name in part:
            continue
        if all(kind == "same" for kind, _ in rules) and boundaries.is_marks(call.get(name), _last(call.get(name))):
            part[name] = None
            continue
        values, shape = tree_flatten(call.get(name))
        part[name] = tree_unflatten(
            [_cut(value, rule, start, end) for value, rule in zip(values, rules, strict=False)], shape
        )
    return part


def _cut(value: Any, rule: tuple[str, int], start: int, end: int) -> Any:
    kind, dim = rule
    if kind == "slice":
        return value.narrow(dim, start, end - start)
    return value.narrow(dim, 0, end - start) if kind == "head" else value


def _last(value: Any) -> int:
    return value.shape[-1] if isinstance(value, Tensor) and value.dim() else 0
