"""`loadgauge.capture(...)`: the formulas of a training step of a model of transformers, or of a module of one's own."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from loadgauge.core.base.errors import ConfigError, refuse
from loadgauge.core.base.files import is_script
from loadgauge.core.base.optional_deps import needs_torch
from loadgauge.core.definitions.job.flag_types import CaptureFlags
from loadgauge.core.definitions.job.job import Job

if TYPE_CHECKING:
    import torch

    from loadgauge.pytorch.capture.capture import Captures
    from loadgauge.pytorch.trace.programs.training import Sized
    from loadgauge.pytorch.trace.torch_run import TorchRun


def capture(
    target: Any,
    inputs: Callable[..., Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    step: Callable[..., Any] | None = None,
    layers: int | None = None,
    pictures: Sequence[tuple[int, int]] = (),
    freeze: Sequence[str] = (),
    head: str = "",
    rows: Mapping[str, int | Sequence[int] | str] | str = {},
    **fields: Unpack[CaptureFlags],
) -> Captures:
    """Prepare to capture a training step: run on tensors without memory, with sizes that stay symbols.

    target: a name in the catalogue, a path to a config.json, diffusers:CLASS, timm:NAME, torchvision:NAME, a config object of
        transformers, or a function that makes a module
    inputs: for a function: what the module is called with, made of sizes; its parameters name them, such as `lambda b, s: ...`
    loss: makes a scalar of what the module returns; default: its `.loss`, or the mean of its first tensor
    step: with a function of one's own: trains once what it made, `step(made, *inputs)`, with losses, backward calls and optimizers
        as it likes; `made` may then be several modules and their optimizers, in a tuple or a dict
    layers: number of layers, instead of the model's own
    pictures: width and height of each picture of a sequence [pixels], as the model's image processor takes them; none: one picture,
        as large as the model sees at once
    head: of a model of transformers, instead of what its `architectures` name: classification, tokens, answers, embedding, picture,
        detection or sound (`data/capture/heads.toml`)
    freeze: parameters whose names contain one of these are not trained, such as "vision_tower"
    rows: how many rows the program's data chooses, by the line that asks, such as {"boxes.py:41": 2000}; a list: each time it is
        reached in a step; "most": as many as there are, at a line or, in place of a dict, at every line
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

    from loadgauge.pytorch.capture.capture import Captures
    from loadgauge.pytorch.capture.inputs.kinds import of_config
    from loadgauge.pytorch.capture.inputs.libraries import is_library, of_keys, usual_precision
    from loadgauge.pytorch.capture.inputs.pictures import processed
    from loadgauge.pytorch.capture.inputs.target import config_keys, processor_keys
    from loadgauge.pytorch.capture.inputs.tokens import vectors_of
    from loadgauge.pytorch.trace.programs.target import config_object, with_layers
    from loadgauge.pytorch.trace.torch_run import TorchRun

    keys = config_keys(target) if isinstance(target, str) and inputs is None else {}
    usual = usual_precision(keys, target) if is_library(keys) else None
    run = TorchRun.of(Job(model="", seq_len=1, **{"precision": "fp32" if inputs else usual or "bf16-pure", **fields}))  # type: ignore[arg-type]
    refuse(
        step is not None and (inputs is None or loss is not None or fields),
        f"a step has its own {', '.join(fields) or 'loss'}, and needs inputs",
        key="step",
    )
    if inputs is None:
        if is_library(keys):
            refuse(
                layers is not None or pictures or head,
                "--layers, --picture and --head are for models of transformers",
                key="target",
            )
            return Captures(with_rows(frozen(of_keys(keys, target, run), freeze), rows), target)
        config = with_layers(config_object(keys, target) if isinstance(target, str) else target, layers)
        name = target if isinstance(target, str) else type(config).__name__
        refuse(pictures and head, "with another head, a model has pictures of its own size", key="head")
        if not pictures:
            return Captures(with_rows(frozen(of_config(config, run, head=head), freeze), rows), name)
        own = processor_keys(target) if isinstance(target, str) else None
        job = of_config(config, run, processed(config, pictures, own))
        counts = vectors_of(job, [processed(config, [size], own) for size in pictures])
        return Captures(
            with_rows(frozen(job, freeze), rows),
            name,
            tuple(zip((f"{width}x{height}" for width, height in pictures), counts, strict=True)),
        )
    refuse(
        not callable(target) or layers is not None or pictures or head,
        "with inputs, it is a function that makes a module, which has the layers it has",
        key="target",
    )
    refuse(step is not None and freeze, "a step trains what its optimizers have", key="freeze")
    job = with_rows(frozen(module_of(target, inputs, run, loss, step), freeze), rows)
    job = msgspec.structs.replace(job, configured="optimizer" not in fields)
    return Captures(job, getattr(target, "__name__", "module"))


MAKERS = ("arange", "empty", "full", "ones", "rand", "randint", "randn", "tensor", "zeros")
"""Functions of PyTorch of which inputs are made in an expression."""


