"""One training step written down: every operation, what it reads, makes and keeps, and every byte that comes and goes."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from loadgauge.core.base.errors import ConfigError
from loadgauge.pytorch.capture.inputs.inputs import unheard
from loadgauge.pytorch.capture.inputs.tokens import tally_of
from loadgauge.pytorch.capture.lists.quantised import shape_of
from loadgauge.pytorch.capture.symbols.sparse import check_sparse
from loadgauge.pytorch.capture.symbols.symbolic import Symbols, symbolic_tensors
from loadgauge.pytorch.capture.symbols.values import KeptValues
from loadgauge.pytorch.device.facts.assignments import assigned
from loadgauge.pytorch.device.facts.stated_rows import StatedRows
from loadgauge.pytorch.device.patches import casting_on
from loadgauge.pytorch.device.read import branches, of_program
from loadgauge.pytorch.device.simulated import fake_tensors, simulated_device
from loadgauge.pytorch.record.allocations import INPUTS, Stream, op_name
from loadgauge.pytorch.record.flops import formula
from loadgauge.pytorch.record.observe import FORWARD, Observer, observing
from loadgauge.pytorch.record.sizes import leaves
from loadgauge.pytorch.record.tracker import next_node, node_key
from loadgauge.pytorch.trace import no_compiler
from loadgauge.pytorch.trace.programs.jobs import loss_words, mean_loss
from loadgauge.pytorch.trace.torch_run import TorchRun
from loadgauge.pytorch.trace.transformers_api import subject

STEPS = 2
"""The optimizer's states are made in the first step."""


ASKED = "loadgauge_asked"
"""Of an error: the last line before it that decided by a value which nobody knows."""
Around = Callable[[nn.Module], contextlib.AbstractContextManager[None]]


class Sized(msgspec.Struct, frozen=True):
    """A training whose inputs have sizes, which `names` lists.

    `build(device)` makes the module, `inputs(device, module, **sizes)` what it is called with, `loss` a scalar of what it returns.
    With a `step`, `build` may make anything (modules, optimizers), and `step(made, *inputs)` trains it once; `loss` and `run` are
    left alone then. rows: those that data chooses, by line (`StatedRows`); notes: what is taken for granted, of the answer;
    usual: sizes that have a default
    """

    build: Callable[[str], Any]
    inputs: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    loss: Callable[[Any], torch.Tensor]
    run: TorchRun
    names: tuple[str, ...] = ("b", "s")
    step: Callable[..., Any] | None = None
    rows: Mapping[str, tuple[int, ...] | str] = {}
    notes: tuple[str, ...] = ()
    usual: Mapping[str, int] = {}


class Op(msgspec.Struct):
    """One dispatched operation. reads, makes: numbers of storages; node: of the graph, in backward; events: how many came before
    its end; `flops` None: its kind has work that no formula is known for. order: the number of the node that its forward made, or
    whose backward it is; shapes: of the tensors it reads, where it has FLOPs; causal: whether attention sees the past alone;
    copies: whether it makes a copy in another dtype or place; marks: whether it only marks a place for a profiler;
    packs: whether it is one of bitsandbytes' own, of packed matrices and their scales."""

    name: str
    module: str
    phase: str
    node: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    flops: Any
    events: int
    order: int = -1
    shapes: tuple[tuple[Any, ...], ...] = ()
    causal: bool = False
    copies: bool = False
    marks: bool = False
    packs: bool = False


