"""Adapters put beside a module's layers by PEFT itself, and parts of a module frozen, before its training is run."""

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._pytree import tree_map

from loadgauge.core.base import ConfigError, NotModelled, closest, first_line, lists, refuse
from loadgauge.core.resolve.trained import ENDS, SHARE, after_share, chosen_by, pattern_in, places, words_of
from loadgauge.pytorch.capture.lists.blocks import Stack, blocks
from loadgauge.pytorch.capture.lists.quantised import as_on_cuda, quantise
from loadgauge.pytorch.capture.requests.regime import ALL, Regime, Tuned, is_pattern, names_in
from loadgauge.pytorch.trace.programs.training import Sized
from loadgauge.pytorch.trace.transformers_api import without_initial_values

DTYPES = {2: torch.bfloat16, 4: torch.float32}
NAME = "default"
"""What PEFT calls the adapters of a model that has one set of them."""


def tuned(job: Sized, regime: Regime) -> Sized:
    """A training in which only what a regime says is trained.

    Building it raises ConfigError for names that no module has, and NotModelled for what PEFT cannot adapt.
    """
    if regime.tuned.whole:
        return job

    def build(device: str) -> Any:
        module = job.build(device)
        with torch.device(device), without_initial_values():
            if regime.tuned.adapts:
                if regime.tuned.base:
                    quantise(module, regime)
                with as_on_cuda() if regime.tuned.base else contextlib.nullcontext():
                    _adapt(module, regime)
            elif regime.tuned.train:
                _train(module, regime.tuned.train)
            if regime.tuned.tower and not regime.tuned.adapts:
                frozen, _ = _beside(module, regime.tuned.tower)
                for name, parameter in module.named_parameters():
                    parameter.requires_grad_(parameter.requires_grad and name.rpartition(".")[0] not in frozen)
        # As transformers does where the layers of a model of text run again, and PEFT for any.
        asks = regime.tuned.adapts or getattr(module, "main_input_name", "") == "input_ids"
        if regime.input_gradients and asks and hasattr(module, "enable_input_require_grads"):
            module.enable_input_require_grads()
        return module

    return msgspec.structs.replace(job, build=build)


# -- adapters ----------------------------------------------------------------------------------------------------------


def _adapt(module: nn.Module, regime: Regime) -> None:
    try:
        import peft
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        raise ConfigError(
            "adapters of a captured model are PEFT's own modules: pip install peft", key="lora_rank"
        ) from None
    asked = regime.tuned
    modules, parameters = _targets(module, asked)
    saved = list(asked.saved)
    if asked.tower:
        frozen, whole = _beside(module, asked.tower)
        modules = [name for name in _adapted(module, modules) if name not in frozen and name not in whole]
        saved += whole
    for name in asked.saved:
        refuse(
            not any(_ends(path, name) for path, _ in module.named_modules()),
            f"no module is called {name!r}",
            key="modules_to_save",
        )
    config = peft.LoraConfig(
        r=asked.rank,
        lora_alpha=2 * asked.rank,
        lora_dropout=asked.dropout,
        use_dora=asked.dora,
        target_modules=modules or ([] if parameters else None),
        target_parameters=parameters or None,
        modules_to_save=saved or None,
        layers_to_transform=_layers(module, asked.layers),
    )
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        peft.get_peft_model(module, config, autocast_adapter_dtype=False)
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        raise NotModelled(f"PEFT: {first_line(error)[:200]}") from None
    finally:
        logging.disable(level)
    for layer in module.modules():
        if isinstance(layer, BaseTunerLayer):
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(DTYPES[regime.adapters[0]])


