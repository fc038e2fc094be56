"""How a model is trained: number formats, optimizer, loss, adapters, and the framework whose habits decide the rest."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar, get_args, get_type_hints

import msgspec

from loadgauge.errors import ConfigError, NotModelled
from loadgauge.spec.kernels import Dtypes, Kernels, LowPrecision
from loadgauge.spec.lora import Lora
from loadgauge.spec.model import ModelSpec, Moe
from loadgauge.spec.overlap import Overlap


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per parameter, by part, and bytes per activation element.

    weight: the weights as the framework holds them; compute: as the matrix products read them
    gradient: where gradients gather over the step; main_gradient: a second, float32 copy beside 16-bit gradients
    master: float32 weights beside 16-bit ones; moment: one optimizer moment
    products: the 8- or 4-bit recipe of the blocks' matrix products, in which the rest of the record is of all else
    ZeRO-1 shards main_gradient, master and moments; ZeRO-2 the gradients too; ZeRO-3 all of it.
    """

    name: str
    weight: int
    compute: int
    gradient: int
    main_gradient: int = 0
    master: int = 0
    moment: int = 4
    activation: int = 2
    products: LowPrecision | None = None
    source: str = "rajbhandari2019"

    @property
    def autocast(self) -> bool:
        """Whether matrix products read 16-bit copies of float32 weights."""
        return self.compute != self.weight


PRECISIONS: dict[str, Precision] = {
    recipe.name: recipe
    for recipe in (
        Precision(name="fp32", weight=4, compute=4, gradient=4, activation=4, source="megatron-lm"),
        Precision(name="bf16-mixed-16", weight=2, compute=2, gradient=2, master=4),
        Precision(name="fp16-mixed-16", weight=2, compute=2, gradient=2, master=4),
        Precision(name="bf16-mixed-18", weight=2, compute=2, gradient=4, master=4, source="megatron-lm"),
        Precision(name="fp16-mixed-18", weight=2, compute=2, gradient=4, master=4, source="megatron-lm"),
        Precision(name="bf16-mixed-20", weight=2, compute=2, gradient=2, main_gradient=4, master=4, source="smith2022"),
        Precision(name="fp16-mixed-20", weight=2, compute=2, gradient=2, main_gradient=4, master=4, source="smith2022"),
        Precision(name="bf16-autocast", weight=4, compute=2, gradient=4, source="pytorch"),
        Precision(name="fp16-autocast", weight=4, compute=2, gradient=4, source="pytorch"),
        Precision(name="bf16-pure", weight=2, compute=2, gradient=2, moment=2, source="pytorch"),
    )
}


def _transformer_engine(
    format: Literal["fp8", "fp4"], element: float, weight_element: float, shares: bool = True
) -> LowPrecision:
    return LowPrecision(
        format=format, element=element, weight_element=weight_element,
        keeps=True, shares=shares, weights="beside", source="transformer-engine",
    )  # fmt: skip


def _torchao(element: float, *, gathers: bool = False, weight_gradient: bool = True) -> LowPrecision:
    return LowPrecision(
        format="fp8", element=element, weight_element=element, keeps=False, weights="within",
        gathers=gathers, weight_gradient=weight_gradient, source="torchao",
    )  # fmt: skip


