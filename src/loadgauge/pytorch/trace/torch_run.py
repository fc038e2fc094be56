"""`TorchRun`: how plain PyTorch and transformers train a model, as the `Layout` and `Training` that an estimate takes.

What PyTorch cannot run is refused here, and only here.
"""

import contextlib
import functools
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import msgspec
import torch

from loadgauge.core.base.errors import ConfigError, LayoutError, NotModelled, refuse
from loadgauge.core.definitions.job.flag_types import STEP
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.job.job_text import stage_counts
from loadgauge.core.definitions.layout.axes import DEGREES, TRACED
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.definitions.training import optimizers as spec
from loadgauge.core.definitions.training.optimizers import torch_optimizers
from loadgauge.core.definitions.training.training import Training, training
from loadgauge.pytorch.trace.subprocess import kept_operations

Factory = Callable[[Any], torch.optim.Optimizer]


def _found(factory: str) -> Any:
    """An optimizer by its dotted name; None where this PyTorch does not have it yet."""
    try:
        return pkgutil.resolve_name(factory)
    except AttributeError:
        return None


OPTIMIZERS: dict[str, tuple[str, Factory]] = {
    name: (known.optimizer, functools.partial(found, **known.options))
    for name, known in torch_optimizers().items()
    if (found := _found(known.factory)) is not None
}
"""By name: the optimizer of `loadgauge.core.definitions`, and PyTorch's. PyTorch's own default implementation (on CUDA: foreach)
unless the name says otherwise."""
PRECISIONS = ("bf16-pure", "bf16-autocast", "fp16-autocast", "fp32")
ATTENTIONS = {"flash": "sdpa", "eager": "eager"}
"""By the word of `loadgauge estimate`: the implementation of transformers."""
SCHEDULES = {
    "1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe", "interleaved": "ScheduleInterleaved1F1B",
    "zb-v": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV",
}  # fmt: skip
"""Pipeline schedules of torch.distributed.pipelining."""
REFUSED = {
    **{axis: 1 for axis in DEGREES if axis not in TRACED}, "lengths": None, "loss": "auto", "framework": "huggingface",
    "lora_rank": None, "adapter": None, "qlora": False, "offload": "none", "offload_to": "cpu", "activation_offload": "none",
    "pin_memory": True, "mtp": False, "weights": None, "version": None,
}  # fmt: skip
"""Fields of a `Job` that a traced MODEL cannot have, and the value that changes nothing."""


class Place(NamedTuple):
    """The index of a rank on each axis."""

    tp: int
    data: int
    pp: int