class Parameter(msgspec.Struct, frozen=True):
    """A parameter, as its storage is used: name, shape [elements], bytes of an element, and whether it is trained.

    shards: ranks that together hold one whole; expert: of a routed expert; summed: tensor-parallel ranks sum its gradient
    base: a matrix in 4 bits, whose own shape it is; wide: held in float32, though what runs reads it in 16 bits
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
    unheard: str = ""
    """The argument by which the model takes a sound, where it ran on tokens alone."""
    of_sound: int = 0
    """Tokens of each sequence that stand for its sound."""
    subject: str = ""
    """What a model with towers ran on (`transformers_api.subject`)."""


def record(
    job: Sized, sizes: Mapping[str, Any], symbols: Symbols | None = None, around: Around | None = None
) -> Recorded:
    """Run two steps on the simulated device and write them down.

    symbols: those that `sizes` are made of; None: plain numbers
    around: makes of the module a context in which all is done
    """
    place = simulated_device()
    begun = time.perf_counter()
    ops: list[Op] = []
    with contextlib.ExitStack() as stack:
        mode: Any = stack.enter_context(fake_tensors() if symbols is None else symbolic_tensors(symbols))
        stack.enter_context(KeptValues())
        stack.enter_context(assigned())
        stack.enter_context(casting_on(place))
        stated = mode.facts.stated = StatedRows(job.rows, mode.facts.assumed)
        made = job.build(place)
        module = _module(made)
        if around is not None:
            stack.enter_context(around(module))
        given, keywords = job.inputs(place, module, **sizes)
        losses: dict[str, None] = {}
        train = _step(job, place, made, losses)
        observer = stack.enter_context(observing(place))
        observer.name(module)
        observer.tracker.claim(tree_leaves((given, keywords)), INPUTS)
        observer.tracker.watchers.append(lambda *call: None if views(call[0]) else ops.append(_op(observer, *call)))
        observer.begin(FORWARD)
        with _no_collection():
            for _ in range(STEPS):
                second = len(ops)
                stated.begin()
                try:
                    train(*given, **keywords)
                except Exception as error:  # what it read before may be why
                    error.__dict__[ASKED] = next(reversed(mode.read.branches), "")
                    raise
        stated.check()
        observer.finish()
        found = _read(observer, ops, second, module, symbols, mode, begun)
        found.assumed += (*job.notes, *(f"loss: {words}" for words in losses))
        found.subject = subject(getattr(module, "config", None), keywords)
        if job.step is None and (name := unheard(module, keywords)):
            found.unheard = name
            found.assumed += (f"without sound: the model takes {name}, and ran on tokens alone",)
        if any(map(of_program, no_compiler.asked)):
            found.assumed += ("torch.compile: the code runs eagerly, compiled it keeps less",)
        if (tally := tally_of(module)) is not None:
            found.of_sound = tally.of_sound
        return found


def _module(made: Any) -> nn.Module:
    """Return what has the parameters: a module, or all modules in a tuple or a dict."""
    if isinstance(made, nn.Module):
        return made
    named = made if isinstance(made, dict) else dict(enumerate(made if isinstance(made, list | tuple) else (made,)))
    found = {str(name): one for name, one in named.items() if isinstance(one, nn.Module)}
    if not found:
        raise ConfigError(f"must make a torch.nn.Module, made {type(made).__name__}", key="target")
    return nn.ModuleDict(found)


def _step(job: Sized, place: str, made: Any, losses: dict[str, None]) -> Callable[..., None]:
    """A function of the inputs that trains once: forward, backward and the optimizer, or the user's own step.

    losses: what the loss was taken to be is put there, where that is not the result's own
    """
    if job.step is not None:
        own = job.step

        def of_user(*given: Any, **keywords: Any) -> None:
            with torch.device(place):
                own(made, *given, **keywords)

        return of_user
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    if callable(getattr(made, "training_step", None)) and hasattr(made, "configure_optimizers"):  # a LightningModule
        own_step, losses["what training_step returns"] = made.training_step, None

        def called(*given: Any, **keywords: Any) -> Any:
            return own_step(keywords or (given[0] if len(given) == 1 else given), 0)

    else:
        called = made
    optimizer = job.run.optimizer(trained)
    check_sparse(made, optimizer, job.run.accumulate)

    def train(*given: Any, **keywords: Any) -> None:
        for _ in range(job.run.accumulate):
            with job.run.autocast(place):
                result = called(*given, **keywords)
                if job.loss is mean_loss and (words := loss_words(result)):
                    losses[words] = None
                loss = job.loss(result)
                del result
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return train


@functools.cache
def views(func: Any) -> bool:
    """Return whether an operation only looks at its argument in another way, which takes neither memory nor time."""
    schema = getattr(func, "_schema", None)
    if func is torch.ops.aten._unsafe_view.default:  # does not say so
        return True
    made = [] if schema is None else schema.returns
    return bool(made) and all(one.alias_info is not None and not one.alias_info.is_write for one in made)


def _op(observer: Observer, func: Any, args: Any, kwargs: Any, out: Any) -> Op:
    tracker = observer.tracker

    def storages(tree: Any) -> tuple[int, ...]:
        found = (tracker.take(leaf, "external") for leaf in leaves((tree,)) if isinstance(leaf, torch.Tensor))
        return tuple(dict.fromkeys(number for number in found if number is not None))

    count = formula(func)
    flops = 0 if count is None else None if isinstance(count, str) else count(args, kwargs, out)
    node = node_key(torch._C._current_autograd_node())
    module = tracker.module or (observer.module_of(node) if node >= 0 else "")
    shapes = (
        ()
        if count is None or isinstance(count, str)
        else tuple(tuple(one.shape) for one in leaves(args) if isinstance(one, torch.Tensor))
    )
    return Op(
        op_name(func),
        module,
        observer.phase,
        node,
        storages((args, kwargs)),
        storages(out),
        flops,
        len(observer.stream.ids),
        node if node >= 0 else next_node() - 1,
        shapes,
        bool(shapes) and _causal(func, args, kwargs),
        func is torch.ops.aten._to_copy.default,
        func.namespace == "profiler",
        func.namespace == "bitsandbytes",
    )


def _causal(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation is told to look at the past alone."""
    names = [one.name for one in func._schema.arguments] if hasattr(func, "_schema") else []
    if "is_causal" not in names:
        return False
    place = names.index("is_causal")
    return bool(args[place] if place < len(args) else (kwargs or {}).get("is_causal", False))


