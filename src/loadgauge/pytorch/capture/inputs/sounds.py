"""Sounds of any length beside a text: what a model's own processor makes of them.

The processor of transformers is run on silence, so that its rule (frames, windows, padding) is written nowhere else.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from loadgauge.core.base import ConfigError, NotModelled, first_line, read_table, refuse
from loadgauge.pytorch.capture.inputs.inputs import number
from loadgauge.pytorch.capture.symbols.sizes import SAMPLES
from loadgauge.pytorch.capture.symbols.values import with_values
from loadgauge.pytorch.device.facts.fact_kinds import Placed, Tiled

_TEXT = ("input_ids", "attention_mask", "labels", "mm_token_type_ids", "token_type_ids")
"""What a processor makes of the text."""


_MARK = "#"
_CUT = SAMPLES // 5
"""A processor that makes the same of a sound without its last samples, so many, does not hear them."""


class Sound(msgspec.Struct, frozen=True):
    """An argument that a processor makes of the sound of one sequence.

    values: integers or truth values, whole, along `rows` first; None: floating point, of which nothing is known
    """

    shape: tuple[int, ...]
    values: Any = None
    dtype: str = ""
    """Where nothing is known: "long", or the model's own."""

    def tensor(self, device: str, dtype: torch.dtype, b: Any, alike: bool = True) -> torch.Tensor:
        """The argument for b sequences with sounds of the same length. alike: see `Heard`; else b is a number"""
        if not alike and self.values is not None:
            with _disable_current_modes():
                real = self.values.repeat(int(b), *(1 for _ in self.shape[1:]))
            return with_values(real, device)
        kind = self.values.dtype if self.values is not None else torch.long if self.dtype else dtype
        made = torch.empty((self.shape[0] * b, *self.shape[1:]), dtype=kind, device=device)
        if self.values is not None and not isinstance(made, FakeTensor):
            made.copy_(self.values.repeat(b, *(1 for _ in self.shape[1:])))
        elif self.values is not None:
            keep(made, Tiled(self.values))
        return made


class Heard(msgspec.Struct, frozen=True):
    """What stands for the sound of one sequence: arguments by name; tokens: places in the text that the processor leaves for it."""

    given: Mapping[str, Sound] = {}
    tokens: int = 0
    token: int = -1
    """The id of these, where the model looks for it itself."""
    alike: bool = True
    """Whether the code asks of all sounds together, and not how long each is."""
    seen: bool = False
    """Whether as many tokens stand for it as the model's own `get_audio_features` makes vectors."""


def keep(tensor: Any, fact: Any) -> None:
    """Note what is known of a tensor, where facts are kept."""
    facts = getattr(getattr(tensor, "fake_mode", None), "facts", None)
    if facts is not None:
        facts.keep(tensor, fact)


def places(ids: torch.Tensor, heard: Heard) -> torch.Tensor:
    """Say of a text that a sound's tokens stand in it; returns it."""
    if heard.token >= 0:
        keep(ids, Placed(heard.token, heard.tokens))
    return ids


def hears(config: Any, taken: Mapping[str, Any]) -> bool:
    """Return whether a model takes text, and sounds of any length beside it. taken: parameters of its `forward`"""
    if config.model_type not in read_table("capture/sounds.toml") or "input_ids" not in taken:
        return False
    return not hasattr(config, "audio_config") or config.audio_config is not None  # some are made without a tower


