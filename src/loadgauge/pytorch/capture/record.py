"""One training step written down: every operation, what it reads, makes and keeps, and every byte that comes and goes."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from loadgauge.core.base.errors import NotModelled
from loadgauge.pytorch.capture.inputs.inputs import unheard
from loadgauge.pytorch.capture.inputs.tokens import tally_of
from loadgauge.pytorch.capture.lists.quantised import shape_of
from loadgauge.pytorch.capture.requests.regime import COMPILED
from loadgauge.pytorch.capture.requests.sharding import tables_of
from loadgauge.pytorch.capture.symbols.symbolic import Symbols, symbolic_tensors
from loadgauge.pytorch.capture.symbols.values import KeptValues
from loadgauge.pytorch.device.facts.assignments import assigned
from loadgauge.pytorch.device.facts.stated_rows import StatedRows
from loadgauge.pytorch.device.patches import casting_on, replaced
from loadgauge.pytorch.device.read import branches
from loadgauge.pytorch.record.allocations import Stream
from loadgauge.pytorch.record.recording import Op, Recording, recording
from loadgauge.pytorch.trace import no_compiler
from loadgauge.pytorch.trace.programs import own_loops
from loadgauge.pytorch.trace.programs.training import Around, Sized, Training
from loadgauge.pytorch.trace.transformers_api import subject


class Parameter(msgspec.Struct, frozen=True):
    """A parameter, as its storage is used: name, shape [elements], bytes of an element, and whether it is trained.

    shards: ranks that together hold one whole; expert: of a routed expert; summed: tensor-parallel ranks sum its gradient
    base: a matrix in 4 bits, whose own shape it is; wide: held in float32, though what runs reads it in 16 bits
    rows: a table whose gradient is the rows that were looked up
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trained: bool
    shards: int = 1
    expert: bool = False
    summed: bool = False
    base: bool = False
    wide: bool = False
    rows: bool = False


class Recorded(msgspec.Struct):
    """A recorded training of `STEPS` steps. Sizes are ints, or SymPy expressions of `symbols`."""

    ops: list[Op]
    second: int
    """The operation that begins the second step."""
    stream: Stream
    ids: list[int]
    """The storage of each event of the steps; what is freed after them is not among them."""
    changes: list[Any]
    kept: list[Any]
    """Bytes of each storage that the graph of the last step kept beside parameters and inputs."""
    kept_by: list[tuple[str, str, str]]
    """Of each of these: the node, its field and the module that keep it."""
    parameters: dict[str, int]
    """Elements of each parameter, by name; a tied one once."""
    values: tuple[str, ...]
    """Lines that asked for a tensor's value, and got a made-up one."""
    branches: tuple[str, ...]
    """Those of them that decide by it, and the line that came next."""
    assumed: tuple[str, ...]
    """Lines where sizes hang on who was chosen, and what was taken for granted."""
    seconds: float
    nbytes: list[Any]
    """Bytes of each storage at most, by its number."""
    keepers: list[tuple[int, int]]
    """(storage, node of the graph that keeps it), of the last step."""
    weights: dict[int, Parameter]
    """Parameters by the number of their storage."""
    rows: frozenset[int] = frozenset()
    """Storages of sparse gradients."""
    unheard: str = ""
    """The argument by which the model takes a sound, where it ran on tokens alone."""
    of_sound: int = 0
    """Tokens of each sequence that stand for its sound."""
    subject: str = ""
    """What a model with towers ran on (`transformers_api.subject`)."""


class Watched(Training):
    """A training whose values are followed where they are known, and stated where data chooses them."""

    @contextlib.contextmanager
    def prepared(self, mode: Any, device: str) -> Iterator[Callable[[Any], None]]:
        """The context and the step of `Training`, with what is known of values."""
        arrays = replaced((FakeTensor, "numpy", lambda tensor, **how: mode.read.array(tensor, **how)))
        with KeptValues(), assigned(), arrays, casting_on(device):
            stated = mode.facts.stated = StatedRows(self.job.rows, mode.facts.assumed)
            with super().prepared(mode, device) as train:

                def step(observer: Any) -> None:
                    stated.begin()
                    train(observer)

                yield step
        stated.check()

    def called(self, built: Any) -> Callable[..., Any]:
        """Return what is called with the inputs: of a LightningModule, its own step with a batch."""
        if own_loops.takes_steps(built):
            self.losses["what training_step returns"] = None
            return own_loops.by_batch(built, *self.given)
        return own_loops.fitted(built, *self.given, self.losses)

    def _plainly(self, device: str, built: Any) -> Callable[..., None]:
        manual = own_loops.manual_step(built, *self.given)
        if manual is None:
            return super()._plainly(device, built)

        def train(*given: Any, **keywords: Any) -> None:
            with torch.device(device), self.job.run.autocast(device):
                manual(*given, **keywords)

        return train

    def optimizer(self, built: Any) -> torch.optim.Optimizer:
        """Return the optimizer. Raises NotModelled where it is none for sparse gradients that a module has."""
        own = own_loops.configured(built) if own_loops.takes_steps(built) else []
        if self.job.configured and len(own) == 1:
            return own[0]
        optimizer = self.job.run.optimizer([parameter for parameter in built.parameters() if parameter.requires_grad])
        check_sparse(built, optimizer, self.job.run.accumulate)
        return optimizer