def _targets(module: nn.Module, asked: Tuned) -> tuple[str | list[str] | None, list[str]]:
    """PEFT's `target_modules` and `target_parameters`. Raises ConfigError for a name that nothing has."""
    possible = {name: module_at for name, module_at in module.named_modules() if _adaptable(module_at)}
    if asked.targets in ALL:
        if not asked.layers:
            return "all-linear", []
        return _adapted(module, "all-linear"), []  # PEFT takes layers beside a list of names alone
    if asked.targets == "attention":
        attention = [name for name in possible if re.search(r"(attn|attention)[^.]*\.", name, re.IGNORECASE)]
        refuse(
            not attention, "no layer of an attention is found by its name: give the names of layers", key="lora_targets"
        )
        return attention, []
    endings = sorted({name.rpartition(".")[2] for name in possible if not name.rpartition(".")[2].isdigit()})
    if is_pattern(asked.targets):
        try:
            pattern = re.compile(asked.targets)
        except re.error as error:
            raise ConfigError(f"{asked.targets!r} is no regular expression: {error}", key="lora_targets") from None
        refuse(
            asked.layers,
            "needs names of layers in --lora-targets; a regular expression can name the layers itself",
            key="lora_layers",
        )
        refuse(
            not any(pattern.fullmatch(name) for name in possible),
            f"{asked.targets!r} fits no whole name of a layer, such as {next(iter(possible), 'none')}",
            key="lora_targets",
        )
        return asked.targets, []
    modules, parameters = [], []
    own = [name for name, parameter in module.named_parameters() if parameter.dim() > 1]
    for name in names_in(asked.targets):
        if any(_ends(path, name) for path in possible):
            modules.append(name)
        elif any(_ends(path, name) for path in own):
            parameters.append(name)
        else:
            hint = "".join(f"; did you mean {match!r}?" for match in closest(name, endings))
            raise ConfigError(
                f"no layer {name!r} in this model (known: all-linear, attention, {', '.join(endings)}){hint}",
                key="lora_targets",
            )
    return modules, parameters


def _beside(module: nn.Module, tower: str) -> tuple[set[str], list[str]]:
    """The names of modules with weights that see pictures or hear, or join what does to the language model: those that are frozen
    where `tower` is trained, and the others. Raises NotModelled for a model without such parts."""
    names = {id(part): name for name, part in module.named_modules()}
    own: Any = module
    decoder = names.get(id(own.get_decoder()), "") if hasattr(module, "get_decoder") else ""
    refuse(
        not decoder,
        "what of the model sees pictures is not known: --tower trained, or adapters, takes it whole",
        NotModelled,
    )
    language = [decoder, names.get(id(own.get_output_embeddings()), decoder)]
    encoders = [names.get(id(own.get_encoder(kind)), "") for kind in ("image", "audio")]

    def within(name: str, parts: list[str]) -> bool:
        return any(part and f"{name}.".startswith(f"{part}.") for part in parts)

    weighty = [name for name, part in module.named_modules() if next(part.parameters(recurse=False), None) is not None]
    beside = [name for name in weighty if name and not within(name, language)]
    frozen = {name for name in beside if tower == "frozen" or (tower == "projector" and within(name, encoders))}
    return frozen, [name for name in beside if name not in frozen]


def _adapted(module: nn.Module, targets: str | list[str] | None) -> list[str]:
    """The whole names of the layers that PEFT's `target_modules` name."""
    last = getattr(module, "get_output_embeddings", lambda: None)()
    layers = {name: layer for name, layer in module.named_modules() if _adaptable(layer) and layer is not last}
    if targets == "all-linear":
        return [name for name, layer in layers.items() if _linear(layer)]
    if isinstance(targets, str):
        return [name for name in layers if re.fullmatch(targets, name)]
    return [name for name in layers if any(_ends(name, word) for word in targets or ())]


