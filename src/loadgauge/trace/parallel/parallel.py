"""One rank of a model that is trained in parallel: PyTorch's own FSDP2, DDP, tensor, sequence and pipeline parallelism.

The axes number the ranks as Megatron and torchtitan do: tensor parallel fastest, then data, then pipeline.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from loadgauge.trace.device.fake import FakeMode
from loadgauge.trace.jobs import OPTIMIZERS, Settings, built
from loadgauge.trace.parallel.degrees import SCHEDULES, Parallel, place
from loadgauge.trace.parallel.distributed import World
from loadgauge.trace.parallel.stages import Chunk, cut, numbers, pipeline, shares
from loadgauge.trace.parallel.tensor_parallel import share_layers
from loadgauge.trace.record.allocations import INPUTS

if TYPE_CHECKING:
    from loadgauge.trace.record.observe import Observer


class ParallelJob:
    """Trains a model of transformers on token ids, one rank of a world: the labels are the ids."""

    def __init__(self, config: Any, settings: Settings, parallel: Parallel, world: World, target: str = "") -> None:
        settings.check()
        world.check()
        self.config, self.settings, self.parallel, self.world = config, settings, parallel, world
        self.data = parallel.data(world.size)
        self.place = place(world.rank, parallel, world.size)
        if parallel.pp > 1:
            shares(config, parallel.pp * parallel.vpp, parallel.stage_layers)
        self.target = target or type(config).__name__
        self.assumed = {
            "rank": f"{world.rank} of {world.size}: tp {self.place.tp}, data {self.place.data}, pp {self.place.pp}",
            "data parallel": self._data_parallel(),
            "loss": "transformers' own" + (", logits shared over the vocabulary" if parallel.tp > 1 else ""),
            "optimizer": f"torch.optim, {settings.optimizer}, gradients freed after each step",
            "ids": "not padded, no attention mask",
        }
        if parallel.pp > 1:
            self.assumed["pipeline"] = f"torch.distributed.pipelining, {SCHEDULES[parallel.schedule].name}"
        if settings.checkpointing == "selective":
            self.assumed["kept by selective checkpointing"] = settings.keep.replace(",", ", ")
        self._built: Any = None
        self._step: Callable[[], None] = lambda: None
        self._device = "cpu"

    def _data_parallel(self) -> str:
        if self.data == 1:
            return "none"
        if self.parallel.zero == 0:
            return "DDP, buckets of 25 MiB; gradients of micro-batches are added up before they are sent"
        what = "fully_shard on each layer and on the rest" + (
            "" if self.parallel.zero == 3 else ", not shared again after forward"
        )
        return what if self.parallel.replicas == 1 else f"{what}, {self.parallel.replicas} replicas"

    @contextlib.contextmanager
    def prepared(self, mode: FakeMode | None, device: str) -> Iterator[Callable[[Any], None]]:
        """Makes the whole model, with values where there is no fake mode; `introduce` takes the rank's part of it."""
        self._device = device
        self._built = built(self.config, self.settings, device, values=mode is None)

        def step(_: Any) -> None:
            self._step()

        with self._loss_parallel():
            yield step

    def _loss_parallel(self) -> Any:
        if self.parallel.tp == 1:
            return contextlib.nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()

    def introduce(self, observer: Observer) -> None:
        """Takes the rank's part of the model and shares it out, as PyTorch's own tools do."""
        tracker = observer.tracker
        tracker.suspended += 1  # the whole model, which no rank holds
        mesh = self._mesh()
        parts = cut(self._built, self.config, self.parallel, self.place.pp)
        self._built = None
        for part in parts:
            if self.parallel.tp > 1:
                share_layers(part, mesh["tp"], self.parallel.sequence_parallel)
        tracker.suspended -= 1
        held = parts
        device = torch.device(self._device)
        ids = torch.empty(
            (self.settings.micro_batch * self.settings.accumulate, self.settings.seq_len),
            dtype=torch.long,
            device=device,
        )
        positions = torch.arange(self.settings.seq_len, device=device)[None]
        if self.parallel.pp > 1:
            chunks = self.parallel.pp * self.parallel.vpp
            placed = zip(parts, numbers(self.parallel, self.place.pp), strict=True)
            parts = [Chunk(part, number, chunks, self._autocast, positions) for part, number in placed]
        models = parts
        if self.data > 1 and self.parallel.zero:
            tracker.suspended += 1  # FSDP takes its part of each weight, and lets go of the whole
            models = [self._shared(part, mesh) for part in parts]
            tracker.suspended -= 1
        for number, part in enumerate(held):
            observer.name(part, f"chunk {number}" if len(held) > 1 else "")
        if self.data > 1 and not self.parallel.zero:
            models = [nn.parallel.DistributedDataParallel(part, process_group=_group(mesh, "data")) for part in parts]
        if not isinstance(ids, FakeTensor):
            ids.random_(3, 100)
        tracker.claim([ids], INPUTS)
        optimizer = OPTIMIZERS[self.settings.optimizer](
            [one for model in models for one in model.parameters() if one.requires_grad]
        )
        work = self._whole(models[0], ids, positions) if self.parallel.pp == 1 else self._stages(models, mesh, ids)

        def step() -> None:
            work()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        self._step = step

    def _mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        parallel = self.parallel
        axes = {
            "pp": parallel.pp,
            "replicas": parallel.replicas,
            "data": self.data // parallel.replicas,
            "tp": parallel.tp,
        }
        return init_device_mesh(self._device, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def _shared(self, model: Any, mesh: Any) -> Any:
        """FSDP2, on each layer and on the whole."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        axes = mesh["replicas", "data"] if self.parallel.replicas > 1 else mesh["data"]
        keywords: dict[str, Any] = {"mesh": axes}
        if self.parallel.zero == 2:
            keywords["reshard_after_forward"] = False
        if self.settings.precision.endswith("mixed"):
            low = torch.bfloat16 if self.settings.precision.startswith("bf16") else torch.float16
            keywords["mp_policy"] = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        kinds = set(model._no_split_modules or ())
        for module in list(model.modules()):
            if type(module).__name__ in kinds:
                fully_shard(module, **keywords)
        fully_shard(model, **keywords)
        return model

    def _autocast(self) -> Any:
        """FSDP casts by itself."""
        if self.parallel.zero and self.data > 1:
            return contextlib.nullcontext()
        return self.settings.autocast(self._device)

    def _whole(self, model: Any, ids: Any, positions: Any) -> Callable[[], None]:
        batches = ids.split(self.settings.micro_batch)
        # Else positions would be counted on the rank's part of the sequence.
        keywords = {"position_ids": positions} if self.parallel.sequence_parallel else {}

        def work() -> None:
            for number, batch in enumerate(batches):
                waits = self.data > 1 and not self.parallel.zero and number + 1 < len(batches)
                with model.no_sync() if waits else contextlib.nullcontext():
                    with self._autocast():
                        loss = model(input_ids=batch, labels=batch, **keywords).loss
                    loss.backward()
                    del loss

        return work

    def _stages(self, models: list[Any], mesh: Any, ids: Any) -> Callable[[], None]:
        width = self.config.get_text_config().hidden_size
        tokens = self.settings.seq_len // (self.parallel.tp if self.parallel.sequence_parallel else 1)
        hidden = torch.empty(
            (self.settings.micro_batch, tokens, width), dtype=_computed(self.settings), device=self._device
        )
        return pipeline(self.parallel, self.place.pp, _group(mesh, "pp"), models, ids, hidden)


def _computed(settings: Settings) -> torch.dtype:
    """The dtype of what goes from stage to stage."""
    if not settings.precision.endswith("mixed"):
        return settings.dtype
    return torch.bfloat16 if settings.precision.startswith("bf16") else torch.float16


def _group(mesh: Any, axis: str) -> Any:
    return mesh[axis].get_group()
