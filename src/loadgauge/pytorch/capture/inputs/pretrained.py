"""Published weights that a script asks for: its model is built as for them, and nothing is fetched, as no value is looked at."""

import contextlib
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.files import LARGEST_PROGRAM, read_start
from loadgauge.pytorch.device.patches import replaced

LIBRARIES = ("torchvision", "timm", "transformers", "diffusers")


class Unfetched(dict[str, Any]):
    """Weights that were not fetched; whatever loads them changes nothing."""


def _unfetched(*_: Any, **__: Any) -> Unfetched:
    return Unfetched()


@contextlib.contextmanager
def without_weights(file: str) -> Iterator[None]:
    """Weights of torchvision, timm, transformers and diffusers are neither fetched nor loaded in the body.

    file: the script, whose text says which of these are imported
    """
    text = read_start(file, LARGEST_PROGRAM).decode("utf-8", "replace")
    named = [name for name in LIBRARIES if re.search(rf"\b{name}\b", text) and find_spec(name) is not None]
    if {"torchvision", "timm"} & set(named):
        from loadgauge.pytorch.device.kernels.vision_ops import torchvision

        torchvision()  # which timm is made with
    load = torch.nn.Module.load_state_dict

    def loaded(module: Any, state: Any, *given: Any, **keywords: Any) -> Any:
        return state if isinstance(state, Unfetched) else load(module, state, *given, **keywords)

    changes: list[tuple[Any, str, Any]] = [
        (torch.hub, "load_state_dict_from_url", _unfetched),
        (torch.nn.Module, "load_state_dict", loaded),
    ]
    if "torchvision" in named:
        changes.append((import_module("torchvision.models._api").WeightsEnum, "get_state_dict", _unfetched))
    if "timm" in named:
        changes.append((import_module("timm.models._builder"), "load_pretrained", _unfetched))
    if "transformers" in named:
        autos: Any = import_module("transformers.models.auto.modeling_auto")  # whose classes have copies of the method
        classes = [import_module("transformers").PreTrainedModel]
        classes += [kind for kind in vars(autos).values() if isinstance(kind, type) and "from_pretrained" in vars(kind)]
        changes += [
            (kind, "from_pretrained", classmethod(_of_transformers(kind.from_pretrained.__func__))) for kind in classes
        ]
    if "diffusers" in named:
        owner: Any = import_module("diffusers").ModelMixin
        changes.append((owner, "from_pretrained", classmethod(_of_diffusers(owner.from_pretrained.__func__))))
    with replaced(*changes):
        yield


def _of_transformers(load: Any) -> Any:
    """`from_pretrained` of a class of models: from the configuration, where that is at hand; else as the library does."""

    def made(kind: Any, name: Any, *given: Any, **keywords: Any) -> Any:
        from loadgauge.pytorch.capture.inputs.target import config_keys
        from loadgauge.pytorch.trace.programs.target import config_object

        config, keys = keywords.pop("config", None), dict[str, Any]()
        if config is None and "quantization_config" not in keywords:
            with contextlib.suppress(ConfigError):
                keys = config_keys(str(name))
        if config is None and not keys:
            return load(kind, name, *given, **keywords)
        config = config_object(keys, str(name)) if config is None else config
        dtype = keywords.pop("dtype", keywords.pop("torch_dtype", "auto"))
        if dtype in ("auto", None):
            dtype = keys.get("dtype") or keys.get("torch_dtype") or "float32"
        for key in [key for key in keywords if hasattr(config, key) and key != "attn_implementation"]:
            setattr(config, key, keywords.pop(key))
        kind = kind._model_mapping[type(config)] if hasattr(kind, "_model_mapping") else kind
        kind = kind[0] if isinstance(kind, tuple) else kind
        attention = {key: keywords[key] for key in ("attn_implementation",) if key in keywords}
        return kind._from_config(
            config, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype, **attention
        ).eval()

    return made


def _of_diffusers(load: Any) -> Any:
    """`from_pretrained` of a class of diffusers: from the configuration of a published model, where that is known."""

    def made(kind: Any, name: Any, *given: Any, **keywords: Any) -> Any:
        from loadgauge.pytorch.capture.inputs.libraries import library_keys, of_library

        keys = library_keys(str(name)) if of_library(str(name)) else {}
        if keys.get("_class_name") != kind.__name__:
            return load(kind, name, *given, **keywords)
        model = kind.from_config(
            {key: value for key, value in keys.items() if not key.startswith("_") and key != "library"}
        )
        dtype = keywords.get("torch_dtype") or keywords.get("dtype")
        return (model if dtype is None else model.to(dtype)).eval()

    return made
