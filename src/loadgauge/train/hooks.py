"""The route of a call of an enabled model: flat, or padded and flattened inside, or untouched.

Two hooks do it. The one on the backbone turns its arguments into one flat row with boundaries in place of the mask, and
pads its outputs again where they came padded. The one on the whole model is needed where boundaries would not get
through to the backbone, or where a head expects one row a sequence.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from loadgauge.core.base.errors import ConfigError
from loadgauge.train.layers import boundaries
from loadgauge.train.layers.boundaries import Boundaries, Rows

FLAT_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keys of a flat batch as transformers names them; an enabled model takes them out of the call."""
OTHER_SENSES = ("pixel_", "image_", "video_", "audio_", "input_features")
"""Prefixes of the names of inputs that bring tokens, or masks, which flat text knows nothing of."""
CACHES = ("past_key_values", "cache_params", "layer_past", "state")


@dataclass
class Wiring:
    """Way that boundaries travel through one model.

    `carrier`: "mask" (marks as attention mask), "mapping" (the same, by layer type), "positions" (layers see positions only).
    `by_argument`: cumulated lengths are also given as `cu_seq_lens_q`, for token mixers. `from_top`: the whole model must
    hand the marks to its backbone. `first_position`: what the first token of a sequence counts as.
    """

    carrier: str = "mask"
    by_argument: bool = False
    from_top: bool = False
    one_row_each: bool = False
    first_position: int = 0
    layer_types: tuple[str, ...] = ()
    pad_token_id: int | None = None
    model_takes: tuple[str, ...] = ()
    backbone_takes: tuple[str, ...] = ()
    paused: bool = False
    flat_calls: int = field(default=0, compare=False)


