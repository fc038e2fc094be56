"""How a model is trained: number formats, optimizer, loss, adapters, and the framework whose defaults decide the rest."""

from __future__ import annotations

from typing import TypeVar, get_args, get_type_hints

import msgspec

from loadgauge.core.base.errors import ConfigError, NotModelled, closest
from loadgauge.core.definitions.hardware.host import Host
from loadgauge.core.definitions.layout.overlap import Overlap
from loadgauge.core.definitions.model.attention_kernels import ATTENTIONS, FLASH_KERNELS
from loadgauge.core.definitions.model.kernels import Dtypes, Kernels, with_compile, with_liger
from loadgauge.core.definitions.model.lora import Lora
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.around import NOTHING, Around
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS, LOW_NAMES, LOW_PRECISIONS, Framework
from loadgauge.core.definitions.training.optimizers import Optimizer, parse
from loadgauge.core.definitions.training.precision import ALIASES, PRECISIONS, Precision
from loadgauge.core.definitions.training.stacks import (
    ADAPTER_WEIGHTS,
    BRANCHING,
    KEPT_INPUT,
    NEWEST_STACK,
    SHARED_KEYS,
    TABLE_REPLACED,
    Stack,
)

WEIGHTS = ("auto", "float32", "bfloat16", "float16")
"""The dtypes in which weights may be loaded; `auto` is the checkpoint's."""