class TorchRun(msgspec.Struct, frozen=True):
    """How a model is trained. `rank`: the rank of `layout.gpus` that is simulated; `keep`: operations whose results full
    recomputation keeps (selective activation checkpointing)."""

    layout: Layout
    training: Training
    rank: int = 0
    keep: tuple[str, ...] = ()

    @classmethod
    def of(cls, job: Job, rank: int = 0, keep: tuple[str, ...] = ()) -> Self:
        """The run that a job describes, with PyTorch's defaults for the fields that are None.

        Raises ConfigError, LayoutError or NotModelled for what PyTorch and transformers cannot run.

        >>> run = TorchRun.of(Job(model="", gpus=64, tp=8, pp=2, zero=3))
        >>> run.layout.dp, run.training.precision.name, run.layout.global_batch
        (4, 'bf16-pure', 4)
        """
        for name, neutral in REFUSED.items():
            refuse(
                getattr(job, name) not in (None, neutral),
                f"{name} is not modelled for a traced model; write the training as a script (script.py:function)",
                NotModelled,
            )
        precision, optimizer = job.precision or "bf16-pure", job.optimizer or "adamw"
        attention = job.attention or "flash"
        refuse(
            precision in ("bf16", "fp16"),
            f"{precision} is the framework's mixed recipe with float32 master weights, which plain PyTorch does not"
            f" have; trace {', '.join(PRECISIONS)} (until 0.1, bf16 meant bf16-pure here)",
            key="precision",
        )
        for name, value, choices in (
            ("optimizer", optimizer, OPTIMIZERS),
            ("precision", precision, PRECISIONS),
            ("attention", attention, ATTENTIONS),
        ):
            refuse(
                value in torch_optimizers() and name == "optimizer" and value not in choices,
                f"optimizer {value}: PyTorch {torch.__version__} does not have it; a newer one does",
                NotModelled,
            )
            refuse(value not in choices, f"must be one of {', '.join(choices)}, got {value!r}", key=name)
        gpus, tp, pp, micro_batch = job.gpus or 1, job.tp or 1, job.pp or 1, job.micro_batch
        refuse(gpus % (tp * pp), f"a world of {gpus} does not divide by tp x pp = {tp * pp}", LayoutError)
        dp, micro_batch = gpus // (tp * pp), 1 if micro_batch is None else micro_batch
        layout = Layout(
            dp=dp,
            tp=tp,
            pp=pp,
            vpp=job.vpp or 1,
            zero=job.zero or 0,
            replicas=job.replicas or 1,
            sequence_parallel=bool(job.sequence_parallel),
            micro_batch=micro_batch,
            global_batch=dp * micro_batch if job.global_batch is None else job.global_batch,
            seq_len=4096 if job.seq_len is None else job.seq_len,
            schedule=job.schedule or ("interleaved" if (job.vpp or 1) > 1 else "1f1b"),  # type: ignore[arg-type]
            stage_layers=None if job.stage_layers is None else stage_counts(job.stage_layers),
            recompute=RecomputePolicy.parse(job.recompute or "none"),
        )
        # PyTorch's own way on CUDA where none is named.
        trained = training("huggingface", precision, optimizer, attention)
        own = trained.optimizer.run_as("foreach") if optimizer == "adamw" else spec.OPTIMIZERS[optimizer]
        run = cls(layout, msgspec.structs.replace(trained, optimizer=own), rank, keep)
        run.check()
        return run

    def check(self) -> None:
        """Raises ConfigError, LayoutError or NotModelled for a layout that PyTorch and transformers cannot run."""
        layout, recompute = self.layout, self.layout.recompute
        for name in ("seq_len", "micro_batch", "global_batch"):
            refuse(getattr(layout, name) < 1, f"must be at least 1, got {getattr(layout, name)}", key=name)
        refuse(not 0 <= self.rank < layout.gpus, f"rank {self.rank} is not one of {layout.gpus}")
        refuse(
            recompute not in (RecomputePolicy(), RecomputePolicy(mode="full")),
            f"recompute {recompute}: transformers recomputes whole layers (none or full); --keep with full keeps the"
            " results of some operations (selective checkpointing by a policy over operations of PyTorch)",
            NotModelled,
        )
        refuse(self.keep and recompute.mode != "full", "needs recompute full", key="keep")
        refuse(
            layout.dp % layout.replicas,
            f"{layout.dp} data-parallel ranks do not divide by {layout.replicas} replicas",
            LayoutError,
        )
        refuse(
            layout.zero not in (0, 2, 3), f"zero={layout.zero}: PyTorch's DDP is 0, its fully_shard 2 or 3", NotModelled
        )
        refuse(
            layout.zero == 0 and layout.dp > 1 and layout.tp > 1,
            "PyTorch's DDP does not take weights that tensor-parallel ranks share: use --zero 3",
            NotModelled,
        )
        refuse(layout.replicas > 1 and layout.zero == 0, "replicas: of ranks that share weights (--zero 2 or 3)")
        refuse(layout.sequence_parallel and layout.tp == 1, "sequence_parallel: needs tp above 1")
        refuse(
            layout.schedule not in SCHEDULES,
            f"must be one of {', '.join(SCHEDULES)}, got {layout.schedule!r}",
            key="schedule",
        )
        refuse(layout.pp == 1 and (layout.vpp > 1 or layout.stage_layers), "vpp and stage_layers: need pp above 1")
        if (layout.vpp > 1) != (layout.schedule == "interleaved"):
            wanted = {"interleaved": "more than one chunk", "1f1b": "one chunk", "gpipe": "one chunk"}
            number = wanted.get(layout.schedule, "two chunks by itself, without vpp,")
            raise ConfigError(f"{SCHEDULES[layout.schedule]}: {number} on each stage, got vpp={layout.vpp}")
        _ = layout.num_microbatches

    @property
    def accumulate(self) -> int:
        """Micro-batches in one optimizer step of one rank."""
        return int(self.layout.num_microbatches)

    @property
    def place(self) -> Place:
        """The rank on each axis; tensor-parallel ranks are numbered first, then data-parallel ones, then stages.

        >>> TorchRun.of(Job(model="", gpus=16, tp=4, pp=2, zero=3), rank=13).place
        Place(tp=1, data=1, pp=1)
        """
        tp, dp = int(self.layout.tp), int(self.layout.dp)
        return Place(self.rank % tp, self.rank // tp % dp, self.rank // (tp * dp))

    @property
    def chunks(self) -> tuple[int, ...]:
        """The parts of the model that the rank's pipeline stage holds, counted from the embedding to the head.

        >>> TorchRun.of(Job(model="", gpus=4, pp=4, schedule="zb-v", global_batch=8), rank=1).chunks
        (1, 6)
        """
        route, stage = self.layout.routes[0], self.place.pp
        return tuple(route.index((stage, chunk)) for chunk in range(self.layout.chunks))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return torch.bfloat16 if self.training.precision.weight == 2 else torch.float32

    @property
    def computed(self) -> torch.dtype:
        """The dtype of matrix products, and of what pipeline stages send to each other."""
        if not self.training.precision.autocast:
            return self.dtype
        return torch.bfloat16 if self.training.precision.name.startswith("bf16") else torch.float16

    def autocast(self, device: str) -> Any:
        """Return the context in which forward runs on a device: autocast by the precision, or one that does nothing."""
        if not (self.training.precision.autocast or self.training.precision.wrapped):
            return contextlib.nullcontext()
        return torch.autocast(device, dtype=self.computed)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Return the `torch.optim` optimizer of this run for some parameters, with PyTorch's default settings."""
        return OPTIMIZERS[self.training.optimizer.name][1](parameters)

    def flags(self, layers: int | None = None) -> str:
        """The run of a single GPU as flags, with the number of layers; `parse_flags` reads them.

        >>> TorchRun.of(Job(model="", seq_len=128)).flags(2).partition("--precision")[2]
        ' bf16-pure --optimizer adamw --attention flash --layers 2'
        """
        layout, trained = self.layout, self.training
        job = Job(
            model="",
            recompute=str(layout.recompute),
            micro_batch=int(layout.micro_batch),
            global_batch=int(layout.global_batch),
            seq_len=int(layout.seq_len),
            precision=trained.precision.name,
            optimizer=trained.optimizer.name,
            attention=trained.kernels.attention,
        )
        more = {"keep": ",".join(self.keep), "layers": layers}
        return " ".join([job.flags(), *(f"--{name} {value}" for name, value in more.items() if value)])


def parse_flags(text: str) -> tuple[Job, tuple[str, ...], int | None]:
    """Reads what `TorchRun.flags` wrote: (job, operations kept, layers). Raises ConfigError.

    >>> parse_flags("--precision bf16-pure --recompute full --micro-batch 2 --layers 3")[2]
    3
    """
    words = text.split()
    flags: dict[str, Any] = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(*[iter(words)] * 2, strict=False)
    }
    try:
        layers, keep = flags.pop("layers", None), kept_operations(flags.pop("keep", None))
        if unknown := set(flags) - {*STEP}:
            raise ConfigError(f"unknown: {min(unknown)[:40]}")
        job = msgspec.convert({"model": "", **flags}, Job, strict=False)
        TorchRun.of(job, keep=keep)
        return job, keep, None if layers is None else int(layers)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"settings: {error}") from None
