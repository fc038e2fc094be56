"""`ZeroEngine`: the settings of DeepSpeed's engine under ZeRO 1, 2 and 3, by the names of its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from loadgauge.core.base.errors import ConfigError, closest

SMALLEST, LARGEST = 0, 10**13


class ZeroEngine(msgspec.Struct, frozen=True, kw_only=True):
    """Allocation of an engine of its own under ZeRO 1, 2 and 3 (`core/estimate/states/zero_engine.py`).

    bucket: elements of its reduce bucket (`reduce_bucket_size`)
    overlap: whether gradients are reduced, and weights gathered, on streams of their own (`overlap_comm`); None: at stage 3
    norm: bytes of an element of the copy of a gradient of which the norm is taken; 0: there is no copy
    step_elements: elements of the share that ZeRO 3 steps at a time (`sub_group_size`)
    prefetch: elements that ZeRO 3 gathers ahead with each module (`stage3_prefetch_bucket_size`)
    live: gathered elements from which on it gathers nothing ahead (`stage3_max_live_parameters`)
    reuse: a weight stays gathered if fewer elements than this are used before it is used again (`stage3_max_reuse_distance`)
    whole: elements up to which a weight is not shared out (`stage3_param_persistence_threshold`)
    state_buffers: of the largest sub-group, that optimizer states on NVMe pass through (`offload_optimizer.buffer_count`)
    param_buffers, param_buffer: buffers for weights on NVMe, and their elements (`offload_param.buffer_count`, `buffer_size`)
    """

    bucket: int = 500_000_000
    overlap: bool | None = None
    norm: int = 8
    step_elements: int = 10**9
    prefetch: int = 50_000_000
    live: int = 10**9
    reuse: int = 10**9
    whole: int = 100_000
    state_buffers: int = 4
    param_buffers: int = 5
    param_buffer: int = 100_000_000

    def overlaps(self, stage: int) -> bool:
        """Return whether it uses streams of its own (source: deepspeed 0.19.8, `zero/config.py`, `overlap_comm_valid`).

        >>> ZeroEngine().overlaps(2), ZeroEngine().overlaps(3), ZeroEngine(overlap=True).overlaps(2)
        (False, True, True)
        """
        return stage == 3 if self.overlap is None else self.overlap

    def told(self, text: str, hidden: int) -> ZeroEngine:
        """Return the engine with the settings of a text, `reduce_bucket_size=2e8,overlap_comm=true`. Raises `ConfigError`.

        `auto` is what transformers fills in for a model of this hidden size (integrations/deepspeed.py,
        `trainer_config_finalize`); where it fills in nothing, DeepSpeed's own default.

        >>> ZeroEngine().told("reduce_bucket_size=auto,stage3_prefetch_bucket_size=auto,overlap_comm=true", 4096).prefetch
        15099494
        >>> ZeroEngine().told("reduce_bucket=1", 4096)
        Traceback (most recent call last):
        loadgauge.core.base.errors.ConfigError: engine: unknown setting 'reduce_bucket'; did you mean 'reduce_bucket_size'?
        """
        changes: dict[str, object] = {}
        for word in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (part.strip() for part in word.partition("="))
            if name not in SETTINGS:
                near = closest(name, SETTINGS)
                hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(SETTINGS)})"
                raise ConfigError(f"unknown setting {name[:60]!r}{hint}", key="engine")
            field = SETTINGS[name]
            if value == "auto":
                if field in FILLED_IN:
                    changes[field] = FILLED_IN[field](hidden)
                continue
            changes[field] = _switch(name, value) if field == "overlap" else _number(name, value)
        return msgspec.structs.replace(self, **changes)


SETTINGS = {
    "reduce_bucket_size": "bucket", "overlap_comm": "overlap", "sub_group_size": "step_elements",
    "stage3_prefetch_bucket_size": "prefetch", "stage3_max_live_parameters": "live", "stage3_max_reuse_distance": "reuse",
    "stage3_param_persistence_threshold": "whole", "offload_optimizer.buffer_count": "state_buffers",
    "offload_param.buffer_count": "param_buffers", "offload_param.buffer_size": "param_buffer",
}  # fmt: skip
"""Settings by their names in `zero_optimization`, and the field of each."""
FILLED_IN: Mapping[str, Callable[[int], int]] = {
    "bucket": lambda hidden: hidden**2, "prefetch": lambda hidden: int(0.9 * hidden**2), "whole": lambda hidden: 10 * hidden,
}  # fmt: skip
"""Values that transformers fills in for `auto`, from the hidden size of the model."""


def _number(name: str, value: str) -> int:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not SMALLEST <= number <= LARGEST or not number.is_integer() or (name == "reduce_bucket_size" and not number):
        raise ConfigError(
            f"{name} must be a whole number of elements up to {LARGEST:g}, got {value[:40]!r}", key="engine"
        )
    return int(number)


def _switch(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ConfigError(f"{name} must be true or false, got {value[:40]!r}", key="engine")
    return value.lower() == "true"
