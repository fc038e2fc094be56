"""Pipeline stages of a model of transformers, cut by layers, under the schedules of torch.distributed.pipelining."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from loadgauge.core.base.errors import LayoutError, NotModelled
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.pytorch.trace.torch_run import SCHEDULES, TorchRun
from loadgauge.pytorch.trace.transformers_api import text_config


def chunk_layers(config: Any, layout: Layout) -> dict[int, range]:
    """The layers of each chunk of a model, by the chunk's place along the model.

    Raises LayoutError where the layers do not divide and `stage_layers` does not say how many each stage has.
    """
    text, chunks, stages = text_config(config), layout.pp * layout.chunks, layout.stage_layers
    layers = text.num_hidden_layers
    if stages is not None and (len(stages) != layout.pp or sum(stages) != layers or min(stages) < 0):
        raise LayoutError(f"stage_layers: needs {layout.pp} numbers that add up to {layers}, got {list(stages)}")
    if stages is None and layers % chunks:
        raise LayoutError(f"{layers} layers do not divide by {chunks} chunks: say how many each has (stage_layers)")
    spans = layout.chunks_of(text)
    return {place: range(*spans[stage][chunk]) for place, (stage, chunk) in enumerate(layout.routes[0])}


def cut(model: Any, config: Any, run: TorchRun) -> list[Any]:
    """The parts of a model that a rank's pipeline stage holds: layers, the embedding before the first, the head after the
    last.

    Raises NotModelled for a model that is not an embedding, layers, a norm and a head.
    """
    layout = run.layout
    if layout.pp == 1:
        return [model]
    base = model.base_model
    if (
        set(getattr(base.config, "base_model_pp_plan", None) or ()) != {"embed_tokens", "layers", "norm"}
        or base is model
    ):
        raise NotModelled(f"{type(model).__name__} is not cut into stages: transformers has no plan for it")
    chunks, layers_of = layout.pp * layout.chunks, chunk_layers(config, layout)
    parts = []
    for number in run.chunks:
        own = layers_of[number]
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
    """A chunk of the model: takes ids or hidden states and returns hidden states or logits."""

    def __init__(self, model: Any, number: int, chunks: int, autocast: Callable[[], Any], positions: Any) -> None:
        super().__init__()
        self.model, self.number, self.autocast, self.positions = model, number, autocast, positions
        self.first, self.last = number == 0, number == chunks - 1
        self._no_split_modules = model._no_split_modules

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Run the layers of the chunk.

        given: token ids (batch, positions) on the first chunk, else hidden states (batch, positions, hidden_size); returns
        hidden states, or logits on the last chunk
        """
        with self.autocast():
            output: Any = self.model(
                **{"input_ids" if self.first else "inputs_embeds": given, "position_ids": self.positions}
            )
        result: torch.Tensor = output.logits if self.last else output
        return result


def pipeline(
    run: TorchRun, group: Any, models: list[Any], ids: torch.Tensor, hidden: torch.Tensor
) -> Callable[[], None]:
    """Returns a function that runs every micro-batch of `ids` [sequences, tokens] through the chunks of one stage.

    hidden: a tensor like those that go from stage to stage
    """
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    chunks = run.layout.pp * run.layout.chunks
    stages = []
    for number, model in zip(run.chunks, models, strict=True):
        given = hidden.detach().requires_grad_() if number else ids[: hidden.shape[0]]
        stages.append(
            pipelining.PipelineStage(
                model,
                number,
                chunks,
                ids.device,
                input_args=(given,),
                output_args=(hidden.detach().requires_grad_(),),
                group=group,
            )
        )
    name = SCHEDULES[run.layout.schedule]
    try:
        schedule = getattr(schedules, name)(
            stages if run.layout.chunks > 1 else stages[0],
            n_microbatches=len(ids) // hidden.shape[0],
            loss_fn=_loss(models[-1]),
        )
    except ValueError as error:  # of how many micro-batches go with how many stages
        raise LayoutError(f"{name}: {error} Micro-batches are global_batch over dp x micro_batch.") from None
    inputs = [ids] if any(stage.is_first for stage in stages) else []
    target = ids if any(stage.is_last for stage in stages) else None

    def work() -> None:
        schedule.step(*inputs, target=target, return_outputs=False)

    return work


def _loss(model: Any) -> Callable[[Any, Any], Any]:
    while hasattr(model, "module") or isinstance(model, Chunk):
        model = model.model if isinstance(model, Chunk) else model.module

    def loss(logits: Any, labels: Any) -> Any:
        return model.loss_function(logits=logits, labels=labels, vocab_size=text_config(model.config).vocab_size)

    return loss


def _hidden(base: Any, **keywords: Any) -> Any:
    return base(**keywords).last_hidden_state
