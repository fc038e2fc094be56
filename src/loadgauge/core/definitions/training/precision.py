"""Number formats of training: bytes of each part of a parameter, and the 8- and 4-bit recipes of matrix products."""

from typing import Literal

import msgspec

from loadgauge.core.definitions.model.kernels import LowPrecision


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per parameter, by part, and bytes per activation element.

    weight: the weights as the framework holds them; compute: as the matrix products read them
    frozen: weights that are not trained, where they are held otherwise (0: as the rest)
    gradient: the buffer that gradients accumulate in; main_gradient: an additional float32 copy of 16-bit gradients
    master: additional float32 weights of 16-bit ones; moment: one optimizer moment
    reduction: of what gradients are reduced in under FSDP (0: the buffer's)
    casts: who makes 16-bit copies of wider weights, where that is not the framework's usual way (`Framework.casts`)
    wrapped: forward runs under autocast, whatever the weights are; some operations then give float32 (layer norms)
    products: the 8- or 4-bit recipe of the blocks' matrix products; the rest of the record is that of everything else
    ZeRO-1 shards main_gradient, master and moments; ZeRO-2 the gradients too; ZeRO-3 all of it.
    """

    name: str
    weight: int
    compute: int
    gradient: int
    frozen: int = 0
    main_gradient: int = 0
    master: int = 0
    moment: int = 4
    activation: int = 2
    reduction: int = 0
    casts: Literal["", "autocast", "fsdp"] = ""
    wrapped: bool = False
    products: LowPrecision | None = None
    source: str = "rajbhandari2019"

    @property
    def reduced(self) -> int:
        """Bytes of a gradient element as FSDP reduces it."""
        return self.reduction or self.gradient

    @property
    def autocast(self) -> bool:
        """Return whether matrix products read 16-bit copies of float32 weights."""
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
        # transformers' Trainer: autocast over weights that are bf16 already, and no copy of them in float32.
        Precision(
            name="bf16-autocast-8", weight=2, compute=2, gradient=2, moment=2, wrapped=True, source="transformers"
        ),
        # accelerate makes what is trained float32 before FSDP shards it; products and reductions are in 16 bits.
        Precision(
            name="bf16-fsdp-16",
            weight=4,
            compute=2,
            gradient=4,
            reduction=2,
            casts="fsdp",
            wrapped=True,
            source="transformers",
        ),
        Precision(
            name="fp16-fsdp-16",
            weight=4,
            compute=2,
            gradient=4,
            reduction=2,
            casts="fsdp",
            wrapped=True,
            source="transformers",
        ),
        Precision(name="bf16-pure", weight=2, compute=2, gradient=2, moment=2, source="pytorch"),
        Precision(name="fp16-pure", weight=2, compute=2, gradient=2, moment=2, source="pytorch"),
    )
}


def _transformer_engine(
    format: Literal["fp8", "fp4"], element: float, weight_element: float, shares: bool = True
) -> LowPrecision:
    return LowPrecision(
        format=format,
        element=element,
        weight_element=weight_element,
        keeps=True,
        shares=shares,
        weights="beside",
        source="transformer-engine",
    )


def _torchao(element: float, *, gathers: bool = False, weight_gradient: bool = True) -> LowPrecision:
    return LowPrecision(
        format="fp8",
        element=element,
        weight_element=element,
        keeps=False,
        weights="within",
        gathers=gathers,
        weight_gradient=weight_gradient,
        source="torchao",
    )


# Transformer Engine keeps an input as the gradient of the weight will read it, by columns, and caches each weight by rows
# and by columns over the micro-batches; those of one scale a tensor are of Hopper, where the two are different bytes.
TRANSFORMER_ENGINE = {
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
"""Recipes of Transformer Engine's linear layers."""

# Autograd keeps the 16-bit input, and every product quantises what it reads.
TORCHAO = {
    "fp8-tensorwise": _torchao(1, gathers=True),
    "fp8-rowwise": _torchao(1),
    "fp8-rowwise_with_gw_hp": _torchao(1, weight_gradient=False),
    "mxfp8": _torchao(1 + 1 / 32),
    "fp8-delayed": TRANSFORMER_ENGINE[
        "fp8-delayed"
    ],  # Transformer Engine's modules under FSDP, as llm-foundry has them
}
"""Recipes of PyTorch's own 8-bit products."""
ALIASES = {"fp8": "fp8-tensorwise"}
"""Short names of recipes."""