def arguments(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments that the `forward` of a module's class takes, in order."""
    return tuple(name for name in inspect.signature(type(module).forward).parameters if name != "self")


def by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, each under its name.

    >>> by_name(("hidden", "mask"), (1,), {"mask": 2})
    {'hidden': 1, 'mask': 2}
    """
    return dict(zip(names, args, strict=False)) | kwargs


def before_backbone(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the backbone: gives it one flat row, and the boundaries in place of the mask.

    Returns the new (args, kwargs), or None to leave the call as it is. Raises `ConfigError` for images and sound, and where
    sequences cannot be told apart.
    """
    wiring = module.__dict__.get("padding_free_wiring")
    if wiring is None or wiring.paused:
        return None
    call = by_name(wiring.backbone_takes, args, kwargs)
    if seen := [key for key, value in call.items() if value is not None and key.startswith(OTHER_SENSES)]:
        raise ConfigError("only text can be run without padding", key=seen[0])
    marks = flat_marks(call)
    if marks is None:
        where = padded(call)
        if where is None:
            return None
        marks = _flatten(call, where)
    _, tokens = _shape(call)
    if not torch.compiler.is_compiling():
        wiring.flat_calls += 1
    for key in FLAT_KEYS:
        call.pop(key, None)
    if wiring.by_argument:
        call["cu_seq_lens_q"] = cumulative_of(marks)
    call.pop("attention_mask", None)
    if wiring.carrier == "mask":
        call["attention_mask"] = marks
    elif wiring.carrier == "mapping":
        call["attention_mask"] = dict.fromkeys(wiring.layer_types, marks)
    else:
        mask = torch.ones(1, tokens, dtype=torch.bool, device=marks.device)
        mask.boundaries = boundaries.read(marks)  # type: ignore[attr-defined]
        call["attention_mask"] = mask
    if "use_cache" in wiring.backbone_takes:
        call["use_cache"] = False
    if "position_ids" in wiring.backbone_takes:
        call["position_ids"] = _positions(call.get("position_ids"), marks, wiring.first_position)
    else:
        call.pop("position_ids", None)
    return (), call


def after_backbone(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of the backbone: the output as (batch, longest, ...) if the batch came padded; None leaves it as it is."""
    mask = kwargs.get("attention_mask")
    mask = next(iter(mask.values()), None) if isinstance(mask, dict) else mask
    where = getattr(mask, "boundaries", None) or getattr(kwargs.get("position_ids"), "boundaries", None)
    if where is None or where.rows is None or module.__dict__.get("padding_free_wiring") is None:
        return None
    return repad(module, output, where.rows, where.tokens)


def before_model(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the whole model, where its backbone alone would not see boundaries or its head wants rows.

    Returns the changed (args, kwargs), or None where the call is left as it is.
    """
    wiring = module.__dict__.get("padding_free_wiring")
    if wiring is None or wiring.paused or not (wiring.from_top or wiring.one_row_each):
        return None
    call = by_name(wiring.model_takes, args, kwargs)
    marks = flat_marks(call)
    if marks is None:
        return None
    if wiring.one_row_each:
        _unflatten(call, boundaries.read(marks), wiring.pad_token_id)
    else:
        call["attention_mask"] = marks
    for key in FLAT_KEYS:
        call.pop(key, None)
    return (), call


def flat_marks(call: dict[str, Any]) -> Tensor | None:
    """Return the boundaries of a call that holds one flat row, as `Boundaries.marks`, (1, 1, 1, tokens).

    call: its arguments by name. None where it holds padded rows, or continues from a cache.
    Raises `ConfigError` for several sequences with a cache.
    """
    mask, cumulative, positions = (call.get(key) for key in ("attention_mask", "cu_seq_lens_q", "position_ids"))
    rows, length = _shape(call)
    if boundaries.is_marks(mask, length):
        return mask
    flat = rows == 1 and (cumulative is not None or positions is not None) and not isinstance(mask, dict)
    if torch.compiler.is_compiling():
        if not flat or cumulative is None or mask is not None:
            raise ConfigError(
                "a compiled model takes flat batches with cu_seq_lens_q and no attention_mask: use loadgauge.train.Collator"
            )
        return boundaries.marks_from_cumulative(cumulative, length)
    if not flat or (mask is not None and (mask.dim() != 2 or not bool((mask != 0).all()))):
        return None
    if cumulative is not None:
        where = boundaries.from_cumulative(cumulative, length)
    else:
        assert isinstance(positions, Tensor)
        if positions.dim() != 2:
            raise ConfigError("positions of several axes need cu_seq_lens_q beside them", key="position_ids")
        where = boundaries.from_positions(positions)
    if _cached(call):
        if cumulative is not None or len(where.lengths) > 1:
            raise ConfigError("several sequences in one row cannot be run with a cache", key="use_cache")
        return None
    return where.marks(_device(call))


def padded(call: dict[str, Any]) -> Boundaries | None:
    """Return the boundaries of a call that holds padded rows (batch, longest). call: its arguments by name

    None where it continues from a cache. Raises `ConfigError` for a mask of its own shape, and for one row that may hold several
    sequences.
    """
    mask, positions = call.get("attention_mask"), call.get("position_ids")
    rows, length = _shape(call)
    if _cached(call):
        return None
    if isinstance(mask, dict) or (mask is not None and mask.dim() != 2):
        raise ConfigError("takes a mask (batch, tokens) or none: a mask of its own shape cannot be made padding-free")
    if mask is None:
        if rows == 1:
            raise ConfigError(
                "one row without position_ids or attention_mask: one sequence or several? Give one of them "
                "(loadgauge.train.Collator does)",
                key="position_ids",
            )
        mask = torch.ones(rows, length, dtype=torch.long, device=_device(call))
    where = boundaries.from_padded(mask)
    if positions is None or where.rows is None:
        return where
    # Rows may be packed: positions that start again inside a row are a boundary too.
    own = where.rows.gather(positions.expand(rows, -1))
    starts = {end for _, end in where.spans} | {end for _, end in boundaries.from_positions(own).spans}
    ends = sorted(starts)
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return Boundaries(tuple(lengths), where.rows)


def _cached(call: dict[str, Any]) -> bool:
    return bool(call.get("use_cache")) or any(call.get(key) is not None for key in CACHES)


def _flatten(call: dict[str, Any], where: Boundaries) -> Tensor:
    rows = where.rows
    assert rows is not None
    for key, value in call.items():
        if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == rows.longest:
            if value.shape[0] == rows.batch:
                call[key] = rows.gather(value)
            elif value.shape[0] == 1 and key == "position_ids":
                call[key] = rows.gather(value.expand(rows.batch, -1))
    return where.marks(_device(call))


def _unflatten(call: dict[str, Any], where: Boundaries, pad_token_id: int | None) -> None:
    """A head that pools one row a sequence gets the tokens as padded rows; inside, the backbone flattens them again."""
    if call.get("input_ids") is None:
        raise ConfigError("a flat batch for a head of one row a sequence needs input_ids", key="input_ids")
    if pad_token_id is None:
        raise ConfigError("must be set: the head looks for the last token that is not padding", key="pad_token_id")
    longest, device = max(where.lengths), call["input_ids"].device
    mask = torch.arange(longest)[None] < torch.tensor(where.lengths)[:, None]
    mask = mask.to(device)
    ids = call["input_ids"].new_full(mask.shape, pad_token_id)
    ids[mask] = call["input_ids"][0]
    call.pop("position_ids", None)
    call.update(input_ids=ids, attention_mask=mask.long())


def repad(module: nn.Module, output: Any, rows: Rows, tokens: int) -> Any:
    """Return an output of one flat row with every tensor in it padded again, (1, tokens, ...) to (batch, longest, ...).

    module: the backbone, whose pooler pools again from each row; tokens: length of the flat row
    """

    def back(value: Any, key: str = "") -> Any:
        if isinstance(value, Tensor) and value.dim() >= 2:
            if value.shape[:2] == (1, tokens):
                return rows.scatter(value)
            if value.shape[0] == tokens and "router" in key:
                return rows.scatter(value[None]).flatten(0, 1)
        return tuple(back(item, key) for item in value) if isinstance(value, (tuple, list)) else value

    if not isinstance(output, dict):
        return back(output)
    first = next(iter(output))
    for key in list(output):
        output[key] = back(output[key], key)
    pooler = getattr(module, "pooler", None)
    if pooler is not None and output.get("pooler_output") is not None:
        output["pooler_output"] = pooler(output[first])
    return output


def cumulative_of(marks: Tensor) -> Tensor:
    """Return cumulated lengths as int32, (sequences + 1,), with the boundaries attached. marks: (1, 1, 1, tokens)"""
    if torch.compiler.is_compiling():
        ends = marks.reshape(-1).nonzero().flatten() + 1
        return torch.cat([ends.new_zeros(1), ends]).int()
    where = boundaries.read(marks)
    cumulative = where.cumulative(marks.device)
    cumulative.boundaries = where  # type: ignore[attr-defined]
    return cumulative


def _positions(stated: Tensor | None, marks: Tensor, first: int) -> Tensor:
    if torch.compiler.is_compiling():
        if stated is None:
            raise ConfigError("a compiled model needs position_ids with its flat batch", key="position_ids")
        return stated + first if first else stated
    where = boundaries.read(marks)
    if stated is None:
        stated = where.positions(marks.device) + first
    elif first and int(stated[0, 0]) == 0:
        stated = stated + first
    else:
        stated = stated.view_as(stated)  # the caller's tensor stays without an attribute
    stated.boundaries = where  # type: ignore[attr-defined]
    return stated


def _shape(call: dict[str, Any]) -> tuple[int, int]:
    tokens = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
    if tokens is None:
        raise ConfigError("a batch needs input_ids or inputs_embeds", key="input_ids")
    return tokens.shape[0], tokens.shape[1]


def _device(call: dict[str, Any]) -> torch.device:
    tokens: Tensor = call["input_ids"] if call.get("input_ids") is not None else call["inputs_embeds"]
    return tokens.device
