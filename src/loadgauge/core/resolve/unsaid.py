"""Defaults that depend on library releases: the assumed one, and its alternatives."""

from collections.abc import Iterator
from typing import Any

import msgspec

from loadgauge.core.base import ConfigError, is_script
from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.layout.overlap import Overlap
from loadgauge.core.definitions.model.attention_kernels import FLASH_KERNELS, runs_on
from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.definitions.model.model import Mlp, ModelSpec
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS
from loadgauge.core.definitions.training.optimizers import OPTIMIZERS, parse as parse_optimizer
from loadgauge.core.definitions.training.stacks import EXPERTS_QUANTISED, LOSS_SFT, UPCAST_SFT, Stack
from loadgauge.core.definitions.training.training import Training, training


def says_what_is_loaded(job: Job, model: ModelSpec, kind: Training, stack: Stack, assumed: dict[str, str]) -> None:
    """Notes the dtype of the loaded weights and the way the optimizer runs where they are defaults of a release."""
    framework, loaded = kind.framework, kind.framework.loaded
    if loaded is not None and kind.weights and job.weights in (None, "auto"):
        habit = loaded.at(stack)
        of_checkpoint = "the checkpoint's" if model.dtype else "as most checkpoints are"
        why = of_checkpoint if (job.weights or habit.value) == "auto" else "what trains with scaled gradients"
        if job.weights is None and habit.value == kind.weights:
            why = "its default"
        released = "" if job.weights else f"{stack.text(*loaded.libraries) or framework.name}: "
        assumed["--weights"] = f"{kind.weights} ({released}{why})"
    chosen = parse_optimizer(kind.optimizer.name)
    if chosen.variants and chosen.step != kind.optimizer.step:
        way = next(variant.suffix for variant in chosen.variants if variant.step == kind.optimizer.step)
        assumed["optimizer step"] = f"{way} ({stack.text(*framework.optimizer_step.libraries) or framework.name})"


def others(
    job: Job, recipe: dict[str, Any], kind: Training, model: ModelSpec, stack: Stack, assumed: dict[str, str]
) -> Iterator[Training]:
    """The other ways in which the run may train, for each thing that neither the job nor its releases say.

    given: the arguments of `training` for the way that is assumed
    """
    framework, lora = kind.framework, kind.lora
    own = model.own.rewritten  # of a captured model other weights and losses would be other code
    if own and framework.loaded is not None and kind.weights and job.weights is None and recipe["precision"] != "fp16":
        for value in framework.loaded.possible(stack):
            yield training(**recipe | {"weights": value})
    if lora is not None and "--kbit-upcast" in assumed:
        for value in UPCAST_SFT.possible(stack):
            yield training(**recipe | {"lora": msgspec.structs.replace(recipe["lora"], upcast=value)})
    if lora is not None and lora.experts_stay and model.has_experts and "yes" in EXPERTS_QUANTISED.possible(stack):
        yield msgspec.structs.replace(kind, lora=msgspec.structs.replace(lora, experts_stay=False))
    of_transformers = framework.kernels.loss == Kernels().loss  # Unsloth has one of its own
    if (
        own
        and framework.peft
        and of_transformers
        and job.loss is None
        and not (job.kernels or "").startswith("liger")
        and model.head.kind == "lm"
    ):
        for value in LOSS_SFT.possible(stack):
            yield training(**recipe | {"loss": value})
    if parse_optimizer(recipe["optimizer"]).variants and kind.offload == "none":
        for value in framework.optimizer_step.possible(stack):
            yield msgspec.structs.replace(kind, optimizer=kind.optimizer.run_as(value, *framework.own_optimizers))


def kernels_of(job: Job, model: ModelSpec) -> str:
    """The kernels that a model runs: functions of adapters are those of gated MLPs with matrices of their own
    (source: axolotl 0.19, `find_self_attn_in_layer` and `find_mlp_in_layer` of `monkeypatch/lora_kernels.py`)."""
    word = job.kernels or "native"
    plain = [block.mlp for block in model.blocks if isinstance(block.mlp, Mlp)]
    if word.endswith("lora") and any(not mlp.gated or mlp.fused_gate_up for mlp in plain):
        return word.removesuffix("lora").rstrip("-") or "native"
    return word


def with_kernel(job: Job, kind: Training, card: Gpu | None, stack: Stack, assumed: dict[str, str]) -> Training:
    """The training with the kernel of fused attention that runs on the card. Raises `ConfigError` where a named one cannot."""
    experts = kind.framework.experts
    if experts is not None and kind.lora is None:
        kind = msgspec.structs.replace(
            kind, kernels=msgspec.structs.replace(kind.kernels, experts=experts.at(stack).value)
        )
    kernels = kind.kernels
    if kernels.attention == "eager":
        return kind
    if kernels.flash:
        if card is not None and not runs_on(kernels.flash, card):
            raise ConfigError(f"{FLASH_KERNELS[kernels.flash]} does not run on {card.name}", key="attention")
        return kind
    name = kind.framework.flash_on(card, stack)
    if "--attention" in assumed and card is not None:
        releases = kind.framework.flash_libraries
        on = f"{card.id}, {stack.text(*releases)}" if releases and card.flash_attention else card.id
        kernel = name if card.flash_attention else "the memory-efficient kernel"
        assumed["--attention"] = f"flash ({kernel} on {on})"
    return msgspec.structs.replace(kind, kernels=msgspec.structs.replace(kernels, flash=name))


def determined(job: Job, kind: Training, card: Gpu | None) -> Training:
    """The training with kernels whose sums have one order (`--determinism`): what they need, and what is hidden then."""
    if job.determinism is None:
        return kind
    kernels, spread = kind.kernels, 0 if card is None else card.multiprocessors
    if kernels.attention == "flash" and kernels.flash == "fa2":
        kind = msgspec.structs.replace(kind, kernels=msgspec.structs.replace(kernels, sums_over=spread))
    if job.determinism == "blocking":  # a launch that is waited for hides nothing
        kind = msgspec.structs.replace(kind, overlap=Overlap.parse("none"))
    return kind


def attention_of(job: Job) -> tuple[str, str]:
    """The attention that a framework of its time has, and why."""
    framework = FRAMEWORKS.get(job.framework or "")
    if framework is not None and framework.kernels.attention != "flash":
        if (job.cp or 1) > 1:
            return "flash", "eager attention over --cp ranks is not modelled"
        return framework.kernels.attention, f"{framework.name} is from before FlashAttention"
    return "flash", ""


def optimizer_of_own(job: Job, optimizer: str, assumed: dict[str, str]) -> str:
    """The optimizer as PyTorch runs it by default on CUDA, where the module is one's own and no framework is named."""
    name, separator, options = optimizer.partition(":")
    if not is_script(job.model) or job.framework is not None or f"{name}-foreach" not in OPTIMIZERS:
        return optimizer
    chosen = f"{name}-foreach{separator}{options}"
    assumed["--optimizer"] = f"{chosen} (PyTorch's own default on CUDA)"
    return chosen
