"""Jobs to trace: a Hugging Face config, a module, or a function of one's own, and how each is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from loadgauge.errors import ConfigError
from loadgauge.trace.call import fake_like
from loadgauge.trace.checkpointing import KEPT, contexts
from loadgauge.trace.device.fake import FakeMode
from loadgauge.trace.record.allocations import INPUTS

if TYPE_CHECKING:
    from loadgauge.trace.record.observe import Observer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "adamw-loop": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}
"""Optimizers of PyTorch, in its own default way (on CUDA: foreach) unless the name says otherwise."""
PRECISIONS = ("bf16", "bf16-mixed", "fp16-mixed", "fp32")
"""bf16: weights, gradients and states in bfloat16; mixed: in float32, computed under autocast."""


CHECKPOINTING = ("none", "full", "selective")


class Job(Protocol):
    """What a trace needs to know."""

    target: str
    assumed: dict[str, str]

    def prepared(self, mode: FakeMode | None, device: str) -> Any:
        """A context that makes the model and gives a function that trains one step."""
        ...

    def introduce(self, observer: Observer) -> None:
        """Says what is there before the first step."""
        ...


class Settings(msgspec.Struct, frozen=True):
    """How a model is trained. `checkpointing`: none, full (every layer is made again in backward), or selective (every
    layer, but for the operations of `keep`)."""

    optimizer: str = "adamw"
    precision: str = "bf16"
    checkpointing: str = "none"
    attention: str = "sdpa"
    seq_len: int = 4096
    micro_batch: int = 1
    accumulate: int = 1
    keep: str = ",".join(KEPT)

    def check(self) -> None:
        """Raises ConfigError for what is not known."""
        for name, known in (
            ("optimizer", tuple(OPTIMIZERS)),
            ("precision", PRECISIONS),
            ("checkpointing", CHECKPOINTING),
            ("attention", ("sdpa", "eager")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}: must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("seq_len", "micro_batch", "accumulate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: must be at least 1, got {getattr(self, name)}")

    def flags(self, layers: int | None = None) -> str:
        """As the command line has them, and the number of layers with them.

        >>> Settings(seq_len=128).flags(2).endswith("--seq-len 128 --micro-batch 1 --accumulate 1 --layers 2")
        True
        """
        given = {**msgspec.structs.asdict(self), **({} if layers is None else {"layers": layers})}
        if self.checkpointing != "selective":
            del given["keep"]
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items())

    @classmethod
    def of_flags(cls, text: str) -> tuple[Settings, int | None]:
        """The settings, and the number of layers, that `flags` gave. Raises ConfigError.

        >>> Settings.of_flags(Settings(seq_len=128).flags(2)) == (Settings(seq_len=128), 2)
        True
        """
        words = text.split()
        given = {
            name.removeprefix("--").replace("-", "_"): value for name, value in zip(*[iter(words)] * 2, strict=False)
        }
        try:
            layers = given.pop("layers", None)
            found = msgspec.convert(given, cls, strict=False), None if layers is None else int(layers)
            found[0].check()
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(f"settings: {error}") from None
        return found

    @property
    def dtype(self) -> torch.dtype:
        """That of the weights."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def autocast(self, device: str) -> Any:
        """The region that forward runs in."""
        if not self.precision.endswith("mixed"):
            return contextlib.nullcontext()
        return torch.autocast(device, dtype=torch.bfloat16 if self.precision.startswith("bf16") else torch.float16)


class ConfigJob:
    """Trains a model of transformers on token ids, from its config: the labels are the ids."""

    def __init__(self, config: Any, settings: Settings, target: str = "") -> None:
        settings.check()
        self.config, self.settings = config, settings
        self.target = target or type(config).__name__
        self.assumed = {
            "settings": settings.flags(getattr(config.get_text_config(), "num_hidden_layers", None)),
            "loss": "transformers' own, logits and all",
            "optimizer": f"torch.optim, {settings.optimizer}, gradients freed after each step",
            "ids": "not padded, no attention mask",
        }
        self._model: Any = None
        self._ids: Any = None

    @contextlib.contextmanager
    def prepared(self, mode: FakeMode | None, device: str) -> Iterator[Callable[[Any], None]]:
        """Makes the model, with values where there is no fake mode; a step is forward, backward and optimizer."""
        settings = self.settings
        self._model = built(self.config, settings, device, values=mode is None)
        ids = torch.empty((settings.micro_batch, settings.seq_len), dtype=torch.long, device=device)
        if mode is None:
            ids.random_(3, min(1000, self.config.get_text_config().vocab_size))
        self._ids = ids
        optimizer = OPTIMIZERS[settings.optimizer]([one for one in self._model.parameters() if one.requires_grad])

        def step(_: Any) -> None:
            for _ in range(settings.accumulate):
                with settings.autocast(device):
                    loss = self._model(input_ids=ids, labels=ids).loss
                loss.backward()
                del loss
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        yield step

    def introduce(self, observer: Observer) -> None:
        """Names the modules; the ids are an input."""
        observer.name(self._model)
        observer.tracker.claim([self._ids], INPUTS)


