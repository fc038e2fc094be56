"""Defaults that depend on library releases: the assumed one, and its alternatives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.kernels import Kernels
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.optimizers import parse as parse_optimizer
from loadgauge.core.definitions.training.stacks import LOSS_SFT, UPCAST_SFT, Stack
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
    job: Job, given: dict[str, Any], kind: Training, model: ModelSpec, stack: Stack, assumed: dict[str, str]
) -> Iterator[Training]:
    """The other ways in which the run may train, for each thing that neither the job nor its releases say.

    given: the arguments of `training` for the way that is assumed
    """
    framework, lora = kind.framework, kind.lora
    own = model.listed is None  # of a captured model other weights and losses would be other code
    if own and framework.loaded is not None and kind.weights and job.weights is None and given["precision"] != "fp16":
        for value in framework.loaded.possible(stack):
            yield training(**given | {"weights": value})
    if lora is not None and "--kbit-upcast" in assumed:
        for value in UPCAST_SFT.possible(stack):
            yield training(**given | {"lora": msgspec.structs.replace(given["lora"], upcast=value)})
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
            yield training(**given | {"loss": value})
    if parse_optimizer(given["optimizer"]).variants and kind.offload == "none":
        for value in framework.optimizer_step.possible(stack):
            yield msgspec.structs.replace(kind, optimizer=kind.optimizer.run_as(value, *framework.own_optimizers))