def _usual(framework: Framework, format: str, weights: str) -> str:
    """Return the recipe that `bf16` or `fp16` means in a framework where whole weights are trained, loaded in this dtype.

    Raises `ConfigError` for 16-bit weights under fp16, whose gradients the scaler refuses.
    """
    if framework.loaded is None:
        return format + framework.precision[4:]
    if weights == "float32":
        return f"{format}-autocast"
    if format == "fp16":
        raise ConfigError(
            f"fp16 scales its gradients, and PyTorch's scaler takes those of float32 weights alone, not of {weights}",
            key="weights",
        )
    return "bf16-autocast-8"


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
    choose({**PRECISIONS, **dict.fromkeys(LOW_NAMES)}, name, "precision")
    where = " and ".join(other for other, recipes in LOW_PRECISIONS.items() if name in recipes)
    why = (
        f"it has {', '.join(own)}"
        if own
        else "8-bit products reach it through several libraries, which keep different tensors"
    )
    raise NotModelled(f"precision {name!r} is modelled for {where}, not for {framework.name}: {why}")


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a run that is neither the model nor the layout.

    offload: `optimizer` moves optimizer states (and the master weights) to the host, `optimizer:0.5` those of half of the
        parameters, `all` the weights as well.
    host: how what is off the card is kept, activations among it
    around: what happens between the steps
    weights: the dtype in which they are loaded, where the recipe follows from it
    ends_apart: FSDP2 shards an embedding and a head that are not tied as units of their own
    reruns_part: a checkpointed layer runs again up to the last tensor that backward needs, not to its end
    tuning: who tuned it, one of `TUNINGS`
    by_sharding: its recipes where weights are whole and where FSDP shards them, if these differ (`under`)
    """

    framework: Framework
    precision: Precision
    optimizer: Optimizer
    kernels: Kernels
    overlap: Overlap = Overlap()
    lora: Lora | None = None
    offload: str = "none"
    host: Host = Host()
    around: Around = NOTHING
    weights: str = ""
    ends_apart: bool = False
    reruns_part: bool = False
    tuning: str = "usual"
    by_sharding: tuple[Precision, Precision] | None = None

    @property
    def offloaded_share(self) -> float:
        """Return the share of the parameters that the host updates.

        >>> training("deepspeed", offload="optimizer:0.4").offloaded_share, training().offloaded_share
        (0.4, 0.0)
        """
        word, _, part = self.offload.partition(":")
        return float(part or word not in ("none", "states"))

    @property
    def copies_outputs(self) -> bool:
        """Return whether the logits that a model returns are copied to float32 while one of its own is kept."""
        autocast = self.precision.autocast or self.precision.wrapped or (self.lora is not None and self.lora.autocast)
        return autocast and self.framework.returns_float32 and self.kernels.loss == "inplace"

    def under(self, zero: int) -> Training:
        """Return the training under a ZeRO stage: accelerate makes weights float32 before FSDP shards them.

        >>> training("huggingface").under(0).precision.name, training("huggingface").under(3).precision.name
        ('bf16-autocast-8', 'bf16-fsdp-16')
        """
        shards = zero >= self.framework.weights_stage
        lora = self.lora
        if lora is not None and lora.autocast and self.framework.fully_shards and lora.sharded != shards:
            return msgspec.structs.replace(self, lora=msgspec.structs.replace(lora, sharded=shards)).under(zero)
        recipe = self._cast_when(shards) if self.by_sharding is None else self.by_sharding[shards]
        if recipe == self.precision:
            return self
        kernels = _kernels(self.framework, recipe, self.kernels, None if self.by_sharding else self.lora)
        return msgspec.structs.replace(self, precision=recipe, kernels=kernels)

    def _cast_when(self, shards: bool) -> Precision:
        """The recipe of autocast where FSDP casts whole parameters as it gathers them, so that forward has none to cast.

        The residual stream is then in 16 bits (source: pytorch, `fully_shard` and its `MixedPrecisionPolicy`).
        """
        recipe = self.precision
        if (
            not (recipe.autocast and self.framework.fully_shards and self.framework.casts == "autocast")
            or recipe.wrapped
        ):
            return recipe
        return msgspec.structs.replace(recipe, casts="fsdp" if shards else "")

    def check(self, model: ModelSpec) -> None:
        """Raise `ConfigError` where the training cannot be applied to the model."""
        routed = model.has_experts
        if self.lora is not None and self.lora.experts_only and not routed:
            raise ConfigError(f"{model.name} has no routed experts, and a base in {self.lora.quantised} is of those")


T = TypeVar("T")
ON_THE_CARD = Host()
"""Nothing off the card but what `offload` names."""
LOSSES = get_args(get_type_hints(Kernels)["loss"])
"""Ways to run a loss: `Kernels.loss`."""


IN_PIECES = ("float32", "plain")
"""Losses that may run over the logits in pieces (`Kernels.loss_pieces`)."""


def spell_loss(training: Training) -> str:
    """Return the loss as `training` reads it.

    >>> spell_loss(training("torchtune")), spell_loss(training("torchtune", loss="float32:1"))
    ('float32', 'float32:1')
    """
    kernels = training.kernels
    if kernels.loss == "chunked":
        return f"chunked:{kernels.loss_chunks}"
    own = kernels.loss_pieces == training.framework.kernels.loss_pieces
    return kernels.loss if own or kernels.loss not in IN_PIECES else f"{kernels.loss}:{kernels.loss_pieces}"


def choose(table: dict[str, T], name: str, noun: str) -> T:
    """Look up a name in a table. Raises `ConfigError` that lists the known names and the closest one."""
    try:
        return table[name]
    except KeyError:
        hint = "".join(f"; did you mean {match!r}?" for match in closest(name, table))
        raise ConfigError(f"unknown {noun} {name!r} (known: {', '.join(table)}){hint}") from None


def training(
    framework: str = "huggingface",
    precision: str = "bf16",
    optimizer: str = "adamw",
    attention: str = "flash",
    loss: str = "auto",
    lora: Lora | None = None,
    offload: str = "none",
    host: Host = ON_THE_CARD,
    kernels: str = "native",
    compiled: bool = False,
    weights: str | None = None,
    checkpoint: str = "bfloat16",
    stack: Stack = NEWEST_STACK,
) -> Training:
    """Return how to train, from the names that the command line takes. Raises `ConfigError` for an unknown one.

    precision: a recipe's name, `bf16` / `fp16` for the framework's usual recipe of that format, or one of
        `LOW_PRECISIONS` (`fp8` is `fp8-tensorwise`); one that the framework does not have raises `NotModelled`
    attention: one of `ATTENTIONS`; `flash` is the kernel that the framework would choose
    loss: `auto` (the framework's), `chunked:N`, or one of `LOSSES`
    kernels: `native`; `liger`: Liger's norms, MLPs and rotations, and its loss unless another one is named; `lora`: adapters
        run inside the functions of the attention and the MLP (axolotl's `lora_*_kernel`, after Unsloth's); `liger-lora`: both
    compiled: layers and loss are torch.compile's
    weights: the dtype they are loaded in, one of `WEIGHTS` (None: the framework's habit, by the releases of `stack`), which
        decides what `bf16` means where a framework trains weights as they are loaded; checkpoint: what `auto` is

    >>> training("megatron", "bf16").precision.name
    'bf16-mixed-18'
    >>> training("huggingface", weights="float32").precision.name
    'bf16-autocast'
    >>> training("megatron", "fp8-blockwise").precision.products.element
    1.03125
    """
    chosen = choose(FRAMEWORKS, framework, "framework")
    if kernels.endswith("lora") and lora is None:
        raise ConfigError("lora are those of adapters; give --lora-rank", key="kernels")
    if kernels.startswith("liger"):
        chosen = msgspec.structs.replace(chosen, kernels=with_liger(chosen.kernels))
    if kernels.endswith("lora"):  # axolotl 0.19, `kernels/swiglu.py`, `kernels/geglu.py`
        in_place = msgspec.structs.replace(chosen.kernels, activation_in_place=True)
        chosen = msgspec.structs.replace(chosen, kernels=in_place)
    if compiled:
        chosen = msgspec.structs.replace(chosen, kernels=with_compile(chosen.kernels))
    loaded, sharded = "", None
    low = ALIASES.get(precision, precision)
    quantised = dict(chosen.low_precisions).get(low) if chosen.loaded is not None else None
    if quantised is not None:
        precision = "bf16"  # the products alone are others
    if weights is not None:
        _has_a_say(chosen, precision, weights)

    def quantise(recipe: Precision) -> Precision:
        if quantised is None:
            return recipe
        return msgspec.structs.replace(recipe, name=low, products=quantised, source=quantised.source)

    if precision in ("bf16", "fp16") and chosen.loaded is not None:
        loaded = loaded_dtype(chosen, weights, checkpoint, stack, scaled=precision == "fp16" and lora is None)
        if lora is None:
            sharded = precision + chosen.sharded[4:] if chosen.sharded else None
            precision = _usual(chosen, precision, loaded)
        elif weights == "float32" and lora.stored is None:
            # Frozen weights of float32, read in 16 bits.
            sharded = precision + chosen.sharded[4:] if chosen.sharded else None
            precision = f"{precision}-autocast"
        elif weights == "float32" and chosen.peft:
            lora = msgspec.structs.replace(lora, upcast="all")  # all that is not quantised is loaded so
    recipe = quantise(_precision(chosen, precision))
    if recipe.products is not None and lora is not None and lora.stored is not None:
        raise NotModelled(f"products in {recipe.name} on a base stored in 4 bits, which is made in 16 bits to be read")
    if attention not in ATTENTIONS:
        raise ConfigError(f"unknown attention {attention!r} (known: {', '.join(ATTENTIONS)})")
    flash = attention if attention in FLASH_KERNELS else ""
    kind, _, chunks = loss.partition(":")
    if kind == "auto":
        kind = chosen.kernels.loss
    in_parts = kind in ("chunked", *IN_PIECES)
    if kind not in LOSSES or (chunks and not (in_parts and chunks.isdecimal())):
        raise ConfigError(f"unknown loss {loss!r} (known: auto, {', '.join(LOSSES)}, chunked:N, float32:N, plain:N)")
    if chunks and not 1 <= int(chunks) <= 4096:
        raise ConfigError(f"loss {loss!r}: give 1 to 4096 chunks")
    pieces = chosen.kernels.loss_pieces
    if chunks and kind in IN_PIECES:
        pieces, chunks = int(chunks), ""
    if lora is not None and lora.quantised in (True, "nf4", "nf4-experts", "nf4-single", "fp4"):
        lora = msgspec.structs.replace(
            lora, keeps_inputs=KEPT_INPUT.at(stack).value == "yes", branching=BRANCHING.at(stack).value == "yes"
        )
    if lora is not None and lora.quantised in (True, "nf4", "nf4-single", "fp4", "int8") and chosen.peft:
        lora = msgspec.structs.replace(lora, experts_stay=chosen.quantises_experts.at(stack).value == "no")
    if lora is not None and chosen.peft:
        cast = recipe.autocast and (recipe.casts or chosen.casts) == "autocast"
        lora = lora.under_peft(
            autocast=cast or recipe.name.startswith(("bf16-mixed", "fp16-mixed")),
            wide=lora.stored is not None or ADAPTER_WEIGHTS.at(stack).value == "float32",
        )
        # Without autocast what float32 norms make stays so, attention and 4-bit layers too (bitsandbytes, Linear4bit.forward).
        wide = recipe.name.endswith("-pure") and lora.upcast == "all" and lora.stored is not None
        recipe = PRECISIONS["fp32"] if wide else recipe
        # The optimizer has no float32 copies of 16-bit weights.
        recipe = msgspec.structs.replace(recipe, master=0, main_gradient=0, moment=recipe.weight)
    elif lora is not None and lora.dora and chosen.engine is not None:
        # PEFT's modules too, without autocast, and in the 16 bits that the engine casts the whole model to.
        lora = msgspec.structs.replace(lora, peft=True)
    if lora is not None and chosen.joint_adapters:
        replaced = lora.stored is not None and TABLE_REPLACED.at(stack).value == "yes"
        lora = msgspec.structs.replace(lora, joint=True, replaced=replaced)
    if lora is not None:
        own = chosen.fused_adapters
        lora = msgspec.structs.replace(lora, fused=own or kernels.endswith("lora"), grouped=own)
    run = msgspec.structs.replace(
        chosen.kernels,
        attention="eager" if attention == "eager" else "flash",
        flash=flash,
        loss=kind,
        loss_chunks=int(chunks or chosen.kernels.loss_chunks),
        loss_pieces=pieces,
        writes_groups=chosen.kernels.writes_groups and SHARED_KEYS.at(stack).value == "yes",
    )
    base = Training(
        framework=chosen,
        precision=recipe,
        kernels=_kernels(chosen, recipe, run, lora),
        optimizer=optimizer_of(chosen, optimizer, stack),
        overlap=chosen.overlap,
        lora=lora,
        offload=offload,
        host=host,
        weights=loaded,
        ends_apart=chosen.end_units.at(stack).value == "apart",
        reruns_part=chosen.reruns.at(stack).value == "part",
    )
    if sharded is None:
        return base
    other = quantise(PRECISIONS[sharded])
    if lora is not None:
        other = msgspec.structs.replace(other, master=0, main_gradient=0, moment=other.weight)
    # Only what is trained is made float32.
    other = msgspec.structs.replace(other, frozen=recipe.weight if recipe.weight != other.weight else 0)
    return msgspec.structs.replace(base, by_sharding=(recipe, other))


def optimizer_of(framework: Framework, name: str, stack: Stack = NEWEST_STACK) -> Optimizer:
    """Return the optimizer of that name (with its options) as a framework of these releases runs it. Raises `ConfigError`.

    >>> optimizer_of(FRAMEWORKS["megatron"], "adamw-8bit").table_float32
    False
    """
    rule = parse(name)
    if rule.table_float32 and not framework.embeddings_32bit:
        rule = msgspec.structs.replace(rule, table_float32=False)
    return rule.run_as(framework.optimizer_step.at(stack).value, *framework.own_optimizers)


def _has_a_say(framework: Framework, precision: str, weights: str) -> None:
    """Raise `ConfigError` where the dtype of loaded weights is unknown, or would change nothing."""
    if weights not in WEIGHTS:
        raise ConfigError(f"must be one of {', '.join(WEIGHTS)}, got {weights!r}", key="weights")
    if framework.loaded is None:
        raise ConfigError(
            f"{framework.name} keeps its own copies of the weights, whatever they are loaded in; --precision says which",
            key="weights",
        )
    if precision not in ("bf16", "fp16"):
        raise ConfigError(
            f"precision {precision} says what the weights are; give --precision bf16 with it", key="weights"
        )


def loaded_dtype(
    framework: Framework, weights: str | None, checkpoint: str, stack: Stack, *, scaled: bool = False
) -> str:
    """Return the dtype in which a framework loads weights; the arguments are those of `training`. Raises `ConfigError`.

    scaled: gradients are scaled (fp16), for which weights must be float32, so that this is what is assumed
    """
    chosen = weights
    if chosen is None and framework.loaded is not None:
        chosen = "float32" if scaled else framework.loaded.at(stack).value
    return (checkpoint or "bfloat16") if chosen in (None, "auto") else chosen


def _kernels(framework: Framework, recipe: Precision, kernels: Kernels, lora: Lora | None = None) -> Kernels:
    """The kernels as they run in a recipe of number formats."""
    cast = recipe.autocast and (recipe.casts or framework.casts) == "autocast"
    residual = 4 if cast else recipe.activation if recipe.wrapped else None
    gathered = recipe.autocast and not cast and not recipe.wrapped
    if lora is not None and lora.wide_residual:
        residual = 4
    return msgspec.structs.replace(
        kernels,
        softmax_float32=kernels.softmax_float32 or cast or recipe.wrapped,
        products=recipe.products,
        dtypes=Dtypes(activation=recipe.activation, residual=residual, buffer=recipe.weight if gathered else None),
    )
