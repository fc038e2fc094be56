"""One rank of a model that is trained in parallel: PyTorch's own FSDP2, DDP, tensor, sequence and pipeline parallelism.

The axes number the ranks as Megatron and torchtitan do: tensor parallel fastest, then data, then pipeline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from loadgauge.pytorch.device.fake import FakeMode
from loadgauge.pytorch.parallel.stages import Chunk, chunk_layers, cut, pipeline
from loadgauge.pytorch.parallel.tensor_parallel import shard_layers
from loadgauge.pytorch.record.allocations import INPUTS
from loadgauge.pytorch.trace.programs.jobs import OPTIMIZER, build_model, of_tokens
from loadgauge.pytorch.trace.torch_run import SCHEDULES, TorchRun
from loadgauge.pytorch.trace.transformers_api import text_config

if TYPE_CHECKING:
    from loadgauge.pytorch.record.observe import Observer


class ParallelJob:
    """Trains one rank's part of a transformers model on token ids; the labels are the ids.

    more: further arguments of FSDP2's `fully_shard`
    """

    more: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, config: Any, run: TorchRun, target: str = "") -> None:
        self.config, self.run, self.layout, self.place = config, run, run.layout, run.place
        layout, place = self.layout, self.place
        if layout.pp > 1:
            chunk_layers(config, layout)  # raises where the layers do not divide
        self.target = target or type(config).__name__
        self.assumed = {
            "rank": f"{run.rank} of {layout.gpus}: tp {place.tp}, data {place.data}, pp {place.pp}",
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
        what = f"fully_shard on each layer and on {rest}" + (
            "" if self.layout.zero == 3 else ", not shared again after forward"
        )
        return what if self.layout.replicas == 1 else f"{what}, {self.layout.replicas} replicas"

    @contextlib.contextmanager
    def prepared(self, mode: FakeMode | None, device: str) -> Iterator[Callable[[Any], None]]:
        """A context that builds the whole model and yields a function that trains one step of the rank's part.

        mode: the fake mode in which it is built; None: with real values. `introduce` takes the rank's part of it.
        """
        self._device = device
        self._built = build_model(self.config, self.run, device, values=mode is None)

        def step(_: Any) -> None:
            self._step()

        with self._loss_parallel():
            yield step

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
        kinds = set(model._no_split_modules or ())
        for module in list(model.modules()):
            if type(module).__name__ in kinds:
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
