"""Pictures of any size: what a model's own image processor makes of them.

The processor of transformers is run on blank pictures, so that its rule (patches, merging, tiles) is written nowhere else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from loadgauge.core.base import ConfigError, NotModelled, first_line, read_table
from loadgauge.pytorch.capture.symbols.values import known

VALUES = 16_384
"""Integers of a sequence's pictures that keep their values; more are masks of pixels, which are left out."""


class Given(msgspec.Struct, frozen=True):
    """An argument that a processor makes of the pictures of one sequence."""

    shape: tuple[int, ...]
    axis: int
    """Along which sequences lie."""
    values: Any = None
    """Nested integers; None: floating point, of which nothing is known."""

    def tensor(self, device: str, dtype: torch.dtype, b: Any) -> torch.Tensor:
        """The argument for b sequences with the same pictures."""
        if self.values is not None:
            return known(_repeated(self.values, self.axis, int(b)), device)
        shape = [size * b if axis == self.axis else size for axis, size in enumerate(self.shape)]
        return torch.empty(shape, dtype=dtype, device=device)


def _repeated(values: Any, axis: int, times: int) -> Any:
    return values * times if axis == 0 else [_repeated(one, axis - 1, times) for one in values]


class Pictures(msgspec.Struct, frozen=True):
    """What stands for the pictures of one sequence: arguments by name. count: how many pictures they are"""

    given: Mapping[str, Given] = {}
    count: int = 1


def processed(config: Any, sizes: Sequence[tuple[int, int]], own: Mapping[str, Any] | None = None) -> Pictures:
    """Return what a model's image processor makes of a sequence's pictures, by argument.

    sizes: width and height of each [pixels]; own: keys of its `preprocessor_config.json`, in place of what follows from the config
    Raises ConfigError for a model without an image processor, and NotModelled where the pictures make no tensors.
    """
    processor = _processor(config, own)
    try:
        import numpy as np
        from PIL import Image
    except ImportError:
        raise ConfigError("pictures need Pillow: pip install pillow") from None

    def of(sequences: int) -> dict[str, Any]:
        pictures = [[Image.new("RGB", size) for size in sizes] for _ in range(sequences)]
        for kind in ("pt", None):
            try:
                found = processor(images=pictures, return_tensors=kind)
                return {name: _array(np, one) for name, one in found.items()}
            except (ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
                why = first_line(error)[:160]
        shown = ",".join(f"{width}x{height}" for width, height in sizes)
        raise NotModelled(f"{config.model_type}: its image processor takes no {shown}: {why}")

    one, two = of(1), of(2)
    found: dict[str, Given] = {}
    for name, array in one.items():
        other = two.get(name)
        if array is None or other is None or array.ndim != other.ndim:
            continue
        axis = next((at for at, size in enumerate(array.shape) if size != other.shape[at]), None)
        whole = array.dtype.kind in "iub"
        if axis is not None and not (whole and array.size > VALUES):
            found[name] = Given(array.shape, axis, array.tolist() if whole else None)
    return Pictures(found, len(sizes))


def _array(np: Any, value: Any) -> Any:
    """Numbers as an array; None for what is ragged, or no numbers."""
    try:
        made = np.stack([np.asarray(one) for one in value]) if isinstance(value, list | tuple) else np.asarray(value)
    except (ValueError, RuntimeError, TypeError):
        return None
    return made if made.dtype.kind in "iubf" else None


def _processor(config: Any, own: Mapping[str, Any] | None) -> Any:
    import transformers
    from transformers.models.auto import image_processing_auto

    kind, table = config.model_type, read_table("capture/pictures.toml")
    known: Any = vars(image_processing_auto)["IMAGE_PROCESSOR_MAPPING_NAMES"]
    names = known.get(table["processor"].get(kind, kind)) or {}
    name = names.get("pil") or names.get("torchvision")
    if name is None:
        raise ConfigError(f"transformers has no image processor for {kind!r}: no pictures of any size")
    try:
        made = getattr(transformers, name)
        if own is not None:
            return made(**own)
        return made(**_settings(made, config), **table["told"].get(kind, {}))
    except ImportError as error:
        lacks = next((one for one in ("torchvision", "pytesseract") if one in str(error).lower()), "a library")
        raise ConfigError(f"pictures of {kind} need {lacks}: pip install {lacks}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise NotModelled(f"{name}: {first_line(error)[:200]}") from None


def _settings(made: Any, config: Any) -> dict[str, Any]:
    """Settings of a processor's class that follow from the config."""
    table = read_table("capture/pictures.toml")
    found: dict[str, Any] = {}
    for name, keys in table["settings"].items():
        old, value = getattr(made, name, None), _first(config, keys)
        if old is None or value is None:
            continue
        if name == "image_grid_pinpoints":
            found[name] = [list(one) for one in value]
            continue
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int):
            if name == "patch_size" and (unit := _of(table["units"], made)):
                value *= _first(config, unit) or 1
            found[name] = {"height": value, "width": value} if isinstance(old, dict) else value
    side = _first(config, "vision_config.image_size|image_size")
    side = side[0] if isinstance(side, list | tuple) else side
    if isinstance(side, int):
        for name in ("size", "crop_size"):
            old = getattr(made, name, None)
            keys = set(old) if isinstance(old, dict) else set()
            if keys in ({"height", "width"}, {"shortest_edge"}):
                found[name] = dict.fromkeys(keys, side)
        for name, times in (_of(table["longest"], made) or {}).items():
            found[name] = {"longest_edge": side * times}
    return found


def _of(rows: Mapping[str, Any], made: Any) -> Any:
    """The row of a processor's class, by how its name begins."""
    return next((row for name, row in rows.items() if made.__name__.startswith(f"{name}Image")), None)


def _first(config: Any, keys: str) -> Any:
    for path in keys.split("|"):
        found = config
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found
    return None
