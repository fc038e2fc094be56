"""Training inputs by kind of model: tokens, an encoder's and a decoder's, or sound and tokens."""

import functools
import inspect
from importlib import import_module
from typing import Any

import torch

from loadgauge.core.base.errors import ConfigError, NotModelled, refuse
from loadgauge.pytorch.capture.inputs.heads import (
    HEADS,
    Towers,
    classes_of,
    contrasts,
    head_class,
    head_inputs,
    sizes_of,
    two_texts,
)
from loadgauge.pytorch.capture.inputs.inputs import beside_tokens, dtype_of, made, special_tokens, usual_picture
from loadgauge.pytorch.capture.inputs.pictures import Pictures, processed
from loadgauge.pytorch.capture.inputs.sounds import hears, places, sound_of
from loadgauge.pytorch.capture.inputs.target import MOST
from loadgauge.pytorch.capture.inputs.tokens import count_tokens, watch
from loadgauge.pytorch.capture.symbols.values import whole
from loadgauge.pytorch.trace.programs.jobs import made_of
from loadgauge.pytorch.trace.programs.training import Sized, mean_loss
from loadgauge.pytorch.trace.torch_run import TorchRun
from loadgauge.pytorch.trace.transformers_api import OWN_KERNELS, text_config

PATCHED = ("pixel_values", "input_features", "input_values")
"""Inputs that stand for a picture or a sound."""


def _too_long(name: str, tokens: int, longest: int) -> ConfigError:
    """Return the error for a sequence longer than a model's, whose key says how long that is (`MOST`)."""
    error = ConfigError(f"{name}: {tokens} is more than the model's {longest}")
    error.key = f"{name}{MOST}{longest}"
    return error


