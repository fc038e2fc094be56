"""`loadgauge.capture(...)`: the formulas of a training step of a model of transformers, or of a module of one's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from loadgauge.errors import ConfigError
from loadgauge.optional_deps import needs_torch
from loadgauge.spec.job import Job

if TYPE_CHECKING:
    import torch

    from loadgauge.capture.capture import Captures


class Fields(TypedDict, total=False):
    """Fields of a `Job` that a captured training can have."""

    precision: str
    optimizer: str
    attention: str
    recompute: str
    global_batch: int


def capture(
    target: Any, inputs: Callable[..., Any] | None = None, *, loss: Callable[[Any], torch.Tensor] | None = None,
    step: Callable[..., Any] | None = None, layers: int | None = None, **fields: Unpack[Fields],
) -> Captures:  # fmt: skip
    """Prepare to capture a training step: run on tensors without memory, with sizes that stay symbols.

    target: a name in the catalogue, a path to a config.json, a config object of transformers, or a function that makes a module
    inputs: for a function: what the module is called with, made of sizes; its parameters name them, such as `lambda b, s: ...`
    loss: makes a scalar of what the module returns; default: its `.loss`, or the mean of its first tensor
    step: with a function of one's own: trains once what it made, `step(made, *inputs)`, with losses, backward calls and optimizers
        as it likes; `made` may then be several modules and their optimizers, in a tuple or a dict
    layers: number of layers, instead of the model's own
    fields: as the flags of `loadgauge trace`; a `global_batch` of more than 1: gradients of so many micro-batches accumulate
    Returns `Captures`: `.at(b=2, s=4096)` runs the code once and gives a `Captured`, whose formulas hold wherever its guards do.
    Raises ConfigError without PyTorch, and ConfigError, LayoutError or NotModelled for what cannot be run.

    >>> import loadgauge, torch
    >>> step = loadgauge.capture(lambda: torch.nn.Linear(64, 64), lambda b: torch.empty(b, 64), optimizer="sgd").at(b=8)
    >>> print(step.kept_formula), step.flops(b=100)
    0
    (None, 1638400)
    """
    needs_torch("capture")
    import torch

    from loadgauge.capture.capture import Captures
    from loadgauge.capture.kinds import of_config
    from loadgauge.capture.record import Sized
    from loadgauge.capture.target import config_keys
    from loadgauge.trace.jobs import mean_loss
    from loadgauge.trace.target import config_object, with_layers
    from loadgauge.trace.torch_run import TorchRun

    run = TorchRun.of(Job(model="", seq_len=1, **{"precision": "fp32" if inputs else "bf16-pure", **fields}))  # type: ignore[arg-type]
    if step is not None and (inputs is None or loss is not None or fields):
        raise ConfigError(f"a step has its own {', '.join(fields) or 'loss'}, and needs inputs", key="step")
    if inputs is None:
        config = config_object(config_keys(target), target) if isinstance(target, str) else target
        config = with_layers(config, layers)
        return Captures(of_config(config, run), target if isinstance(target, str) else type(config).__name__)
    if not callable(target) or layers is not None:
        raise ConfigError(
            "with inputs, it is a function that makes a module, which has the layers it has", key="target"
        )
    names = tuple(inspect.signature(inputs).parameters)

    def build(device: str) -> Any:
        with torch.device(device):
            made = target()
        if step is not None:
            return made
        if not isinstance(made, torch.nn.Module):
            raise ConfigError(f"must make a torch.nn.Module, made {type(made).__name__}", key="target")
        return made.train()

    def given(device: str, module: Any, **sizes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with torch.device(device):
            found = inputs(**sizes)
        if isinstance(found, dict):
            return (), found
        return (found if isinstance(found, tuple) else (found,)), {}

    return Captures(Sized(build, given, loss or mean_loss, run, names, step), getattr(target, "__name__", "module"))
