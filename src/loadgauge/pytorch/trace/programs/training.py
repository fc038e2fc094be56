"""A training that can be watched: what is made, what it is called with, and what a step does."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, cast

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from loadgauge.core.base.errors import refuse
from loadgauge.pytorch.device.fake import FakeMode
from loadgauge.pytorch.record.allocations import INPUTS
from loadgauge.pytorch.record.observe import Observer
from loadgauge.pytorch.trace.programs.own_loops import fitted, spread
from loadgauge.pytorch.trace.programs.script import cuda_is
from loadgauge.pytorch.trace.torch_run import TorchRun

Around = Callable[[nn.Module], contextlib.AbstractContextManager[None]]


class Traceable(Protocol):
    """A training that can be traced or measured."""

    target: str
    assumed: dict[str, str]

    def prepared(self, mode: FakeMode | None, device: str) -> Any:
        """A context that builds the model on `device` and yields a function that trains one step."""
        ...

    def introduce(self, observer: Observer) -> None:
        """Reports to the observer which tensors and modules exist before the first step."""
        ...


class Sized(msgspec.Struct, frozen=True):
    """A training whose inputs have sizes, which `names` lists.

    `build(device)` makes the module, `inputs(device, module, **sizes)` what it is called with, `loss` a scalar of what it returns.
    With a `step`, `build` may make anything (modules, optimizers), and `step(made, *inputs)` trains it once; `loss` and `run` are
    left alone then. rows: those that data chooses, by line (`StatedRows`); notes: what is taken for granted, of the answer;
    usual: sizes that have a default; placed: a tensor that is made without a device lies on the card;
    configured: a LightningModule's own optimizer is taken; maker: what a script makes it with
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
    placed: bool = False
    configured: bool = False
    maker: Any = None


class Training:
    """A `Sized` training at some sizes, which are numbers or symbols.

    around: makes of the module a context in which all is done; losses: what they were made of, where not the result's own
    """

    def __init__(
        self, job: Sized, sizes: Mapping[str, Any], target: str = "", assumed: Any = (), around: Around | None = None
    ) -> None:
        self.job, self.sizes, self.target, self.around = job, sizes, target, around
        self.assumed: dict[str, str] = dict(assumed)
        self.losses: dict[str, None] = {}
        self.module: Any = None
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    @contextlib.contextmanager
    def prepared(self, mode: FakeMode | None, device: str) -> Iterator[Callable[[Any], None]]:
        """A context that builds the model on `device` and yields a function that trains one step: forward, backward, optimizer.

        mode: the fake mode in which it is built; None: with real, random values. Raises ConfigError where it cannot be built.
        """
        with cuda_is(device, self.job.maker), contextlib.ExitStack() as stack:
            built = self.job.build(device)
            self.module = module_of(built)
            if self.around is not None:
                stack.enter_context(self.around(self.module))
            positional, keywords = self.given = self.job.inputs(device, self.module, **self.sizes)
            train = self._by_user(device, built) if self.job.step is not None else self._plainly(device, built)
            yield lambda _: train(*positional, **keywords)

    def introduce(self, observer: Observer) -> None:
        """Report the modules' names to the observer, and what they are called with as inputs."""
        observer.name(self.module)
        observer.tracker.claim(tree_leaves(self.given), INPUTS)

    def called(self, built: Any) -> Callable[..., Any]:
        """Return what is called with the inputs."""
        return built  # type: ignore[no-any-return]

    def optimizer(self, built: Any) -> torch.optim.Optimizer | None:
        """Return the optimizer of what is trained; None where nothing is."""
        trained = [parameter for parameter in built.parameters() if parameter.requires_grad]
        return self.job.run.optimizer(trained) if trained else None

    def _by_user(self, device: str, built: Any) -> Callable[..., None]:
        before = spread(built, self.job.step, *self.given)  # type: ignore[arg-type]
        step = fitted(self.job.step, *self.given, self.losses, *before)  # type: ignore[arg-type]

        def train(*batch: Any, **keywords: Any) -> None:
            with torch.device(device):
                step(*batch, **keywords)

        return train

    def _plainly(self, device: str, built: Any) -> Callable[..., None]:
        job, called, optimizer = self.job, self.called(built), self.optimizer(built)

        def train(*batch: Any, **keywords: Any) -> None:
            for _ in range(job.run.accumulate):
                with job.run.autocast(device), torch.device(device) if job.placed else contextlib.nullcontext():
                    result = called(*batch, **keywords)
                    if job.loss is mean_loss and (words := loss_words(result)):
                        self.losses[words] = None
                    loss = job.loss(result)
                    del result
                loss.backward()
                del loss
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return train


