"""Pipeline stages of a model of transformers, cut by layers, under the schedules of torch.distributed.pipelining."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from loadgauge.errors import LayoutError, NotModelled
from loadgauge.trace.parallel.degrees import SCHEDULES, Parallel


def shares(config: Any, chunks: int, given: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Layers of each chunk, in the order of the model. Raises LayoutError where they do not divide and none are given."""
    layers = config.get_text_config().num_hidden_layers
    if given:
        if len(given) != chunks or sum(given) != layers or min(given) < 0:
            raise LayoutError(f"stage_layers: needs {chunks} numbers that add up to {layers}, got {list(given)}")
        return given
    if layers % chunks:
        raise LayoutError(f"{layers} layers do not divide by {chunks} chunks: say how many each has (stage_layers)")
    return (layers // chunks,) * chunks


def numbers(parallel: Parallel, stage: int) -> tuple[int, ...]:
    """The chunks that a stage holds, counted along the model."""
    if SCHEDULES[parallel.schedule].v_shaped:
        return stage, 2 * parallel.pp - 1 - stage
    return tuple(stage + turn * parallel.pp for turn in range(parallel.vpp))


def cut(model: Any, config: Any, parallel: Parallel, stage: int) -> list[Any]:
    """The parts of a model that a stage holds: layers, with the embedding before the first and the head after the last.

    Raises NotModelled for a model that is not an embedding, layers, a norm and a head.
    """
    if parallel.pp == 1:
        return [model]
    base = model.base_model
    if (
        set(getattr(base.config, "base_model_pp_plan", None) or ()) != {"embed_tokens", "layers", "norm"}
        or base is model
    ):
        raise NotModelled(f"{type(model).__name__} is not cut into stages: transformers has no plan for it")
    chunks = parallel.pp * parallel.vpp
    every = shares(config, chunks, parallel.stage_layers)
    parts = []
    for number in numbers(parallel, stage):
        begin = sum(every[:number])
        own = range(begin, begin + every[number])
        part = copy.copy(model)
        part._modules = dict(model._modules)
        inner = copy.copy(base)
        inner._modules = dict(base._modules)
        inner.config = copy.copy(base.config)
        kinds = getattr(inner.config, "layer_types", None)
        if kinds:
            inner.config.layer_types = [kinds[layer] for layer in own]
        inner.config.num_hidden_layers = len(own)
        layers = nn.ModuleList()
        for layer in own:
            layers.add_module(str(layer), base.layers[layer])
        inner.layers = layers
        if number:
            inner._modules["embed_tokens"] = None
        if number < chunks - 1:
            inner.norm = nn.Identity()
            part._modules["lm_head"] = None
            part.forward = functools.partial(_hidden, inner)
        part._modules[model.base_model_prefix] = inner
        parts.append(part)
    return parts


class Chunk(nn.Module):
    """Takes ids or hidden states, and gives hidden states or logits."""

    def __init__(self, model: Any, number: int, chunks: int, autocast: Callable[[], Any], positions: Any) -> None:
        super().__init__()
        self.model, self.number, self.autocast, self.positions = model, number, autocast, positions
        self.first, self.last = number == 0, number == chunks - 1
        self._no_split_modules = model._no_split_modules

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Runs the layers of the chunk."""
        with self.autocast():
            found: Any = self.model(
                **{"input_ids" if self.first else "inputs_embeds": given, "position_ids": self.positions}
            )
        result: torch.Tensor = found.logits if self.last else found
        return result


def pipeline(
    parallel: Parallel, stage: int, group: Any, models: list[Any], ids: torch.Tensor, hidden: torch.Tensor
) -> Callable[[], None]:
    """A function that runs every micro-batch of `ids` [sequences, tokens] through the chunks of one stage, which may
    be wrapped. `hidden` is like what goes from stage to stage."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    chunks = parallel.pp * parallel.vpp
    stages = []
    for number, model in zip(numbers(parallel, stage), models, strict=True):
        given = hidden.detach().requires_grad_() if number else ids[: hidden.shape[0]]
        stages.append(
            pipelining.PipelineStage(
                model, number, chunks, ids.device, input_args=(given,),
                output_args=(hidden.detach().requires_grad_(),), group=group,
            )
        )  # fmt: skip
    known = SCHEDULES[parallel.schedule]
    try:
        schedule = getattr(schedules, known.name)(
            stages if known.several else stages[0],
            n_microbatches=len(ids) // hidden.shape[0],
            loss_fn=_loss(models[-1]),
        )
    except ValueError as error:  # of how many micro-batches go with how many stages
        raise LayoutError(f"{known.name}: {error} Micro-batches are those of accumulate.") from None
    inputs = [ids] if any(one.is_first for one in stages) else []
    target = ids if any(one.is_last for one in stages) else None

    def work() -> None:
        schedule.step(*inputs, target=target, return_outputs=False)

    return work


def _loss(model: Any) -> Callable[[Any, Any], Any]:
    while hasattr(model, "module") or isinstance(model, Chunk):
        model = model.model if isinstance(model, Chunk) else model.module

    def loss(logits: Any, labels: Any) -> Any:
        return model.loss_function(logits=logits, labels=labels, vocab_size=model.config.get_text_config().vocab_size)

    return loss


def _hidden(base: Any, **keywords: Any) -> Any:
    return base(**keywords).last_hidden_state
