"""How a model is trained: number formats, optimizer, loss, adapters, and the framework whose defaults decide the rest."""

from __future__ import annotations

from typing import Literal, TypeVar, get_args, get_type_hints

import msgspec

from loadgauge.errors import ConfigError, NotModelled, closest
from loadgauge.spec.frameworks import FRAMEWORKS, LOW_PRECISIONS, Framework
from loadgauge.spec.kernels import Dtypes, Kernels
from loadgauge.spec.lora import Lora
from loadgauge.spec.model import ModelSpec, Moe
from loadgauge.spec.optimizers import OPTIMIZERS, Optimizer
from loadgauge.spec.overlap import Overlap
from loadgauge.spec.precision import ALIASES, PRECISIONS, Precision


def _precision(framework: Framework, name: str) -> Precision:
    """Return the recipe of that name in this framework. Raises `ConfigError` or `NotModelled`."""
    if name in ("bf16", "fp16"):
        name = name + framework.precision[4:]
    name = ALIASES.get(name, name)
    if name in PRECISIONS:
        return PRECISIONS[name]
    own = dict(framework.low_precisions)
    if name in own:
        return msgspec.structs.replace(
            PRECISIONS[framework.precision], name=name, products=own[name], source=own[name].source
        )
    low = {known: None for recipes in LOW_PRECISIONS.values() for known in recipes}
    choose({**PRECISIONS, **low, **ALIASES}, name, "precision")
    where = " and ".join(other for other, recipes in LOW_PRECISIONS.items() if name in recipes)
    why = (
        f"it has {', '.join(own)}"
        if own
        else "8-bit products reach it through several libraries, which keep different tensors"
    )
    raise NotModelled(f"precision {name!r} is modelled for {where}, not for {framework.name}: {why}")


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a run that is neither the model nor the layout.

    offload: `optimizer` moves optimizer states (and the master weights) to the host, `all` the weights as well.
    """

    framework: Framework
    precision: Precision
    optimizer: Optimizer
    kernels: Kernels
    overlap: Overlap = Overlap()
    lora: Lora | None = None
    offload: Literal["none", "optimizer", "all"] = "none"

    def check(self, model: ModelSpec) -> None:
        """Raise `ConfigError` where the training cannot be applied to the model."""
        routed = any(isinstance(block.mlp, Moe) for block in model.blocks)
        if self.lora is not None and self.lora.experts_only and not routed:
            raise ConfigError(f"{model.name} has no routed experts, and a base in {self.lora.quantised} is of those")


T = TypeVar("T")
LOSSES = get_args(get_type_hints(Kernels)["loss"])
"""How a loss may run: `Kernels.loss`."""


def choose(table: dict[str, T], name: str, what: str) -> T:
    """Look up a name in a table. Raises `ConfigError` that lists the known names and the closest one."""
    try:
        return table[name]
    except KeyError:
        hint = "".join(f"; did you mean {match!r}?" for match in closest(name, table))
        raise ConfigError(f"unknown {what} {name!r} (known: {', '.join(table)}){hint}") from None


def training(
    framework: str = "huggingface",
    precision: str = "bf16",
    optimizer: str = "adamw",
    attention: str = "flash",
    loss: str = "auto",
    lora: Lora | None = None,
    offload: Literal["none", "optimizer", "all"] = "none",
) -> Training:
    """Return how to train, from the names that the command line takes. Raises `ConfigError` for an unknown one.

    precision: a recipe's name, `bf16` / `fp16` for the framework's usual recipe of that format, or one of
        `LOW_PRECISIONS` (`fp8` is `fp8-tensorwise`); one that the framework does not have raises `NotModelled`
    loss: `auto` (the framework's), `chunked:N`, or one of `LOSSES`

    >>> training("megatron", "bf16").precision.name
    'bf16-mixed-18'
    >>> training("megatron", "fp8-blockwise").precision.products.element
    1.03125
    """
    chosen = choose(FRAMEWORKS, framework, "framework")
    recipe = _precision(chosen, precision)
    if recipe.products is not None and lora is not None and lora.stored is not None:
        raise NotModelled(f"products in {recipe.name} on a base stored in 4 bits, which is made in 16 bits to be read")
    if attention not in ("eager", "flash"):
        raise ConfigError(f"unknown attention {attention!r} (known: eager, flash)")
    kind, _, chunks = loss.partition(":")
    if kind == "auto":
        kind = chosen.kernels.loss
    if kind not in LOSSES or (chunks and (kind != "chunked" or not chunks.isdecimal())):
        raise ConfigError(f"unknown loss {loss!r} (known: auto, {', '.join(LOSSES)}, chunked:N)")
    if chunks and not 1 <= int(chunks) <= 4096:
        raise ConfigError(f"loss {loss!r}: from 1 to 4096 chunks")
    autocast = recipe.autocast and chosen.casts == "autocast"
    kernels = msgspec.structs.replace(
        chosen.kernels,
        attention=attention,
        loss=kind,
        loss_chunks=int(chunks or chosen.kernels.loss_chunks),
        softmax_float32=chosen.kernels.softmax_float32 or autocast,
        products=recipe.products,
        dtypes=Dtypes(activation=recipe.activation, residual=4 if autocast else None),
    )
    return Training(
        framework=chosen, precision=recipe, optimizer=choose(OPTIMIZERS, optimizer, "optimizer"),
        kernels=kernels, overlap=chosen.overlap, lora=lora, offload=offload,
    )  # fmt: skip