def module_of(built: Any) -> nn.Module:
    """Return what has the parameters: a module, or all modules in a tuple, a dict or an object. Raises ConfigError without one.

    >>> sorted(name for name, _ in module_of({"net": nn.Linear(2, 2), "rate": 0.1}).named_parameters())
    ['net.bias', 'net.weight']
    """
    if isinstance(built, nn.Module):
        return built
    named = built if isinstance(built, dict) else getattr(built, "__dict__", None)
    if named is None:
        named = dict(enumerate(built if isinstance(built, list | tuple) else (built,)))
    modules = {str(name): value for name, value in named.items() if isinstance(value, nn.Module)}
    refuse(not modules, f"must make a torch.nn.Module, made {type(built).__name__}", key="target")
    return nn.ModuleDict(modules)


def mean_loss(result: Any) -> torch.Tensor:
    """Return a scalar to train on: a result's loss, the sum of its losses, or the mean of its first floating-point tensor.

    Its loss is its `.loss`, or what a dict has at "loss"; its losses are the scalars of a dict, tuple or list that have a gradient.
    Raises ConfigError where there is no tensor.

    >>> mean_loss({"boxes": torch.tensor(2.0), "classes": torch.tensor(0.5)})
    tensor(2.5000)
    """
    taken, _ = _losses(result)
    if len(taken) > 1:
        return cast(torch.Tensor, sum(taken))  # as training scripts add them
    return taken[0].float().mean() if taken[0].dim() else taken[0]


def loss_words(result: Any) -> str:
    """Return what `mean_loss` takes for the loss of a result; "" where that is its own `.loss`, or all that there is.

    >>> loss_words({"boxes": torch.tensor(2.0), "classes": torch.tensor(0.5)})
    'the sum of boxes, classes'
    """
    return _losses(result)[1]


def _losses(result: Any) -> tuple[list[torch.Tensor], str]:
    """The tensors of which a loss is made, and in words."""
    own = getattr(result, "loss", None)
    if isinstance(own, torch.Tensor):
        return [own], ""
    if isinstance(result, Mapping) and isinstance(own := result.get("loss"), torch.Tensor):
        return [own], "what the result has at loss"
    named = dict(result) if isinstance(result, Mapping) else {}
    if isinstance(result, tuple | list):
        named = {str(index): output for index, output in enumerate(result)}
    scalars = {name: output for name, output in named.items() if isinstance(output, torch.Tensor) and not output.dim()}
    # what has no gradient is measured beside, such as an accuracy; what is no scalar is the result beside its loss
    losses = {name: output for name, output in scalars.items() if output.requires_grad} or (
        scalars if len(scalars) == len(named) else {}
    )
    if len(named) > 1 and losses:
        names = ", ".join(map(str, losses))
        return list(losses.values()), f"the sum of {names}" if len(losses) > 1 else f"what the result has at {names}"
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    refuse(not tensors, "the module returns no tensor to make a loss of; give one as `loss`")
    which = (
        "the tensor that it returns" if len(tensors) == 1 else f"the first of {len(tensors)} tensors that it returns"
    )
    return tensors[:1], f"the mean of {which}" if tensors[0].dim() else which if len(tensors) > 1 else ""