def _adaptable(module: nn.Module) -> bool:
    types = (nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
    return isinstance(module, types) or _linear(module)


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _ends(name: str, word: str) -> bool:
    return name == word or name.endswith(f".{word}")


def _layers(module: nn.Module, words: str) -> list[int] | None:
    """PEFT's `layers_to_transform`: numbers in the longest list of layers."""
    if not words:
        return None
    count = max((len(stack.paths) for stack in blocks(module, getattr(module, "config", None)).stacks), default=0)
    refuse(not count, "the model has no list of layers", key="lora_layers")
    return sorted({index for word in words_of(words) for index in places(word, count, "lora_layers")})


# -- a part of a model -------------------------------------------------------------------------------------------------


class Named(msgspec.Struct, frozen=True):
    """A parameter: its names (a tied one has several, and those that other models give it), and its elements."""

    names: tuple[str, ...]
    numel: int


def _train(module: nn.Module, words: str) -> None:
    """Freeze all parameters but those that words name."""
    chosen = chosen_of(_named(module), blocks(module, getattr(module, "config", None)).stacks, words)
    for index, parameter in enumerate(module.parameters()):
        parameter.requires_grad_(index in chosen)


def _named(module: nn.Module) -> list[Named]:
    names = lists((id(parameter), name) for name, parameter in module.named_parameters(remove_duplicate=False))
    for getter, words in (("get_input_embeddings", "embedding.tokens"), ("get_output_embeddings", "head.logits")):
        try:
            head = getattr(module, getter)()
        except (AttributeError, NotImplementedError):
            continue
        for parameter in () if not isinstance(head, nn.Module) else head.parameters():
            names.get(id(parameter), []).extend(ENDS[words])
    return [Named(tuple(names[id(parameter)]), parameter.numel()) for _, parameter in module.named_parameters()]


def chosen_of(parameters: Sequence[Named], stacks: Sequence[Stack], words: str) -> set[int]:
    """The places of the parameters that words of `--train` name (`resolve.trained.train_only`). Raises ConfigError.

    >>> every = [Named(("wte.weight",), 9), Named(("h.0.fc.weight",), 4), Named(("h.1.fc.weight",), 4)]
    >>> stacks = [Stack("h", ("h.0", "h.1"), (0, 0))]
    >>> chosen_of(every, stacks, "layers.-1:"), chosen_of(every, stacks, "but:wte"), chosen_of(every, stacks, "frozen:0.6")
    ({2}, {1, 2}, {1, 2})
    """

    def find(word: str) -> set[int]:
        indices = _matches(word, parameters, stacks)
        if not indices:
            beginnings = sorted(
                {
                    piece
                    for parameter in parameters
                    for piece in parameter.names[0].split(".")[:3]
                    if not piece.isdigit()
                }
            )
            hint = "".join(f"; did you mean {match!r}?" for match in closest(word, beginnings))
            raise ConfigError(
                f"no parameter is called {word!r} (known: {', '.join(beginnings[:20])}){hint}", key="train"
            )
        return indices

    return chosen_by(words, set(range(len(parameters))), find)


def _matches(word: str, parameters: Sequence[Named], stacks: Sequence[Stack]) -> set[int]:
    if word.startswith(SHARE):
        return set(range(after_share(word, [parameter.numel for parameter in parameters]), len(parameters)))
    if (pattern := pattern_in(word)) is not None:
        return {index for index, parameter in enumerate(parameters) if any(map(pattern.match, parameter.names))}
    fits = list(_expanded(word, stacks))
    return {
        index
        for index, parameter in enumerate(parameters)
        if any(
            f".{path}." in f".{name}." and name.startswith(start and f"{start}.")
            for start, path in fits
            for name in parameter.names
        )
    }


def _expanded(word: str, stacks: Sequence[Stack]) -> Iterator[tuple[str, str]]:
    """Yield what a word names: the block that it lies in ("" for any place), and a path in names."""
    pieces = word.split(".")
    for index, piece in enumerate(pieces):
        if re.fullmatch(r"\*|-?\d*(:-?\d*){0,2}", piece) and piece:
            before, after = ".".join(pieces[:index]), ".".join(pieces[index + 1 :])
            own = [stack for stack in stacks if _ends(stack.path, before)]
            if not own and before in ("", "layers", "h", "blocks", "model.layers", "transformer.h"):
                own = list(stacks[-1:])
            for stack in own:
                for layer in places(piece, len(stack.paths), "train"):
                    yield stack.paths[layer], after or stack.paths[layer]
            return
    if word in ("layers", "h", "blocks") and not any(_ends(stack.path, word) for stack in stacks) and stacks:
        word = stacks[-1].path
    yield "", word


def cast_by_fsdp(job: Sized) -> Sized:
    """A training of a float32 module whose parameters `fully_shard` casts to 16 bits as it gathers them.

    Floats that come into a unit (each block, and the whole) are cast too; buffers are not, so that one in float32 makes float32 of
    what it meets (source: pytorch, `MixedPrecisionPolicy(param_dtype)`, whose `cast_forward_inputs` is true).
    """

    def build(device: str) -> Any:
        module = job.build(device)
        own = [(part, dict(part._buffers)) for part in module.modules()]
        module.to(torch.bfloat16)
        for part, buffers in own:
            part._buffers.update(buffers)
        units = (path for stack in blocks(module, getattr(module, "config", None)).stacks for path in stack.paths)
        for path in dict.fromkeys(("", *units)):
            module.get_submodule(path).register_forward_pre_hook(
                lambda _, args, kwargs: tree_map(_to(torch.bfloat16), (args, kwargs)), with_kwargs=True
            )
        return module

    wide = _to(torch.float32)
    return msgspec.structs.replace(
        job, build=build, inputs=lambda device, module, **sizes: tree_map(wide, job.inputs(device, module, **sizes))
    )


def _to(dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return cast