def _read(
    observer: Observer, ops: list[Op], second: int, module: nn.Module, symbols: Symbols | None, mode: Any, begun: float
) -> Recorded:
    def plain(size: Any) -> Any:
        return size if symbols is None or size is None else symbols.expression(size)

    for op in ops:
        op.flops = plain(op.flops)
        op.shapes = tuple(tuple(map(plain, shape)) for shape in op.shapes)
    weights = {
        number: Parameter(
            name,
            shape_of(one)[0],
            one.element_size(),
            one.requires_grad,
            getattr(one, "shards", 1),
            getattr(one, "of_experts", False),
            getattr(one, "summed", False),
            shape_of(one)[1],
            getattr(one, "held_wide", False),
        )
        for name, one in module.named_parameters()
        if (number := observer.tracker.take(one, "external")) is not None
    }
    ids = list(observer.stream.ids)
    changes = [plain(change) for change in observer.stream.changes[: len(ids)]]
    kept = {one.storage: plain(one.storage_nbytes) for one in observer.saved if not one.owner}
    keepers = {one.storage: (one.node, one.field, one.module) for one in observer.saved if not one.owner}
    return Recorded(
        ops=ops,
        second=second,
        stream=observer.stream,
        ids=ids,
        changes=changes,
        kept=list(kept.values()),
        kept_by=list(keepers.values()),
        parameters={name: parameter.numel() for name, parameter in module.named_parameters()},
        values=tuple(mode.read.values),
        branches=branches(mode.read.branches),
        assumed=tuple(f"{line}: {what}" for line, what in mode.facts.assumed.items()),
        seconds=time.perf_counter() - begun,
        nbytes=[plain(one.nbytes) for one in observer.stream.records],
        keepers=list(observer.keepers),
        weights=weights,
    )


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage is collected before and after only: a collection in between would free circles at another operation each time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