def built(config: Any, settings: Settings, device: str, values: bool = False) -> Any:
    """The model of a config, in training mode, with initial `values` or without."""
    import transformers
    from transformers.initialization import no_init_weights

    if settings.seq_len > (getattr(config, "max_position_embeddings", None) or settings.seq_len):
        raise ConfigError(f"seq_len: {settings.seq_len} is more than the model's {config.max_position_embeddings}")
    names = getattr(config, "architectures", None) or []
    kinds = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    fitting = [kind for kind in kinds if kind.__name__.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM"))]
    config.use_cache = False
    default = torch.get_default_dtype()
    torch.set_default_dtype(settings.dtype)
    try:
        with torch.device(device), contextlib.nullcontext() if values else no_init_weights():
            if fitting:
                model = fitting[0]._from_config(config, attn_implementation=settings.attention)
            else:
                auto: Any = transformers.AutoModelForCausalLM
                if type(config) not in auto._model_mapping:
                    auto = transformers.AutoModelForMaskedLM
                if type(config) not in auto._model_mapping:
                    raise ConfigError(f"transformers has no language model for {config.model_type!r}")
                model = auto.from_config(config, attn_implementation=settings.attention)
    except (ValueError, ImportError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{config.model_type}: {str(error).strip().splitlines()[0]}") from None
    finally:
        torch.set_default_dtype(default)
    model.tie_weights()  # left out together with the initial values
    if settings.checkpointing != "none":
        more = {"context_fn": contexts(settings.keep.split(","))} if settings.checkpointing == "selective" else {}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **more})
    return model.train()


class ModuleJob:
    """Trains any module: its parameters and buffers are exchanged for fake ones and come back at the end."""

    def __init__(
        self, module: nn.Module, inputs: Any, loss: Callable[[Any], torch.Tensor], settings: Settings, keywords: Any
    ) -> None:
        settings.check()
        self.module, self.inputs, self.loss, self.settings = module, inputs, loss, settings
        self.keywords = keywords
        self.target = type(module).__name__
        self.assumed = {"optimizer": f"torch.optim, {settings.optimizer}, gradients freed after each step"}
        self._fake: Any = None

    @contextlib.contextmanager
    def prepared(self, mode: FakeMode | None, device: str) -> Iterator[Callable[[Any], None]]:
        """Exchanges the parameters; a step is forward, loss, backward and optimizer."""
        if mode is None:
            raise ConfigError("a module is measured where it runs: use `measured` or `MeasureCallback`")
        memo: dict[int, Any] = {}  # ids that serve as labels too are one tensor

        def fake(one: Any) -> Any:
            if id(one) not in memo:
                memo[id(one)] = fake_like(mode, one, device)
            return memo[id(one)]

        self._fake = tree_map(fake, (self.inputs, self.keywords))
        inputs, keywords = self._fake
        with exchanged(self.module, mode, device):
            trained = [one for one in self.module.parameters() if one.requires_grad]
            optimizer = OPTIMIZERS[self.settings.optimizer](trained) if trained else None

            def step(_: Any) -> None:
                with self.settings.autocast(device):
                    loss = self.loss(self.module(*inputs, **keywords))
                loss.backward()
                del loss
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)

            yield step

    def introduce(self, observer: Observer) -> None:
        """Names the modules; what is given to forward is an input."""
        observer.name(self.module)
        observer.tracker.claim(tree_leaves(self._fake), INPUTS)


def of_module(
    module: nn.Module, *inputs: Any, loss: Callable[[Any], torch.Tensor] | None = None, optimizer: str = "adamw",
    precision: str = "fp32", keywords: dict[str, Any] | None = None,
) -> ModuleJob:  # fmt: skip
    """A job for a module, called with these inputs (real, or on the device `meta`).

    `loss` makes one number of what the module returns: without it, its `.loss`, or the mean of its first tensor.
    `precision` only says whether forward runs under autocast: the weights keep their dtype.
    """
    settings = Settings(optimizer=optimizer, precision=precision)
    return ModuleJob(module, inputs, loss or mean_loss, settings, keywords or {})


def mean_loss(result: Any) -> torch.Tensor:
    """The `.loss` of a result, or the mean of its first tensor."""
    own = getattr(result, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not tensors:
        raise ConfigError("the module returns no tensor to make a loss of; give one as `loss`")
    return tensors[0].float().mean() if tensors[0].dim() else tensors[0]


@contextlib.contextmanager
def exchanged(module: nn.Module, mode: FakeMode, device: str) -> Iterator[None]:
    """The module with fake parameters and buffers, tied ones tied; its own come back at the end."""
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
