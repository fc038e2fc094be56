"""Jobs to trace: a Hugging Face config, a module, or a function of one's own, and how each is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from loadgauge.core.base.errors import ConfigError, first_line
from loadgauge.core.definitions.job.job import Job
from loadgauge.pytorch.device.fake import FakeMode
from loadgauge.pytorch.record.allocations import INPUTS
from loadgauge.pytorch.trace.checkpointing import contexts
from loadgauge.pytorch.trace.programs.call import fake_like
from loadgauge.pytorch.trace.torch_run import ATTENTIONS, TorchRun
from loadgauge.pytorch.trace.transformers_api import (
    OWN_KERNELS,
    subject,
    text_config,
    with_kernels,
    without_initial_values,
)

if TYPE_CHECKING:
    from loadgauge.pytorch.record.observe import Observer


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


class ConfigJob:
    """Trains a model of transformers on token ids, from its config: the labels are the ids."""

    def __init__(self, config: Any, run: TorchRun, target: str = "") -> None:
        self.config, self.run = config, run
        self.target = target or type(config).__name__
        self.assumed = {
            "settings": run.flags(getattr(text_config(config), "num_hidden_layers", None)),
            "loss": "transformers' own, logits and all",
            "optimizer": f"torch.optim, {run.training.optimizer.name}, gradients freed after each step",
            "ids": "not padded, no attention mask",
        }
        if ran := subject(config, ("input_ids",)):
            self.assumed["subject"] = ran
        if config.model_type in OWN_KERNELS:
            self.assumed["kernel"] = OWN_KERNELS[config.model_type]
        self._model: Any = None
        self._ids: Any = None

    @contextlib.contextmanager
    def prepared(self, mode: FakeMode | None, device: str) -> Iterator[Callable[[Any], None]]:
        """A context that builds the model on `device` and yields a function that trains one step: forward, backward, optimizer.

        mode: the fake mode in which it is built; None: with real, random values. Raises ConfigError where transformers cannot
        build it.
        """
        run = self.run
        self._model = build_model(self.config, run, device, values=mode is None)
        ids = torch.empty((int(run.layout.micro_batch), int(run.layout.seq_len)), dtype=torch.long, device=device)
        if mode is None:
            ids.random_(3, min(1000, text_config(self.config).vocab_size))
        self._ids = ids
        optimizer = run.optimizer([parameter for parameter in self._model.parameters() if parameter.requires_grad])

        def step(_: Any) -> None:
            for _ in range(run.accumulate):
                with run.autocast(device):
                    loss = self._model(input_ids=ids, labels=ids).loss
                loss.backward()
                del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        yield step

    def introduce(self, observer: Observer) -> None:
        """Report the modules' names to the observer, and the token ids as an input."""
        observer.name(self._model)
        observer.tracker.claim([self._ids], INPUTS)


def build_model(config: Any, run: TorchRun, device: str, values: bool = False) -> Any:
    """The model of a transformers config, in training mode. `values`: initialize its weights.

    Raises ConfigError where transformers has no language model for the config, or refuses it.
    """
    import transformers

    longest = getattr(config, "max_position_embeddings", None)
    if longest and run.layout.seq_len > longest:
        raise ConfigError(f"seq_len: {run.layout.seq_len} is more than the model's {longest}")
    names = getattr(config, "architectures", None) or []
    classes = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    fitting = [cls for cls in classes if cls.__name__.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM"))]
    attention = ATTENTIONS[run.training.kernels.attention]
    config.use_cache = False
    default = torch.get_default_dtype()
    torch.set_default_dtype(run.dtype)
    try:
        with torch.device(device), contextlib.nullcontext() if values else without_initial_values():
            if fitting:
                model = with_kernels(fitting[0]._from_config, config, attention)
            else:
                auto: Any = transformers.AutoModelForCausalLM
                if type(config) not in auto._model_mapping:
                    auto = transformers.AutoModelForMaskedLM
                if type(config) not in auto._model_mapping:
                    raise ConfigError(f"transformers has no language model for {config.model_type!r}")
                model = with_kernels(auto.from_config, config, attention)
    except (ValueError, ImportError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{config.model_type}: {first_line(error)}") from None
    finally:
        torch.set_default_dtype(default)
    model.tie_weights()  # left out together with the initial values
    if run.layout.recompute.mode != "none":
        more = {"context_fn": contexts(run.keep)} if run.keep else {}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **more})
    return model.train()