# Transformer Engine keeps an input as the gradient of the weight will read it, by columns, and caches each weight by rows
# and by columns over the micro-batches; those of one scale a tensor are of Hopper, where the two are different bytes.
_MEGATRON = {
    # The one scale a tensor is neglected; only with delayed scaling can no input be quantised again in backward.
    "fp8-tensorwise": _transformer_engine("fp8", 1, 1),
    "fp8-delayed": _transformer_engine("fp8", 1, 1, shares=False),
    # A float32 scale for 1 x 128 elements of an activation, and for 128 x 128 of a weight.
    "fp8-blockwise": _transformer_engine("fp8", 1 + 4 / 128, 1 + 4 / 128**2),
    # An 8-bit power of two for each 32 elements.
    "mxfp8": _transformer_engine("fp8", 1 + 1 / 32, 1 + 1 / 32),
    # An 8-bit scale for each 16 elements, of weights too: a scale of 16 x 16 is written once a row.
    "nvfp4": _transformer_engine("fp4", 1 / 2 + 1 / 16, 1 / 2 + 1 / 16),
}
LOW_PRECISIONS: dict[str, dict[str, LowPrecision]] = {
    "megatron": {
        **_MEGATRON,
        **{f"{name}-primary": msgspec.structs.replace(low, weights="instead", gathers=True)
           for name, low in _MEGATRON.items()},
    },
    # Autograd keeps the 16-bit input, and every product quantises what it reads.
    "torchtitan": {
        "fp8-tensorwise": _torchao(1, gathers=True),
        "fp8-rowwise": _torchao(1),
        "fp8-rowwise_with_gw_hp": _torchao(1, weight_gradient=False),
        "mxfp8": _torchao(1 + 1 / 32),
        "fp8-delayed": _MEGATRON["fp8-delayed"],  # Transformer Engine's modules under FSDP, as llm-foundry has them
    },
}  # fmt: skip
"""Recipes of 8 and 4 bits by framework and name, on top of the framework's 16-bit recipe.

`-primary` holds the weights in 8 or 4 bits and not in 16 too (Megatron's `--fp8-param-gather`, with
`--reuse-grad-buf-for-mxfp8-param-ag` for MXFP8). In 16 bits remain attention itself, norms, the router, the embedding,
the head and adapters.
"""
ALIASES = {"fp8": "fp8-tensorwise"}


def _precision(framework: Framework, name: str) -> Precision:
    """A recipe by its name, as this framework means it."""
    if name in ("bf16", "fp16"):
        name = name + framework.precision[4:]
    name = ALIASES.get(name, name)
    if name in PRECISIONS:
        return PRECISIONS[name]
    own = LOW_PRECISIONS.get(framework.name, {})
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


class Optimizer(msgspec.Struct, frozen=True, kw_only=True):
    """Optimizer state. `moments` of `Precision.moment` bytes each, or of `moment_bytes` where the optimizer decides.

    `factored`: one row and one column of float32 for each matrix instead of a moment (Adafactor).
    `matrix_moments`: moments of the matrices of the blocks, where they differ from the rest's (Muon).
    """

    name: str
    moments: int
    matrix_moments: int | None = None
    moment_bytes: float | None = None
    factored: bool = False
    source: str = "rajbhandari2019"


OPTIMIZERS: dict[str, Optimizer] = {
    optimizer.name: optimizer
    for optimizer in (
        Optimizer(name="adamw", moments=2),
        # One byte a moment and a float32 scale for each block of 256.
        Optimizer(name="adamw-8bit", moments=2, moment_bytes=1 + 4 / 256, source="dettmers2021"),
        Optimizer(name="adafactor", moments=0, factored=True, source="shazeer2018"),
        # Momentum alone for the matrices of the blocks; embeddings, head and vectors stay with AdamW.
        Optimizer(name="muon", moments=2, matrix_moments=1, source="jordan2024"),
        Optimizer(name="lion", moments=1, source="chen2023lion"),
        Optimizer(name="sgd-momentum", moments=1),
        Optimizer(name="sgd", moments=0),
    )
}