def _late(maker: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a script as the script has it when it is called, which may have run again since."""
    name = getattr(maker, "__module__", "")

    @functools.wraps(maker)
    def call(*args: Any, **keywords: Any) -> Any:
        return getattr(sys.modules.get(name), maker.__name__, maker)(*args, **keywords)

    return call


def inputs_of(target: Any, named: str, inputs: str) -> Callable[..., Any]:
    """The function that makes inputs, or that trains; a script that has made the module already is not run again.

    target, named: the function that makes the module, and as it was named; inputs: script.py:function, or an expression
    Raises ConfigError.
    """
    from loadgauge.pytorch.trace.programs.script import function

    if not is_script(inputs):
        return expressed(inputs)
    path, _, name = inputs.rpartition(":")
    own = getattr(sys.modules.get(Path(path).stem), name, None)
    if path == named.rpartition(":")[0] and callable(own):
        return _late(own)
    return function(inputs)


def expressed(text: str) -> Callable[..., Any]:
    """The function that an expression of `MAKERS`, numbers and sizes stands for. Raises ConfigError for anything else in it.

    >>> expressed("randn(b, 3, 8, 8), randint(0, 10, (b,))")(b=2)[0].shape
    torch.Size([2, 3, 8, 8])
    """
    import torch

    makers: dict[str, Any] = {name: getattr(torch, name) for name in MAKERS} | {"dict": dict}
    words = makers | {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}
    bad = ConfigError(f"must be such as randn(b, 3, 224, 224), of {', '.join(makers)}, got {text[:60]!r}", key="inputs")
    try:
        tree = ast.parse(text.replace("torch.", ""), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise bad from None
    nodes = list(ast.walk(tree))
    calls = all(
        isinstance(node.func, ast.Name) and node.func.id in makers for node in nodes if isinstance(node, ast.Call)
    )
    if not calls or not all(isinstance(node, _PLAIN) for node in nodes) or len(text) > LONGEST:
        raise bad
    named = sorted((word for word in nodes if isinstance(word, ast.Name)), key=lambda word: word.col_offset)
    sizes = dict.fromkeys(word.id for word in named if word.id not in words)
    maker: Callable[..., Any] = eval(f"lambda {', '.join(sizes)}: {ast.unparse(tree)}", {"__builtins__": {}, **words})
    return maker


_PLAIN = (ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.keyword, ast.BinOp,
          ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.UnaryOp, ast.USub)  # fmt: skip
LONGEST = 2000


def module_of(
    target: Callable[[], Any], inputs: Callable[..., Any], run: TorchRun, loss: Any = None, step: Any = None
) -> Sized:
    """The training of a module of one's own. target, inputs, loss, step: as for `capture`"""
    import torch

    from loadgauge.pytorch.capture.inputs.target import ALSO, MANY, ONE
    from loadgauge.pytorch.trace.programs import own_loops
    from loadgauge.pytorch.trace.programs.script import anew, made
    from loadgauge.pytorch.trace.programs.training import Sized, mean_loss

    target = anew(target) if step is None and own_loops.is_step(target) else target
    taken = inspect.signature(inputs).parameters
    short = {other: name for name, others in ALSO.items() if name not in taken for other in others if other in taken}
    if ONE not in taken and ONE not in short.values():
        short |= dict.fromkeys([name for name in taken if MANY.search(name)][:1], ONE)
    own = {short.get(name, name): name for name in taken}
    usual = {name: taken[long].default for name, long in own.items() if isinstance(taken[long].default, int)}

    def build(device: str) -> Any:
        result = made(target, device)
        if step is None and not isinstance(result, torch.nn.Module):
            result = own_loops.looped(result, target)
        return result if step is not None else result.train()

    def call_arguments(device: str, module: Any, **sizes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with torch.device(device):
            arguments = inputs(**{own.get(name, name): size for name, size in sizes.items()})
        if isinstance(arguments, dict):
            return (), arguments
        return (arguments if isinstance(arguments, tuple) else (arguments,)), {}

    return Sized(build, call_arguments, loss or mean_loss, run, tuple(own), step, usual=usual, maker=target)


def with_rows(job: Sized, rows: Mapping[str, int | Sequence[int] | str] | str) -> Sized:
    """A training with rows stated as for `capture`. Raises ConfigError for what is neither numbers of them nor "most"."""
    from loadgauge.pytorch.device.facts.stated_rows import MOST

    counts: dict[str, tuple[int, ...] | str] = {}
    for line, count in ({"": rows} if isinstance(rows, str) else rows).items():
        numbers = (count,) if isinstance(count, int) else count if isinstance(count, str) else tuple(count)
        whole = not isinstance(numbers, str) and all(type(number) is int and number >= 0 for number in numbers)
        refuse(
            not numbers or not (numbers == MOST or whole),
            f"must be numbers of rows or {MOST}, got {count!r}",
            key="rows",
        )
        counts[line] = numbers
    return msgspec.structs.replace(job, rows={**job.rows, **counts}) if counts else job


def frozen(job: Sized, words: Sequence[str]) -> Sized:
    """A training in which the parameters whose names contain one of some words are not trained.

    Building it raises ConfigError for a word that no parameter has, and where none is left.
    """

    def build(device: str) -> Any:
        module = job.build(device)
        names = [name for name, _ in module.named_parameters()]
        for word in words:
            refuse(not any(word in name for name in names), f"no parameter's name contains {word!r}", key="freeze")
        for name, parameter in module.named_parameters():
            if any(word in name for word in words):
                parameter.requires_grad_(False)
        refuse(
            not any(parameter.requires_grad for parameter in module.parameters()),
            "no parameter is left to train",
            key="freeze",
        )
        return module

    return msgspec.structs.replace(job, build=build) if words else job
