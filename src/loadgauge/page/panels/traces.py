"""Output of `loadgauge trace --json` and `loadgauge measure --json`, read as dots for the memory timeline."""

import re
from typing import Annotated, Any

import msgspec

from loadgauge.core.answers.figures.trace_points import BACKWARD, BOTH, FORWARD, STEP, Bytes, Found, Sizes
from loadgauge.core.base import ConfigError, Door
from loadgauge.page.inputs.uploads import plain_name

PYTORCH = Door("pytorch")

MOST_TEXT = 2000
"""Longest line with the settings of a trace [characters]."""


class _Peak(msgspec.Struct, frozen=True):
    categories: dict[str, Bytes]


class _Traced(msgspec.Struct, frozen=True):
    target: str
    phases: dict[str, Bytes]
    peak: _Peak
    assumed: dict[str, Annotated[str, msgspec.Meta(max_length=MOST_TEXT)]]


class _Measured(msgspec.Struct, frozen=True):
    target: str
    backward_peak: Bytes
    step_peak: Bytes
    states: dict[str, Bytes]


def read_trace(text: str, name: str) -> dict[str, Any]:
    """Read the dots of a trace as plain values [bytes]. Raises `ConfigError` if the text is not a trace."""
    trace = _read(text, _Traced, name, "trace")
    sizes = trace.assumed.get("settings")
    return _plain(
        Found(
            source="traced",
            target=_target(trace.target),
            weights=trace.peak.categories.get("weights", 0),
            phases={phase: trace.phases[phase] for phase in (FORWARD, BACKWARD, STEP) if phase in trace.phases},
            gpus=_world(trace.assumed.get("rank")) if sizes is None else 1,
            sizes=None if sizes is None else _sizes(sizes, name),
        ),
        name,
    )


def read_measurement(text: str, name: str) -> dict[str, Any]:
    """Read the dots of a measurement as plain values [bytes]. Raises `ConfigError` if the text is not a measurement.

    >>> text = '{"target": "gpt2", "backward_peak": 9, "step_peak": 8, "states": {"weights": 2}}'
    >>> read_measurement(text, "m.json")["phases"]
    {'forward and backward': 9, 'optimizer step': 8}
    """
    measurement = _read(text, _Measured, name, "measurement")
    return _plain(
        Found(
            source="measured",
            target=_target(measurement.target),
            weights=measurement.states.get("weights", 0),
            gpus=1,
            phases={BOTH: measurement.backward_peak, STEP: measurement.step_peak},
        ),
        name,
    )


def _read(text: str, kind: type[Any], name: str, title: str) -> Any:
    try:
        return msgspec.json.decode(text.encode("utf-8", "surrogatepass"), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"is no {title}: {error}", file=name) from None
    except RecursionError:
        raise ConfigError("is nested too deeply", file=name) from None


def _plain(dots: Found, name: str) -> dict[str, Any]:
    """Convert to plain values, with the checks that apply when the page sends them back."""
    try:
        return msgspec.to_builtins(msgspec.convert(msgspec.to_builtins(dots), Found))  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise ConfigError(f"cannot be drawn: {error}", file=name) from None


def _target(target: str) -> str:
    return plain_name(target.rstrip("/"))


def _world(rank: str | None) -> int | None:
    """Of how many a rank is one: `3 of 8: tp 1, data 1, pp 0`. A script does not say it."""
    match = re.match(r"\d+ of (\d{1,9})\b", rank or "", re.ASCII)
    return int(match[1]) if match else None


def _sizes(text: str, name: str) -> Sizes:
    """The settings of a trace in the words of an estimate."""

    try:
        job, keep, layers = PYTORCH.parse_flags(text)
    except ConfigError as error:
        raise ConfigError(f"is no trace: {error}", file=name) from None
    run = PYTORCH.TorchRun.of(job, keep=keep)
    return Sizes(
        framework="huggingface",
        layers=layers,
        seq_len=run.layout.seq_len,
        micro_batch=run.layout.micro_batch,
        micro_batches=run.accumulate,
        precision=run.training.precision.name,
        optimizer=PYTORCH.OPTIMIZERS[run.training.optimizer.name][0],
        recompute="selective" if keep else str(run.layout.recompute),
    )
