"""Jobs to trace: a Hugging Face config, a module, or a function of one's own, and how each is trained."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from loadgauge.core.base.errors import ConfigError, first_line, refuse
from loadgauge.core.definitions.job.job import Job
from loadgauge.pytorch.device.fake import FakeMode, faking
from loadgauge.pytorch.device.patches import default_dtype
from loadgauge.pytorch.trace.programs.call import fake_like
from loadgauge.pytorch.trace.programs.training import Sized, Training, mean_loss
from loadgauge.pytorch.trace.torch_run import ATTENTIONS, TorchRun
from loadgauge.pytorch.trace.transformers_api import (
    OWN_KERNELS,
    contexts,
    subject,
    text_config,
    with_kernels,
    without_initial_values,
)

OPTIMIZER = "torch.optim, {}, gradients freed after each step"


class ConfigJob(Training):
    """Trains a model of transformers on token ids, from its config: the labels are the ids."""

    def __init__(self, config: Any, run: TorchRun, target: str = "") -> None:
        self.config, self.run = config, run

        def ids(device: str, _: Any, b: int, s: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            tokens = torch.empty((b, s), dtype=torch.long, device=device)
            if not faking():
                tokens.random_(3, min(1000, text_config(config).vocab_size))
            return (), {"input_ids": tokens, "labels": tokens}

        super().__init__(
            Sized(lambda device: build_model(config, run, device, values=not faking()), ids, mean_loss, run),
            {"b": int(run.layout.micro_batch), "s": int(run.layout.seq_len)},
            target or type(config).__name__,
            {
                "settings": run.flags(getattr(text_config(config), "num_hidden_layers", None)),
                "loss": "transformers' own, logits and all",
                "optimizer": OPTIMIZER.format(run.training.optimizer.name),
                **of_tokens(config),
            },
        )


def of_tokens(config: Any) -> dict[str, str]:
    """Return what is taken for granted where a model of transformers is called with token ids, by subject."""
    assumed = {"ids": "not padded, no attention mask"}
    if ran := subject(config, ("input_ids",)):
        assumed["subject"] = ran
    if config.model_type in OWN_KERNELS:
        assumed["kernel"] = OWN_KERNELS[config.model_type]
    return assumed


def build_model(config: Any, run: TorchRun, device: str, values: bool = False) -> Any:
    """The model of a transformers config, in training mode. `values`: initialize its weights.

    Raises ConfigError where transformers has no language model for the config, or refuses it.
    """
    longest = getattr(config, "max_position_embeddings", None)
    refuse(
        longest and run.layout.seq_len > longest, f"seq_len: {run.layout.seq_len} is more than the model's {longest}"
    )
    config.use_cache = False
    return made_of(maker_of(config), config, run, device, values)


def maker_of(config: Any) -> Any:
    """Return what makes the language model of a config: its class's `_from_config`. Raises ConfigError where there is none."""
    import transformers

    names = getattr(config, "architectures", None) or []
    classes = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    fitting = [cls for cls in classes if cls.__name__.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM"))]
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM):
        mapping: Any = auto._model_mapping
        if not fitting and type(config) in mapping:
            fitting = [mapping[type(config)]]
    refuse(not fitting, f"transformers has no language model for {config.model_type!r}")
    return fitting[0]._from_config


def made_of(make: Any, config: Any, run: TorchRun, device: str, values: bool = False) -> Any:
    """The model that a class of transformers makes of a config, in training mode and as a run recomputes it.

    make: its `_from_config`, or an auto class's `from_config`; values: initialize its weights
    Raises ConfigError where transformers refuses the config.
    """
    bare = contextlib.nullcontext() if values else without_initial_values()
    try:
        with default_dtype(run.dtype), torch.device(device), bare:
            model = with_kernels(make, config, ATTENTIONS[run.training.kernels.attention])
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{config.model_type}: {first_line(error)}") from None
    if any(parameter.device.type != torch.device(device).type for parameter in model.parameters()):
        model = model.to(device)  # XLNet's are made by `torch.FloatTensor`, which knows no device but the CPU
    model.tie_weights()  # left out together with the initial values
    if run.layout.recompute.mode != "none":
        more = {"context_fn": contexts(run.keep)} if run.keep else {}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **more})
    return model.train()


class ModuleJob(Training):
    """Trains any module: its parameters and buffers are replaced by fake ones and restored at the end."""

    def __init__(
        self, module: nn.Module, inputs: Any, loss: Callable[[Any], torch.Tensor], run: TorchRun, keywords: Any
    ) -> None:
        def fakes(device: str, _: Any) -> Any:
            memo: dict[int, Any] = {}  # ids that serve as labels too are one tensor
            return tree_map(lambda value: memo.setdefault(id(value), fake_like(value, device)), (inputs, keywords))

        assumed = {"optimizer": OPTIMIZER.format(run.training.optimizer.name)}
        super().__init__(Sized(lambda _: module, fakes, loss, run, ()), {}, type(module).__name__, assumed)
        self.whole = module

    @contextlib.contextmanager
    def prepared(self, mode: FakeMode | None, device: str) -> Iterator[Callable[[Any], None]]:
        """A context that replaces the parameters by fake ones and yields a function that trains one step.

        A step is forward, loss, backward and optimizer. Raises ConfigError without a fake mode: a module is measured elsewhere.
        """
        refuse(mode is None, "a module is measured where it runs: use `measured` or `MeasureCallback`")
        with with_fake_parameters(self.whole, device), super().prepared(mode, device) as step:
            yield step


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


@contextlib.contextmanager
def with_fake_parameters(module: nn.Module, device: str) -> Iterator[None]:
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
                    fake = fake_like(tensor.detach(), device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                table[name] = memo[id(tensor)]
    try:
        yield
    finally:
        for table, own in kept:
            table.clear()
            table.update(own)