def sound_of(config: Any, taken: Mapping[str, Any], samples: int) -> Heard:
    """Return what a model's processor makes of a sequence's sound.

    samples: its length, of `SAMPLES` a second
    Raises ConfigError where a library is missing, and NotModelled where the sound makes no tensors.
    """
    row = read_table("capture/sounds.toml")[config.model_type]
    with _disable_current_modes():
        if "rows" in row:
            return Heard({name: _of_row(one, config, samples) for name, one in row["rows"].items()})
        try:
            one, two = (_processed(config, row, samples, sequences) for sequences in (1, 2))
            less = _processed(config, row, samples - _CUT, 1) if samples > 2 * _CUT and "windows" not in row else {}
        except ImportError as error:
            lacks = next((one for one in ("torchaudio", "librosa", "mistral-common") if one in str(error)), "a library")
            raise ConfigError(f"sounds of {config.model_type} need {lacks}: pip install {lacks}") from None
        except (ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
            raise NotModelled(
                f"{config.model_type}: its processor takes no sound of {samples / SAMPLES:g} s: {first_line(error)[:160]}"
            ) from None
    found: dict[str, Sound] = {}
    for name, array in one.items():
        if name in _TEXT or name not in taken or not isinstance(array, torch.Tensor) or not array.dim():
            continue
        refuse(
            2 * array.shape[0] != two[name].shape[0] or array.shape[1:] != two[name].shape[1:],
            f"{config.model_type}: {name} is no tensor of equal rows for each sound",
            NotModelled,
        )
        integers = not array.is_floating_point() and name not in row.get("ids", ())
        found[name] = Sound(tuple(array.shape), array if integers else None, "long" * (name in row.get("ids", ())))
    if less and _cut(one, less, [name for name, sound in found.items() if sound.values is not None]):
        raise ConfigError(
            f"{config.model_type}: its processor cuts off the end of a sound of {samples / SAMPLES:g} s", key="audio"
        )
    refuse(not found, f"{config.model_type}: its processor makes nothing of a sound that the model takes", NotModelled)
    token = number(row["token"], config, {}) if "token" in row else -1
    return Heard(found, int(one.get("places", 0)), token, row.get("alike", True), row.get("seen", False))


def _cut(whole: Mapping[str, Any], less: Mapping[str, Any], masks: list[str]) -> bool:
    """Return whether nothing tells a sound from one that is a little shorter."""
    with _disable_current_modes():
        return bool(masks) and all(torch.equal(whole[name], less[name]) for name in masks)


def _of_row(row: Mapping[str, Any], config: Any, samples: int) -> Sound:
    """An argument whose shape the table states."""
    shape = tuple(number(one, config, {"n": samples}) for one in row["shape"])
    return Sound((1, *shape), torch.ones((1, *shape), dtype=torch.bool) if row.get("ones") else None)


def _processed(config: Any, row: Mapping[str, Any], samples: int, sequences: int) -> dict[str, Any]:
    import numpy as np
    import transformers
    from transformers.models.auto import feature_extraction_auto, processing_auto

    kind = row.get("processor", config.model_type)
    processors: Any = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    extractors: Any = vars(feature_extraction_auto)["FEATURE_EXTRACTOR_MAPPING_NAMES"]
    made = getattr(transformers, row.get("extractor") or extractors.get(kind) or "WhisperFeatureExtractor")
    extractor = made(**_settings(made, config, row))
    rate = int(extractor.sampling_rate)
    silence = [np.zeros(samples * rate // SAMPLES, dtype=np.float32) for _ in range(sequences)]
    options = row.get("options", {})
    if "extractor" in row:
        out = dict(extractor(silence, sampling_rate=rate, return_tensors="pt", **options))
        if "windows" in row:
            long, kept = number(row["windows"], config, {}), out["input_features"]
            out["input_features"] = kept.reshape(sequences, kept.shape[1], -1, long).transpose(1, 2).flatten(0, 1)
        found = {row.get("names", {}).get(name, name): value for name, value in out.items()}
        if "counted" in row:
            found["places"] = _counted(getattr(transformers, processors[kind]), extractor, found)
        return found
    processor, token, tokenizer = _processor(getattr(transformers, processors[kind]), extractor)
    out = dict(processor(text=[token] * sequences, audio=silence, sampling_rate=rate, return_tensors="pt", **options))
    ids = out["input_ids"][0]
    return out | {"places": int((ids == tokenizer.convert_tokens_to_ids(token)).sum())}


def _counted(made: Any, extractor: Any, found: Mapping[str, Any]) -> int:
    """Places in the text that a processor's class leaves for a sound, of which the extractor's results are known."""
    processor = made.__new__(made)  # whole, it has a tokenizer and processors of pictures, which do not count
    for name in ("audio_token", "boa_token", "eoa_token", "audio_start_token", "audio_end_token"):
        vars(processor)[name] = _MARK if name == "audio_token" else ""
    vars(processor)["feature_extractor"] = extractor
    return int(processor.replace_audio_token(found, audio_idx=0).count(_MARK))


def _processor(made: Any, extractor: Any) -> tuple[Any, str, Any]:
    """A processor with a tokenizer that knows the marks of sounds alone, and the mark of one."""
    import transformers
    from tokenizers import Tokenizer, models

    parameters = inspect.signature(made.__init__).parameters
    marks = {"audio_token": "<|sound|>", "audio_bos_token": "<|sound_start|>", "audio_eos_token": "<|sound_end|>"}
    marks |= {
        name: one.default
        for name, one in parameters.items()
        if name.endswith("_token") and isinstance(one.default, str)
    }
    plain = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1}, unk_token="<unk>"))
    made_of: Any = transformers.PreTrainedTokenizerFast
    tokenizer = made_of(tokenizer_object=plain, unk_token="<unk>", pad_token="<pad>", extra_special_tokens=marks)
    parts = {
        "tokenizer": tokenizer,
        "feature_extractor": extractor,
        "audio_processor": extractor,
        "alignment_tokenizer": tokenizer,
    }
    processor = made(**{name: part for name, part in parts.items() if name in parameters})
    return processor, getattr(processor, "audio_token", None) or marks["audio_token"], tokenizer


def _settings(made: Any, config: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an extractor's class that follow from the config, and those that published models have."""
    parameters = inspect.signature(made.__init__).parameters
    found = {}
    for name, keys in (read_table("capture/sounds.toml")["default"]["settings"] | row.get("settings", {})).items():
        if name in parameters and keys:
            try:
                found[name] = number(keys, config, {})
            except ConfigError:  # the class's own
                continue
    found |= row.get("given", {})
    return found