def of_config(config: Any, run: TorchRun, pictures: Pictures | None = None, head: str = "") -> Sized:
    """The training of a model of transformers, from its configuration object. Raises ConfigError where there is no class for it.

    pictures: arguments that its image processor makes of a sequence's pictures, instead of those of `inputs.toml`
    head: a word of `heads.toml`, instead of what the config's `architectures` name
    """
    if (found := head_class(config, head)) is not None:
        return _of_head(*found, config, run)
    kind = model_class(config)
    model_type, config = config.model_type, _own_part(config, kind)
    taken = inspect.signature(kind.forward).parameters
    longest = getattr(_text(config), "max_position_embeddings", None)
    both = bool(getattr(config, "is_encoder_decoder", False)) and "decoder_input_ids" in taken
    heard = next((name for name in PATCHED if name in taken and "input_ids" not in taken), "")
    beside = beside_tokens(config, taken, model_type)
    own = {"input_ids", "decoder_input_ids", "labels"} & set(beside)  # of several codebooks
    refuse(
        heard and heard != "input_features" and heard not in beside,
        f"{kind.__name__} takes {heard} alone: pictures and raw sound are not captured",
        NotModelled,
    )

    def tokens(device: str, b: Any, s: Any, name: str) -> Any:
        if longest and longest > 0 and s > longest:  # with a symbol, this is a guard
            raise _too_long(name, s, longest)
        return torch.empty((b, s), dtype=torch.long, device=device)

    size = usual_picture(config)
    of_sound = hears(config, taken)
    for part in (config, *_parts(config)):  # which layers are skipped is drawn at random
        for key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
            if getattr(part, key, 0):
                setattr(part, key, 0.0)
    sounds = functools.cache(lambda samples: sound_of(config, taken, samples))
    usual = pictures or (processed(config, [size]) if size else Pictures())

    def inputs(
        device: str,
        module: Any,
        b: Any,
        s: Any,
        t: Any = None,
        pictures: Pictures | None = None,
        stop: bool = False,
        n: Any = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        pictures = pictures or usual
        given: dict[str, Any] = {}
        sound = sounds(int(n)) if of_sound else None  # a guard: its length is a number
        watch(module, s, b, stop, sound)
        if heard and heard not in beside:
            given[heard] = _sound(config, module, device, b)
        elif not heard:
            given["input_ids"] = tokens(device, b, s, "s")
        labels = given.get("input_ids")
        if both:
            labels = given["decoder_input_ids"] = tokens(device, b, s if heard else t, "s" if heard else "t")
        sizes = {"b": b, "s": s, "pictures": pictures.count} | ({} if t is None else {"t": t})
        marked = special_tokens(config, model_type, sizes)
        count_tokens(given.get("input_ids"), marked)
        count_tokens(given.get("decoder_input_ids"), tuple((token, 0) for token, _ in marked))
        dtype = dtype_of(module)
        for name, one in pictures.given.items():
            if name in taken and name not in given:
                tensor = one.tensor(device, dtype, int(b) if "no_padding" in beside.get(name, {}) else b)
                given[name] = whole(tensor) if "no_padding" in beside.get(name, {}) else tensor
        given |= {
            name: made(row, config, device, dtype, sizes)
            for name, row in beside.items()
            if name not in given or name in own
        }
        if sound is not None:
            given |= {name: one.tensor(device, dtype, b, sound.alike) for name, one in sound.given.items()}
            places(given["input_ids"], sound)
        if "labels" in taken and "labels" not in own:
            given["labels"] = given.get("decoder_input_ids", labels)
        if "use_cache" in taken:
            given["use_cache"] = False
        return (), given

    names = ("b", "s", "t") if both and not heard else ("b", "s")
    names = (*names, "n") if of_sound else names
    notes = (OWN_KERNELS[model_type],) if model_type in OWN_KERNELS else ()
    return Sized(lambda device: _build(kind, config, run, device), inputs, mean_loss, run, names, notes=notes)


def _of_head(word: str, kind: Any, config: Any, run: TorchRun) -> Sized:
    """The training of a class with another head than that of a language model."""
    config, names = _own_part(config, kind), sizes_of(word)
    if word == "detection":
        _needs_scipy()
    taken = inspect.signature(kind.forward).parameters
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0  # classifiers look for the last token that is no padding
    if "n" in names:  # which frames are masked, and which layers skipped, is drawn at random
        config.apply_spec_augment, config.layerdrop = False, 0.0

    def build(device: str) -> Any:
        model = _build(kind, config, run, device)
        return Towers(model) if contrasts(word) else model

    def inputs(device: str, module: Any, **sizes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        longest = getattr(_text(config), "max_position_embeddings", None)
        for name in ("s", "t"):
            if longest and longest > 0 and name in sizes and "n" not in sizes and sizes[name] > longest:
                raise _too_long(name, sizes[name], longest)
        if contrasts(word):
            return (), two_texts(device, sizes["b"], sizes["s"], sizes["t"])
        given = head_inputs(word, config, taken, device, dtype_of(module), sizes)
        if "s" in sizes:
            given["input_ids"] = torch.empty((sizes["b"], sizes["s"]), dtype=torch.long, device=device)
        return (), given | ({"use_cache": False} if "use_cache" in taken else {})

    return Sized(build, inputs, mean_loss, run, names)


def _needs_scipy() -> None:
    """Import what matches predictions with objects. Raises ConfigError where it is not installed."""
    try:
        import_module("scipy.optimize")
    except ImportError:
        raise ConfigError("needs scipy: pip install scipy") from None


def _parts(config: Any) -> list[Any]:
    found = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    return [part for part in found if part is not None]


def _own_part(config: Any, kind: Any) -> Any:
    """The part of a config that a class is made of, where it is one of a whole, such as the decoder of musicgen."""
    wanted = getattr(kind, "config_class", None) or type(config)
    return next((part for part in (config, *_parts(config)) if isinstance(part, wanted)), config)


def _text(config: Any) -> Any:
    try:
        return text_config(config)
    except ValueError:  # several; that of the decoder is trained
        return getattr(config, "decoder", config)


def model_class(config: Any, head: str = "") -> Any:
    """The class that is trained for a configuration: that of a head, the one its `architectures` name, else the first of `HEADS`
    that has one.

    Raises ConfigError where there is none.
    """
    import transformers

    if (named := head_class(config, head)) is not None:
        return named[1]
    known = classes_of(HEADS, config.model_type)
    names = [name for name in getattr(config, "architectures", None) or () if name in known]
    names += known
    found = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    refuse(found is None, f"transformers has no language model for {config.model_type!r}")
    return found


def _build(kind: Any, config: Any, run: TorchRun, device: str) -> Any:
    for part in (config, *_parts(config)):
        if hasattr(part, "use_cache"):
            part.use_cache = False
    return made_of(kind._from_config, config, run, device)


def _sound(config: Any, module: Any, device: str, b: Any) -> Any:
    """A spectrogram of the longest sound that the model takes: (b, mel bins, frames)."""
    bins, frames = getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)
    return torch.empty((b, bins, frames), dtype=dtype_of(module), device=device)
