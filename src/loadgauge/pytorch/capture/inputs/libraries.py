"""Models of diffusers, timm and torchvision as targets: `LIBRARY:NAME`, or a diffusers `config.json`, built without weights."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from loadgauge.core.base.errors import ConfigError, NotModelled, closest, first_line, refuse
from loadgauge.core.base.files import read_start
from loadgauge.core.base.package_data import read_table
from loadgauge.core.base.units import gib, parse_count
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.families.encoders import pictures as of_pictures
from loadgauge.core.families.hf import LARGEST_FILE, decode

if TYPE_CHECKING:
    from loadgauge.pytorch.trace.programs.training import Sized
    from loadgauge.pytorch.trace.torch_run import TorchRun

LIBRARIES = ("diffusers", "timm", "torchvision")
OWN = "recommenders"
"""The library of the modules that are written here."""
_CLASS = "_class_name"
"""The key of a diffusers config that names its class."""


def of_library(target: str) -> bool:
    """Return whether a target is a library and a name in it, or the name of a published model without a family.

    >>> of_library("timm:resnet50"), of_library("black-forest-labs/FLUX.1-dev"), of_library("gpt2"), of_library("train.py:model")
    (True, True, False, False)
    """
    library, colon, name = target.partition(":")
    if library.lower() in _own():
        return True
    return bool(name) and library in LIBRARIES if colon else published(target) is not None


def published(name: str) -> str | None:
    """Return what a published model, of diffusers or of transformers, is called in the table, by its repository with its owner or
    without; None where it is not there.

    >>> published("wan-ai/wan2.1-t2v-14b-diffusers"), published("FLUX.1-dev"), published("gpt2")
    ('wan2.1-14b', 'flux.1-dev', None)
    """
    wanted = name.lower()
    return next(
        (
            key
            for key, row in _named().items()
            if any(f"/{word}".endswith(f"/{wanted}") for word in (key, *row["_also"].lower().split()))
        ),
        None,
    )


def _own() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = _table()[OWN]
    return rows


def _recommender(target: str) -> dict[str, Any]:
    """The keys of a recommender: those of its name, and what stands behind it.

    >>> {name: value for name, value in _recommender("dlrm:tables=8,rows=1M,pool=4").items() if name in ("rows", "ids")}
    {'rows': 8000000, 'ids': 32}
    """
    name, _, words = target.lower().partition(":")
    keys = dict(_own()[name])
    for word in filter(None, words.split(",")):
        key, _, value = word.partition("=")
        if key not in keys or key.startswith("_"):
            sizes = ", ".join(key for key in keys if not key.startswith("_"))
            raise ConfigError(f"{target}: {key} is none of {sizes}: {name}:rows=10M", key="model")
        several = [int(parse_count(part, "model")) for part in value.split("-")]
        keys[key] = several if isinstance(keys[key], list) and key in ("bottom", "top") else several[0]
    tables = keys.get("tables", 1)
    rows, pool = keys["rows"], keys.get("pool", 1)
    keys["rows"] = sum(rows) if isinstance(rows, list) else rows * tables
    keys["ids"] = sum(pool) if isinstance(pool, list) else pool * tables
    return {"library": OWN, **keys}


def _named() -> dict[str, dict[str, Any]]:
    table = _table()
    return {**table["named"], **table["transformers"]}


def library_keys(target: str) -> dict[str, Any]:
    """What stands for the config of `LIBRARY:NAME`. Raises ConfigError where the library is not installed, or its class not known.

    >>> library_keys("diffusers:Unknown")
    Traceback (most recent call last):
    loadgauge...ConfigError: diffusers:Unknown: what it is trained on is not known; capture script.py:function with --inputs
    """
    if target.partition(":")[0].lower() in _own():
        return _recommender(target)
    library, _, name = target.partition(":") if ":" in target else ("diffusers", "", target)
    keys = {"library": library, _CLASS: name}
    if library == "diffusers" and (known := published(name)):
        row = _named()[known]
        if "model_type" in row:
            return {key: value for key, value in row.items() if key != "_also"}
        keys |= row
    _row(keys, target)
    _needs(library)
    return keys


def is_library(keys: Mapping[str, Any]) -> bool:
    """Return whether keys are of a model of one of these libraries."""
    return "library" in keys or (isinstance(keys.get(_CLASS), str) and "model_type" not in keys)


def usual_sizes(keys: Mapping[str, Any], target: str) -> dict[str, int]:
    """The sizes of a model's inputs unless they are said, beside b. Raises ConfigError for a class that is not known.

    A name that ends with the side of its pictures says so, as timm's do.

    >>> usual_sizes({"library": "timm", "_class_name": "vit_base_patch16_384"}, "timm:vit_base_patch16_384")
    {'h': 384, 'w': 384}
    """
    found = dict(keys.get("_sizes") or _row(keys, target)["sizes"])
    side = re.search(r"_(\d{3})(\.|$)", keys[_CLASS]) if keys.get("library") == "timm" else None
    return dict.fromkeys(found, int(side[1])) if side else found


def latents(target: str, pictures: str, video: str) -> str:
    """Return the sizes of a diffusion model's latents that pictures or a video [pixels] make, as text; empty for other models.

    Raises ConfigError.
    """
    if not (pictures or video) or not (target.endswith(".json") or of_library(target)):
        return ""
    keys = library_keys(target) if of_library(target) else decode(read_start(target, LARGEST_FILE), target)
    if not is_library(keys):
        return ""
    row = _row(keys, target)
    ((frames, width, height),) = list(of_pictures.read_pictures(video or pictures, "video" if video else "pictures"))[
        :1
    ]
    side, step = keys.get("_scale") or row.get("scale", (8, 4))
    sizes = {"h": height // side, "w": width // side} | ({"f": (frames - 1) // step + 1} if "f" in row["sizes"] else {})
    return ",".join(f"{name}={size}" for name, size in sizes.items())


class Encoders(msgspec.Struct, frozen=True):
    """Frozen parts of a diffusion model that stay on the card: their bytes, FLOPs for each sample, and in words; those left out."""

    nbytes: int = 0
    flops: float = 0.0
    words: str = ""
    cached: str = ""


NO_ENCODERS = Encoders()


def encoders(keys: Mapping[str, Any], target: str, which: str, sizes: str) -> Encoders:
    """Return what encodes pictures and texts. which: `Job.encoders`; sizes: of latents, as text. Raises ConfigError.

    >>> encoders({"_class_name": "UNet2DConditionModel", "_vae": "kl-4", "_texts": ["clip-l"]}, "", "all", "").words
    'VAE kl-4 0.2 GiB, clip-l 0.2 GiB'
    """
    names = {"vae": [keys["_vae"]] if "_vae" in keys else [], "texts": keys.get("_texts", [])}
    taken = {"cached": (), "all": ("vae", "texts")}.get(which, (which,))
    if any(not names[kind] for kind in taken):
        raise ConfigError(
            f"{target}: which they are is known of published models: {', '.join(_table()['named'])}", key="encoders"
        )
    number = usual_sizes(keys, target) | {name: int(size) for name, size in re.findall(r"(\w)=(\d+)", sizes)}
    side, step = keys.get("_scale") or _row(keys, target).get("scale", (8, 4))
    seen = number.get("h", 0) * number.get("w", 0) * side**2 * (1 + (number.get("f", 1) - 1) * step)
    nbytes, flops = 0, 0.0
    words: dict[bool, list[str]] = {True: [], False: []}
    for kind, parts in names.items():
        for name in parts:
            part = _table()["parts"][name]
            own = part["parameters"] * part.get("itemsize", 2)
            words[kind in taken].append(f"{'VAE ' if kind == 'vae' else ''}{name} {gib(own, 1)}")
            if kind in taken:
                nbytes += own
                flops += (
                    part["flops"] * seen if kind == "vae" else 2 * (part["parameters"] - part["table"]) * number["s"]
                )
    return Encoders(nbytes, flops, ", ".join(words[True]), ", ".join(words[False]))


def usual_fields(job: Job, keys: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Fields of a job as its trainers have them, where they are not said: with adapters diffusers' scripts, of tables torchrec.

    >>> usual_fields(Job(model="sdxl", lora_rank=4), {"_class_name": "UNet2DConditionModel"})
    (('lora_targets', 'to_k,to_q,to_v,to_out.0'), ('lora_dtype', 'bfloat16'), ('weights', 'auto'))
    """
    usual: dict[str, Any] = {}
    if keys.get("library") == OWN:
        usual = {
            "optimizer": "rowwise-adagrad",
            "precision": "fp32",
            "ep": job.gpus or 1,
            "seq_len": 200 if "layers" in keys else None,
        }
    elif keys.get("library", "diffusers") != "diffusers":
        usual = {"precision": usual_precision(keys, "")}
    elif job.adapts:
        narrow = (job.precision or "bf16").startswith("bf16") and not job.qlora and job.weights != "float32"
        usual = {
            "lora_targets": keys.get("_targets") or _table()["usual"]["targets"],
            "lora_dtype": "bfloat16" if narrow else "float32",
            # Frozen weights are in the format of the products.
            **({} if job.qlora or job.precision not in (None, "bf16", "fp16") else {"weights": "auto"}),
        }
    return tuple((name, value) for name, value in usual.items() if value is not None and getattr(job, name) is None)