class Framework(msgspec.Struct, frozen=True, kw_only=True):
    """A framework's habits, as far as they decide memory.

    precision: its usual 16-bit recipe
    gradients_persist: the gradient buffer exists from the start (Megatron, DeepSpeed), not only from backward on
    ddp_copies: plain data parallelism holds gradients a second time, in communication buckets
    fully_shards: ZeRO 2 and 3 are PyTorch's FSDP2. Both hold weights in shards; stage 2 (`reshard_after_forward=False`)
        keeps each layer gathered from its forward to its backward, stage 3 gathers it for each pass
    unit_gradients: the gradients of a layer are whole, in a buffer, until they are scattered (ZeRO 2 and 3)
    foreach_step: the optimizer step makes a temporary of one weight-sized copy
    float32_step: the optimizer step copies 16-bit gradients to float32
    buckets: elements of each communication bucket under ZeRO; 0: none beyond the gradient buffer
    live_parameters: elements that ZeRO 3 keeps gathered at most, whatever their layer; 0: it gathers layer by layer
    """

    name: str
    kernels: Kernels
    precision: str
    gradients_persist: bool
    ddp_copies: bool = False
    fully_shards: bool = False
    unit_gradients: bool = False
    foreach_step: bool = False
    float32_step: bool = False
    buckets: int = 0
    live_parameters: int = 0
    overlap: Overlap = Overlap()
    source: str

    @property
    def weights_stage(self) -> int:
        """The ZeRO stage from which on weights are held in shards."""
        return 2 if self.fully_shards else 3


TRANSFORMERS = Kernels(
    norm="upcast", softmax_float32=True, repeat_kv=True, views_pin_storage=True, written_mask=True, joint_output=True
)
"""The modules of Hugging Face's transformers, as they are written."""

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework(
            name="huggingface",
            kernels=TRANSFORMERS,
            precision="bf16-mixed-16", gradients_persist=False, ddp_copies=True, fully_shards=True,
            source="transformers",
        ),
        Framework(
            name="megatron",
            kernels=Kernels(
                activation="fused", experts="fused", loss="inplace", vocabulary_multiple=128, gradient_placeholders=True
            ),
            precision="bf16-mixed-18", gradients_persist=True, unit_gradients=True, source="megatron-lm",
        ),
        Framework(
            name="torchtitan",
            kernels=Kernels(keep_gathered=True, views_pin_storage=True),
            precision="bf16-autocast", gradients_persist=False, fully_shards=True, source="pytorch",
        ),
        Framework(
            name="deepspeed",
            kernels=TRANSFORMERS,
            precision="bf16-mixed-16", gradients_persist=True, float32_step=True, buckets=500_000_000,
            live_parameters=10**9, source="rajbhandari2019",
        ),
    )
}  # fmt: skip


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
        """Raises `ConfigError` where it cannot be applied to the model."""
        routed = any(isinstance(block.mlp, Moe) for block in model.blocks)
        if self.lora is not None and self.lora.experts_only and not routed:
            raise ConfigError(f"{model.name} has no routed experts, and a base in {self.lora.quantised} is of those")


MODEL_PARALLEL = ("tp", "pp", "cp", "ep", "etp")
"""Axes that split the model or a sequence over GPUs."""


def default_framework(degrees: Mapping[str, Sequence[int]], *, adapters: bool = False) -> str:
    """The framework where none is named. Every command and function uses this rule.

    `megatron` where the model must be split over GPUs, or may be while all of it is trained; else `huggingface`.

    degrees: for each of `MODEL_PARALLEL` the values that it may have: one where it is settled, several where a search
        is to choose; an axis that is left out is 1
    adapters: whether only adapters are trained

    >>> default_framework({"tp": [1]}), default_framework({"tp": [8]}), default_framework({"tp": [1, 2, 4, 8]})
    ('huggingface', 'megatron', 'megatron')
    >>> default_framework({"tp": [1, 2, 4, 8]}, adapters=True), default_framework({"tp": [2, 4]}, adapters=True)
    ('huggingface', 'megatron')
    """
    axes = [degrees.get(name, (1,)) for name in MODEL_PARALLEL]
    must = any(min(values) > 1 for values in axes)
    may = any(max(values) > 1 for values in axes)
    return "megatron" if must or (may and not adapters) else "huggingface"


T = TypeVar("T")
LOSSES = get_args(get_type_hints(Kernels)["loss"])
"""How a loss may run: `Kernels.loss`."""


def choose(table: dict[str, T], name: str, what: str) -> T:
    try:
        return table[name]
    except KeyError:
        near = difflib.get_close_matches(name, table, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
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
    """How to train, from the words of the command line. Anything unknown raises `ConfigError`.

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
    autocast = recipe.autocast and chosen.name != "torchtitan"
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