class ModuleJob:
    """Trains any module: its parameters and buffers are replaced by fake ones and restored at the end."""

    def __init__(
        self, module: nn.Module, inputs: Any, loss: Callable[[Any], torch.Tensor], run: TorchRun, keywords: Any
    ) -> None:
        self.module, self.inputs, self.loss, self.run = module, inputs, loss, run
        self.keywords = keywords
        self.target = type(module).__name__
        self.assumed = {"optimizer": f"torch.optim, {run.training.optimizer.name}, gradients freed after each step"}
        self._fake: Any = None

    @contextlib.contextmanager
    def prepared(self, mode: FakeMode | None, device: str) -> Iterator[Callable[[Any], None]]:
        """A context that replaces the parameters by fake ones and yields a function that trains one step.

        A step is forward, loss, backward and optimizer. Raises ConfigError without a fake mode: a module is measured elsewhere.
        """
        if mode is None:
            raise ConfigError("a module is measured where it runs: use `measured` or `MeasureCallback`")
        memo: dict[int, Any] = {}  # ids that serve as labels too are one tensor

        def fake(value: Any) -> Any:
            if id(value) not in memo:
                memo[id(value)] = fake_like(mode, value, device)
            return memo[id(value)]

        self._fake = tree_map(fake, (self.inputs, self.keywords))
        inputs, keywords = self._fake
        with with_fake_parameters(self.module, mode, device):
            trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
            optimizer = self.run.optimizer(trained) if trained else None

            def step(_: Any) -> None:
                with self.run.autocast(device):
                    loss = self.loss(self.module(*inputs, **keywords))
                loss.backward()
                del loss
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)

            yield step

    def introduce(self, observer: Observer) -> None:
        """Report the modules' names to the observer, and what is given to forward as inputs."""
        observer.name(self.module)
        observer.tracker.claim(tree_leaves(self._fake), INPUTS)


def of_module(
    module: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    keywords: dict[str, Any] | None = None,
) -> ModuleJob:
    """A job that trains a module, called with `inputs` and `keywords` (real tensors, or on the device `meta`).

    loss: makes a scalar of what the module returns; default: its `.loss`, or the mean of its first tensor
    precision: only decides whether forward runs under autocast (`bf16-autocast`, ...); the weights keep their dtype
    Raises ConfigError for an unknown optimizer or precision.
    """
    run = TorchRun.of(Job(model="", optimizer=optimizer, precision=precision))
    return ModuleJob(module, inputs, loss or mean_loss, run, keywords or {})


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
        named = {str(place): one for place, one in enumerate(result)}
    scalars = {name: one for name, one in named.items() if isinstance(one, torch.Tensor) and not one.dim()}
    # what has no gradient is measured beside, such as an accuracy; what is no scalar is the result beside its loss
    losses = {name: one for name, one in scalars.items() if one.requires_grad} or (
        scalars if len(scalars) == len(named) else {}
    )
    if len(named) > 1 and losses:
        names = ", ".join(map(str, losses))
        return list(losses.values()), f"the sum of {names}" if len(losses) > 1 else f"what the result has at {names}"
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not tensors:
        raise ConfigError("the module returns no tensor to make a loss of; give one as `loss`")
    which = (
        "the tensor that it returns" if len(tensors) == 1 else f"the first of {len(tensors)} tensors that it returns"
    )
    return tensors[:1], f"the mean of {which}" if tensors[0].dim() else which if len(tensors) > 1 else ""


@contextlib.contextmanager
def with_fake_parameters(module: nn.Module, mode: FakeMode, device: str) -> Iterator[None]:
    """A context in which the module has fake parameters and buffers on `device`, tied ones tied; its own return at the end."""
    memo: dict[int, Any] = {}
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            kept.append((table, dict(table)))
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in memo:
                    fake = fake_like(mode, tensor.detach(), device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                table[name] = memo[id(tensor)]
    try:
        yield
    finally:
        for table, own in kept:
            table.clear()
            table.update(own)