def _table() -> dict[str, Any]:
    return read_table("capture/libraries.toml")


def usual_precision(keys: Mapping[str, Any], target: str) -> str | None:
    """The precision of a model's training unless it is said; None: as for all others. Raises ConfigError as `usual_sizes`.

    >>> usual_precision({"library": "torchvision", "_class_name": "fcos_resnet50_fpn"}, "")
    'fp32'
    """
    found: str | None = _row(keys, target).get("precision")
    return found


def of_keys(keys: Mapping[str, Any], target: str, run: TorchRun) -> Sized:
    """The training of a model of a library, from its config or its name. Raises ConfigError and NotModelled."""
    import torch

    from loadgauge.pytorch.capture.inputs.inputs import tree
    from loadgauge.pytorch.device.patches import default_dtype
    from loadgauge.pytorch.trace.programs.training import Sized, mean_loss
    from loadgauge.pytorch.trace.torch_run import ATTENTIONS

    library, row = str(keys.get("library", "diffusers")), _row(keys, target)
    if library != OWN:
        _needs(library)
    refuse(
        "precision" in row and run.dtype is not torch.float32,
        f"{target}: --precision: its operations on boxes take no 16-bit weights; fp32 or an autocast",
        NotModelled,
    )
    check_attention(keys, target, ATTENTIONS[run.training.kernels.attention] == "sdpa")
    recompute = run.layout.recompute.mode != "none"
    refuse(
        recompute and library == "torchvision", f"{target}: --recompute: torchvision's models have none", NotModelled
    )
    loss = mean_loss if row["loss"] == "own" else functools.partial(_loss, row["loss"])
    config: dict[str, Any] = {}

    def build(device: str) -> Any:
        with default_dtype(run.dtype), torch.device(device), _no_initial_values():
            module, read = _made(library, keys, target)
        config.clear()
        config.update(read)
        if recompute:
            if library == "diffusers":
                module.enable_gradient_checkpointing()
            else:
                module.set_grad_checkpointing(True)
        return module.train()

    def inputs(device: str, module: Any, **sizes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first = next(module.parameters()).dtype
        dtype = first if first.is_floating_point else run.dtype  # packed matrices have none
        given = tree(row["inputs"], config, device, dtype, sizes, keys[_CLASS]) or {}
        return (tuple(given.values()), {}) if library not in ("diffusers", OWN) else ((), given)

    rows = {"": row["rows"]} if "rows" in row else {}
    notes = (row["note"],) if "note" in row else ()
    return Sized(build, inputs, loss, run, ("b", *row.get("free", ()), *row["sizes"]), rows=rows, notes=notes)


def check_attention(keys: Mapping[str, Any], target: str, usual: bool) -> None:
    """Raise NotModelled for another attention than the one that a library's model calls.

    >>> check_attention({"library": "timm"}, "timm:vit", usual=True)
    """
    if not usual:
        library = keys.get("library", "diffusers")
        raise NotModelled(f"{target}: --attention: a model of {library} has the kernel that it calls")


def _made(library: str, keys: Mapping[str, Any], target: str) -> tuple[Any, dict[str, Any]]:
    """A model and the keys of its config."""
    name = keys[_CLASS]
    if library == OWN:
        from loadgauge.pytorch.capture.inputs import recommenders

        return getattr(recommenders, name)(
            **{key: value for key, value in keys.items() if key not in ("library", _CLASS)}
        ), dict(keys)
    try:
        if library != "diffusers":
            from loadgauge.pytorch.device.kernels.vision_ops import torchvision

            torchvision()  # timm is made with it
        module = import_module(library)
        if library == "timm":
            return module.create_model(name, pretrained=False), {}
        if library == "torchvision":
            builder = module.models.get_model_builder(name)
            taken = inspect.signature(builder).parameters
            if builder.__module__.startswith("torchvision.models.detection"):  # with and without weights they differ
                import torch

                from loadgauge.pytorch.device.kernels.streams import answering
                from loadgauge.pytorch.device.patches import replaced

                # Weights that torchvision would download are neither fetched nor put into a model: it is built as it is for them.
                weights: Any = import_module("torchvision.models._api").WeightsEnum
                empty = answering({})
                with replaced((weights, "get_state_dict", empty), (torch.nn.Module, "load_state_dict", empty)):
                    return module.models.get_model(name, weights="DEFAULT"), {}
            none = dict.fromkeys({"weights", "weights_backbone"} & set(taken))  # a backbone's would be downloaded
            return module.models.get_model(name, **none), {}
        kind = getattr(module, name)
        given = {key: value for key, value in keys.items() if key != "library" and not key.startswith("_")}
        made = kind.from_config(given)
        return made, dict(made.config)
    except (ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ConfigError(f"{target}: {first_line(error)[:200]}") from None


def _loss(kind: str, result: Any) -> Any:
    """A scalar of what a model returns: against noise, or of classes; of every result where it returns a dictionary of them."""
    import torch
    from torch.nn import functional
    from torch.utils._pytree import tree_leaves

    found = next(one for one in tree_leaves(getattr(result, "sample", result)) if isinstance(one, torch.Tensor))
    if kind == "mse":
        return functional.mse_loss(found.float(), torch.empty_like(found, dtype=torch.float32))
    if isinstance(result, dict) and found.dim() == 4:  # classes of each pixel, torchvision's
        labels = torch.empty((found.shape[0], *found.shape[2:]), dtype=torch.long, device=found.device)
        return sum(functional.cross_entropy(one, labels) for one in result.values())
    rows = found.flatten(0, -2) if found.dim() > 1 else found[None]
    return functional.cross_entropy(rows, torch.empty(rows.shape[:1], dtype=torch.long, device=rows.device))


@contextlib.contextmanager
def _no_initial_values() -> Iterator[None]:
    """Random numbers of weights are not drawn, and what truncates them does not loop."""
    import torch

    from loadgauge.pytorch.device.patches import RANDOM, replaced

    names = (name for name in RANDOM if hasattr(torch.nn.init, name))
    with replaced(*((torch.nn.init, name, lambda tensor, *_, **__: tensor) for name in names)):
        yield


def _row(keys: Mapping[str, Any], target: str) -> dict[str, Any]:
    table = _table()
    library = str(keys.get("library", "diffusers"))
    if library == OWN:
        return dict(_own()[f"_{keys[_CLASS]}"])
    found = table[library] if library != "diffusers" else table[library].get(keys[_CLASS])
    for part in (found or {}).values() if library != "diffusers" else ():
        if isinstance(part, dict) and "names" in part and re.search(part["names"], keys[_CLASS]):
            found = part
    if found is None:
        near = closest(str(keys[_CLASS]), list(table[library]))
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"{target}: what it is trained on is not known{hint}; capture script.py:function with --inputs"
            if not hint
            else f"{target}: what it is trained on is not known{hint}"
        )
    row: dict[str, Any] = found
    return row


def _needs(library: str) -> None:
    refuse(find_spec(library) is None, f"needs {library}: pip install {library}")