def record(
    job: Sized, sizes: Mapping[str, Any], symbols: Symbols | None = None, around: Around | None = None
) -> Recorded:
    """Run two steps on the simulated device and write them down.

    symbols: those that `sizes` are made of; None: plain numbers
    around: makes of the module a context in which all is done
    """
    watched = Watched(job, sizes, around=around)
    tensors = None if symbols is None else symbolic_tensors(symbols)
    with recording(watched, tensors=tensors, by_operation=True) as run:
        run.observer.finish()
        result = _read(run, watched.module, symbols)
        keywords = watched.given[1]
        result.assumed += (*job.notes, *(f"loss: {words}" for words in watched.losses))
        result.subject = subject(getattr(watched.module, "config", None), keywords)
        if job.step is None and (name := unheard(watched.module, keywords)):
            result.unheard = name
            result.assumed += (f"without sound: the model takes {name}, and ran on tokens alone",)
        if no_compiler.asked:
            result.assumed += (COMPILED,)
        if (tally := tally_of(watched.module)) is not None:
            result.of_sound = tally.of_sound
        return result


def _read(run: Recording, module: nn.Module, symbols: Symbols | None) -> Recorded:
    observer, mode = run.observer, run.mode

    def plain(size: Any) -> Any:
        return size if symbols is None or size is None else symbols.expression(size)

    for op in run.ops:
        op.flops = plain(op.flops)
        op.shapes = tuple(tuple(map(plain, shape)) for shape in op.shapes)
    tables = {id(table.weight) for table in (*tables_of(module), *dict(sparse_tables(module)).values())}
    weights = {
        number: Parameter(
            name,
            (*shape_of(one)[0], *(2,) * one.is_complex()),  # of a complex number, both parts are held, and have moments
            one.element_size() // (1 + one.is_complex()),
            one.requires_grad,
            getattr(one, "shards", 1),
            getattr(one, "of_experts", False),
            getattr(one, "summed", False),
            shape_of(one)[1],
            getattr(one, "held_wide", False),
            id(one) in tables,
        )
        for name, one in module.named_parameters()
        if (number := observer.tracker.take(one, "external")) is not None
    }
    ids = list(observer.stream.ids)
    changes = [plain(change) for change in observer.stream.changes[: len(ids)]]
    kept = {one.storage: plain(one.storage_nbytes) for one in observer.saved if not one.owner}
    keepers = {one.storage: (one.node, one.field, one.module) for one in observer.saved if not one.owner}
    return Recorded(
        ops=run.ops,
        second=run.starts[-1],
        stream=observer.stream,
        ids=ids,
        changes=changes,
        kept=list(kept.values()),
        kept_by=list(keepers.values()),
        parameters={name: parameter.numel() for name, parameter in module.named_parameters()},
        values=tuple(mode.read.values),
        branches=branches(mode.read.branches),
        assumed=tuple(f"{line}: {what}" for line, what in mode.facts.assumed.items()),
        seconds=run.seconds,
        nbytes=[plain(one.nbytes) for one in observer.stream.records],
        keepers=list(observer.keepers),
        weights=weights,
        rows=frozenset(filter(None, observer.tracker.rows)),
    )


def sparse_tables(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each table of a module whose gradient is the rows that were looked up, after its name.

    >>> [name for name, _ in sparse_tables(nn.Sequential(nn.Linear(4, 4), nn.Embedding(9, 4, sparse=True)))]
    ['1']
    """
    for name, table in module.named_modules():
        if isinstance(table, nn.Embedding | nn.EmbeddingBag) and table.sparse and table.weight.requires_grad:
            yield name or type(table).__name__, table


def check_sparse(module: nn.Module, optimizer: torch.optim.Optimizer, accumulate: int) -> None:
    """Raise NotModelled where sparse gradients meet an optimizer or an addition for which PyTorch's rows are data.

    Plain SGD adds rows to a table as they are; Adagrad and SparseAdam join equal ones first, of which there are taken to be none
    (`trace.device.sparse_rows`). Momentum joins the rows of all steps, and all else refuses them.
    """
    name = next((name for name, _ in sparse_tables(module)), "")
    if name:
        plain = isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad | torch.optim.SparseAdam) and not any(
            optimizer.defaults.get(key) for key in ("momentum", "weight_decay", "maximize")
        )
        if not plain or accumulate > 1:
            what = type(optimizer).__name__ if not plain else "more than one micro-batch"
            raise NotModelled(f"{name}: sparse gradients with {what}; --optimizer sgd or adagrad, or sparse=False")
