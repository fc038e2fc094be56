"""One rank of a model that is trained in parallel: PyTorch's own FSDP2, DDP, tensor, sequence and pipeline parallelism.

The axes number the ranks as Megatron and torchtitan do: tensor parallel fastest, then data, then pipeline.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from loadgauge.core.base.errors import LayoutError, NotModelled, refuse
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.pytorch.device.fake import FakeMode
from loadgauge.pytorch.record.allocations import INPUTS, any_layer
from loadgauge.pytorch.record.observe import Observer
from loadgauge.pytorch.trace.programs.jobs import OPTIMIZER, build_model, of_tokens
from loadgauge.pytorch.trace.torch_run import SCHEDULES, TorchRun
from loadgauge.pytorch.trace.transformers_api import text_config


class ParallelJob:
    """Trains one rank's part of a transformers model on token ids; the labels are the ids.

    more: further arguments of FSDP2's `fully_shard`
    """

    more: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: Any, run: TorchRun, target: str = "") -> None:
        self.config, self.run, self.layout, self.place = config, run, run.layout, run.place
        layout, position = self.layout, self.place
        if layout.pp > 1:
            chunk_layers(config, layout)  # raises where the layers do not divide
        self.target = target or type(config).__name__
        self.assumed = {
            "rank": f"{run.rank} of {layout.gpus}: tp {position.tp}, data {position.data}, pp {position.pp}",
            "data parallel": self._data_parallel(),
            "loss": "transformers' own" + (", logits shared over the vocabulary" if layout.tp > 1 else ""),
            "optimizer": OPTIMIZER.format(run.training.optimizer.name),
            **of_tokens(config),
        }
        if layout.pp > 1:
            self.assumed["pipeline"] = f"torch.distributed.pipelining, {SCHEDULES[layout.schedule]}"
        if run.keep:
            self.assumed["kept by selective checkpointing"] = ", ".join(run.keep)
        self._built: Any = None
        self._step: Callable[[], None] = lambda: None
        self._device = "cpu"

    def _data_parallel(self) -> str:
        if self.layout.dp == 1:
            return "none"
        if self.layout.zero == 0:
            return "DDP, buckets of 25 MiB; gradients of micro-batches are added up before they are sent"
        rest = "the embedding, the head with its norm, and the rest" if self._apart else "the rest"
        data_parallel = f"fully_shard on each layer and on {rest}" + (
            "" if self.layout.zero == 3 else ", not shared again after forward"
        )
        return data_parallel if self.layout.replicas == 1 else f"{data_parallel}, {self.layout.replicas} replicas"

    @contextlib.contextmanager
    def prepared(self, mode: FakeMode | None, device: str) -> Iterator[Callable[[Any], None]]:
        """A context that builds the whole model and yields a function that trains one step of the rank's part.

        mode: the fake mode in which it is built; None: with real values. `introduce` takes the rank's part of it.
        """
        self._device = device
        self._built = build_model(self.config, self.run, device, values=mode is None)

        with self._loss_parallel():
            yield lambda _: self._step()

    def _loss_parallel(self) -> Any:
        if self.layout.tp == 1:
            return contextlib.nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()

    def introduce(self, observer: Observer) -> None:
        """Cuts the rank's part out of the model and shards it with PyTorch's own tools."""
        tracker = observer.tracker
        tracker.suspended += 1  # the whole model, which no rank holds
        mesh = self._mesh()
        parts = cut(self._built, self.config, self.run)
        self._built = None
        for part in parts:
            if self.layout.tp > 1:
                shard_layers(part, mesh["tp"], self.layout.sequence_parallel)
        tracker.suspended -= 1
        whole_parts = parts
        device = torch.device(self._device)
        ids = torch.empty(
            (int(self.layout.micro_batch) * self.run.accumulate, int(self.layout.seq_len)),
            dtype=torch.long,
            device=device,
        )
        positions = torch.arange(self.layout.seq_len, device=device)[None]
        if self.layout.pp > 1:
            chunks = self.layout.pp * self.layout.chunks
            placed = zip(parts, self.run.chunks, strict=True)
            parts = [Chunk(part, number, chunks, self._autocast, positions) for part, number in placed]
        models = parts
        if self.layout.dp > 1 and self.layout.zero:
            tracker.suspended += 1  # FSDP takes its part of each weight, and lets go of the whole
            models = [self._shared(part, mesh) for part in parts]
            tracker.suspended -= 1
        for number, part in enumerate(whole_parts):
            observer.name(part, f"chunk {number}" if len(whole_parts) > 1 else "")
        if self.layout.dp > 1 and not self.layout.zero:
            models = [nn.parallel.DistributedDataParallel(part, process_group=_group(mesh, "data")) for part in parts]
        if not isinstance(ids, FakeTensor):
            ids.random_(3, 100)
        tracker.claim([ids], INPUTS)
        optimizer = self.run.optimizer(
            [parameter for model in models for parameter in model.parameters() if parameter.requires_grad]
        )
        work = self._whole(models[0], ids, positions) if self.layout.pp == 1 else self._stages(models, mesh, ids)

        def step() -> None:
            work()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        self._step = step

    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        pp, replicas, dp, tp = self.layout.pp, int(self.layout.replicas), int(self.layout.dp), int(self.layout.tp)
        axes = {"pp": pp, "replicas": replicas, "data": dp // replicas, "tp": tp}
        return init_device_mesh(self._device, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def _shared(self, model: Any, mesh: Any) -> Any:
        """FSDP2, on each layer and on the whole."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        axes = mesh["replicas", "data"] if self.layout.replicas > 1 else mesh["data"]
        keywords: dict[str, Any] = {"mesh": axes, **self.more}
        if self.layout.zero == 2:
            keywords["reshard_after_forward"] = False
        if self.run.training.precision.autocast:
            keywords["mp_policy"] = MixedPrecisionPolicy(param_dtype=self.run.computed, reduce_dtype=torch.float32)
        block_types = set(model._no_split_modules or ())
        for module in list(model.modules()):
            if type(module).__name__ in block_types:
                fully_shard(module, **keywords)
        if self._apart:
            embedding, tail = ends(model)
            if embedding is not None:
                fully_shard(embedding, **keywords)
            if tail:
                fully_shard(tail, **{**keywords, "reshard_after_forward": False})
        fully_shard(model, **keywords)
        return model

    @property
    def _apart(self) -> bool:
        """Return whether embedding and head are units of their own, as accelerate makes them where Trainer runs a whole model."""
        return self.run.training.ends_apart and self.layout.pp == 1

    def _autocast(self) -> Any:
        """FSDP casts by itself."""
        if self.layout.zero and self.layout.dp > 1:
            return contextlib.nullcontext()
        return self.run.autocast(self._device)

    def _whole(self, model: Any, ids: Any, positions: Any) -> Callable[[], None]:
        batches = ids.split(int(self.layout.micro_batch))
        # Else positions would be counted on the rank's part of the sequence.
        keywords = {"position_ids": positions} if self.layout.sequence_parallel else {}

        def work() -> None:
            for number, batch in enumerate(batches):
                last = number + 1 == len(batches)
                waits = self.layout.dp > 1 and not self.layout.zero and not last
                if self.layout.dp > 1 and self.layout.zero and self.run.training.framework.reduces_once:
                    model.set_requires_gradient_sync(last)
                with model.no_sync() if waits else contextlib.nullcontext():
                    with self._autocast():
                        loss = model(input_ids=batch, labels=batch, **keywords).loss
                    loss.backward()
                    del loss

        return work

    def _stages(self, models: list[Any], mesh: Any, ids: Any) -> Callable[[], None]:
        width = text_config(self.config).hidden_size
        tokens = self.layout.seq_len // (self.layout.tp if self.layout.sequence_parallel else 1)
        hidden = torch.empty(
            (int(self.layout.micro_batch), tokens, width), dtype=self.run.computed, device=self._device
        )
        return pipeline(self.run, _group(mesh, "pp"), models, ids, hidden)


