"""Facts of a published run that no field of `Job` can say, as changes of the records that the job resolves to.

Changes name the fields of `ModelSpec`, `Layout` and `Training`, as deep as needed: `{"blocks": [{"mlp": {"gated": false}}]}`.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from loadgauge.core.base.errors import ConfigError, refuse
from loadgauge.core.definitions.model.lora import Lora
from loadgauge.core.definitions.model.model import Attention, LatentAttention, Mlp, Moe, Norm

Changes = dict[str, Any]
Record = TypeVar("Record", bound=msgspec.Struct)
KINDS: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind for kind in (Attention, LatentAttention, Mlp, Moe, Norm, Lora)
}
"""Kinds of records that a change may name in `type`, to replace a record of another kind."""


class Overrides(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Changes of the model, the layout and the training that a job resolves to."""

    model: Changes = {}
    layout: Changes = {}
    training: Changes = {}

    def __bool__(self) -> bool:
        return bool(self.model or self.layout or self.training)


UNCHANGED = Overrides()


def apply(record: Record, changes: Mapping[str, Any]) -> Record:
    """Return the record with its fields changed. Raises `ConfigError` where a field does not exist or cannot hold the value.

    >>> apply(Moe(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64), {"num_experts": 16}).num_experts
    16
    >>> apply(Norm(), {"sort": "rmsnorm"})
    Traceback (most recent call last):
    loadgauge.core.base.errors.ConfigError: Norm has no field 'sort'
    """
    values = {name: _value(record, name, change) for name, change in changes.items()}
    return msgspec.structs.replace(record, **values)


def _value(record: msgspec.Struct, name: str, change: Any) -> Any:
    types = _hints(type(record))
    refuse(name not in types, f"{type(record).__name__} has no field {name!r}")
    current = getattr(record, name)
    try:
        if name == "pattern":  # pairs of a block's number and of how many layers in a row it is
            return tuple(block for block, layers in change for _ in range(layers))
        if name == "blocks":
            return tuple(apply(current[min(index, len(current) - 1)], block) for index, block in enumerate(change))
        if isinstance(change, dict) and "type" in change:
            kind = KINDS[change["type"]]
            return apply(_least(kind, change), {key: value for key, value in change.items() if key != "type"})
        if isinstance(change, dict) and isinstance(current, msgspec.Struct):
            return apply(current, change)
        return msgspec.convert(change, types[name])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{name} of {type(record).__name__}: {error}") from None


def _least(kind: type[msgspec.Struct], change: Mapping[str, Any]) -> msgspec.Struct:
    """A record of a kind, with what `change` gives for the fields that have no default."""
    needed = [field.name for field in msgspec.structs.fields(kind) if field.required]
    return kind(**{name: change[name] for name in needed})


@cache
def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of a record's fields; a `Size`, elsewhere perhaps a formula, is a number here."""
    hints = get_type_hints(kind)
    return {name: int | float | None if hint is Any or Any in get_args(hint) else hint for name, hint in hints.items()}