def ends(model: Any) -> tuple[Any, list[Any]]:
    """Return what FSDP2 shards beside the layers of a model: its embedding, and the last norm with the head, in one unit.

    A head that is tied to the embedding is in one unit with it: there is no embedding then, and three modules in the other one
    (source: accelerate 1.15, `utils/fsdp_utils.py`, `fsdp2_prepare_model`).
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    norms = [child for child in model.base_model.children() if "norm" in type(child).__name__.lower()]
    tied = head is not None and getattr(embedding, "weight", None) is getattr(head, "weight", None)
    tail = [*norms[-1:], *([embedding] if tied else []), *([] if head is None else [head])]
    return None if tied else embedding, tail


def _group(mesh: Any, axis: str) -> Any:
    return mesh[axis].get_group()


def chunk_layers(config: Any, layout: Layout) -> dict[int, range]:
    """The layers of each chunk of a model, by the chunk's place along the model.

    Raises LayoutError where the layers do not divide and `stage_layers` does not say how many each stage has.
    """
    text, chunks, stages = text_config(config), layout.pp * layout.chunks, layout.stage_layers
    layers = text.num_hidden_layers
    if stages is not None and (len(stages) != layout.pp or sum(stages) != layers or min(stages) < 0):
        raise LayoutError(f"stage_layers: needs {layout.pp} numbers that add up to {layers}, got {list(stages)}")
    refuse(
        stages is None and layers % chunks,
        f"{layers} layers do not divide by {chunks} chunks: say how many each has (stage_layers)",
        LayoutError,
    )
    spans = layout.chunks_of(text)
    return {chunk_index: range(*spans[stage][chunk]) for chunk_index, (stage, chunk) in enumerate(layout.routes[0])}


def cut(model: Any, config: Any, run: TorchRun) -> list[Any]:
    """The parts of a model that a rank's pipeline stage holds: layers, the embedding before the first, the head after the
    last.

    Raises NotModelled for a model that is not an embedding, layers, a norm and a head.
    """
    layout = run.layout
    if layout.pp == 1:
        return [model]
    base = model.base_model
    refuse(
        set(getattr(base.config, "base_model_pp_plan", None) or ()) != {"embed_tokens", "layers", "norm"}
        or base is model,
        f"{type(model).__name__} is not cut into stages: transformers has no plan for it",
        NotModelled,
    )
    chunks, layers_of = layout.pp * layout.chunks, chunk_layers(config, layout)
    parts = []
    for number in run.chunks:
        own = layers_of[number]
        part = copy.copy(model)
        part._modules = dict(model._modules)
        inner = copy.copy(base)
        inner._modules = dict(base._modules)
        inner.config = copy.copy(base.config)
        layer_types = getattr(inner.config, "layer_types", None)
        if layer_types:
            inner.config.layer_types = [layer_types[layer] for layer in own]
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

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the layers of the chunk.

        inputs: token ids (batch, positions) on the first chunk, else hidden states (batch, positions, hidden_size); returns
        hidden states, or logits on the last chunk
        """
        with self.autocast():
            output: Any = self.model(
                **{"input_ids" if self.first else "inputs_embeds": inputs, "position_ids": self.positions}
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
    stages = [
        pipelining.PipelineStage(
            model,
            number,
            chunks,
            ids.device,
            input_args=(hidden.detach().requires_grad_() if number else ids[: hidden.shape[0]],),
            output_args=(hidden.detach().requires_grad_(),),
            group=group,
        )
        for number, model in zip(run.chunks, models, strict=True)
    ]
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
    size = text_config(model.config).vocab_size
    return lambda logits, labels: model.loss_function(logits=logits, labels=labels, vocab_size=size)


def _hidden(base: Any, **keywords: Any) -> Any:
    return base(**keywords).last_hidden_state


KNOWN = ("colwise", "rowwise", "colwise_gather_output", "replicated_with_grad_allreduce")
"""Styles of transformers that have their like in `torch.distributed.tensor.parallel`."""


def shard_layers(model: Any, mesh: Any, sequence_parallel: bool) -> None:
    """Shards a model's matrix products over a mesh of one axis, in place. The embedding and the logits are sharded over the
    vocabulary; with `sequence_parallel` norms work on their part of the sequence.

    Raises NotModelled for models whose plan has other styles, LayoutError for heads that do not divide.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    refuse(
        not any(style == "rowwise" for style in plan.values()),
        f"transformers has no tensor-parallel plan for {type(model).__name__}",
        NotModelled,
    )
    between = Shard(1) if sequence_parallel else Replicate()
    styles: dict[str, Any] = {}
    for name, module in model.named_modules():
        style = plan.get(any_layer(name))
        if style is None or name == "lm_head" or module is model.base_model.embed_tokens:
            continue
        refuse(
            style not in KNOWN or ("wise" in style and not isinstance(module, nn.Linear)),
            f"tensor parallelism of {name} ({style}): write the model's own as a script",
            NotModelled,
        )
        if style.startswith("colwise"):
            _divides(module.out_features, mesh, name)
            styles[name] = ColwiseParallel()
        elif style == "rowwise":
            styles[name] = RowwiseParallel(output_layouts=between)
        else:  # a norm of heads: each rank has its own
            styles[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    _heads(text_config(model.config), mesh)
    tied = getattr(model.config, "tie_word_embeddings", False)
    embedding = _name(model, model.base_model.embed_tokens)
    if embedding is not None:
        styles[embedding] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if _has(model, "lm_head"):
        styles["lm_head"] = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    for name, module in model.named_modules():
        if type(module).__name__ in set(model._no_split_modules or ()):
            norms = [f"{name}.{norm}" for norm, _ in module.named_children() if "norm" in norm]
            styles |= {norm: SequenceParallel() if sequence_parallel else whole() for norm in norms}
            if sequence_parallel:
                styles[f"{name}.self_attn"] = PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                )
                styles[f"{name}.mlp"] = PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                )
    norm = _name(model, model.base_model.norm)
    if norm is not None and not isinstance(model.base_model.norm, nn.Identity):
        styles[norm] = SequenceParallel() if sequence_parallel else whole()
    parallelize_module(model, mesh, styles)
    if tied and embedding is not None and _has(model, "lm_head"):
        model.lm_head.weight = model.base_model.embed_tokens.weight


def whole() -> Any:
    """The style of a module that every rank runs whole, with weights that are DTensors as the others are: optimizers
    refuse to mix them."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module
    from torch.distributed.tensor.parallel.style import ParallelStyle

    class Whole(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            def taken(_: Any, inputs: Any, mesh: Any) -> Any:
                return (DTensor.from_local(inputs[0], mesh, (Replicate(),), run_check=False), *inputs[1:])

            return distribute_module(module, device_mesh, None, taken, lambda _, output, __: output.to_local())

    return Whole()


def _has(model: Any, name: str) -> bool:
    return isinstance(getattr(model, name, None), nn.Linear)


def _name(model: Any, module: Any) -> str | None:
    return next((name for name, part in model.named_modules() if part is module), None)


def _divides(size: int, mesh: Any, name: str) -> None:
    refuse(size % mesh.size(), f"{name}: {size} columns do not divide by tp = {mesh.size()}", LayoutError)


def _heads(config: Any, mesh: Any) -> None:
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        refuse(
            heads is not None and heads % mesh.size(),
            f"{key} = {heads} does not divide by tp = {mesh.size()}",
            LayoutError,
        )
