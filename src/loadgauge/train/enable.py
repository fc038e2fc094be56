"""Make a transformers model padding-free, in place and reversibly.

>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
>>> model = enable(LlamaForCausalLM(config))
>>> print(describe(model))
LlamaForCausalLM: 2 attention layers (causal) on cpu_flash
>>> model = disable(model)
"""

import contextlib
import copy
import functools
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from loadgauge.core.base.errors import ConfigError, NotModelled, refuse
from loadgauge.train import hooks as routing, inspect_model as anatomy
from loadgauge.train.hooks import Wiring
from loadgauge.train.layers import boundaries, mixers
from loadgauge.train.layers.attention import BACKENDS, NAMES, LayerPlan
from loadgauge.train.layers.mixers import Convention

log = logging.getLogger("loadgauge.train")
Model = TypeVar("Model", bound=nn.Module)


@dataclass
class Plan:
    """Changes that `enable` made to a model, and what `disable` puts back."""

    wiring: Wiring
    implementation: str
    caches: list[Any] = field(default_factory=list)


_handles: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()


def enable(model: Model, backend: str = "auto") -> Model:
    """Make `model` run flat batches (see `Collator`) without padding, and padded ones flattened inside; returns it.

    `backend`: "auto", one of `attention.BACKENDS`, or "mixer" (whole attention modules, once per sequence). What is used
    is logged and told by `describe`. The model is looked at and then proven on two short sequences: outputs equal to each
    sequence alone, and the gradient from one to the other exactly zero. Raises `NotModelled`, with the reason, for a model
    that cannot be made padding-free; it is left as it was.
    """
    refuse(
        backend not in ("auto", "mixer", *BACKENDS),
        f"must be auto, mixer, {', '.join(BACKENDS)}; got {backend!r}",
        key="backend",
    )
    if any(type(parameter).__name__ == "DTensor" or not parameter.numel() for parameter in model.parameters()):
        # Before anything is undone: an enabled model stays enabled.
        raise ConfigError("has sharded weights: enable it before fully_shard, FSDP or ZeRO-3", key="model")
    _speak()
    disable(model)
    top = anatomy.whole(model)
    inner = anatomy.backbone(top)
    name = type(top).__name__
    refuse(
        getattr(top.config, "is_encoder_decoder", False),
        f"{name} is an encoder-decoder: cross-attention is not made padding-free",
        NotModelled,
    )
    refuse(
        any(parameter.is_meta for parameter in top.parameters()),
        f"{name} has no weights yet (meta device): load them before enabling",
    )
    stock = anatomy.stock_implementation(top)
    samples = (anatomy.sample(top, anatomy.LENGTHS[0], 1), anatomy.sample(top, anatomy.LENGTHS[1], 2))
    were_on = _caches_off(top)
    try:
        with anatomy.quiet(top):
            _try(top, inner, samples, stock, backend)
    except BaseException:
        disable(top)
        _caches_on(were_on)
        raise
    top.__dict__["padding_free_plan"].caches = were_on
    log.info("padding-free: %s", describe(top))
    return model


def _try(
    top: PreTrainedModel, inner: PreTrainedModel, samples: tuple[Tensor, Tensor], stock: str, backend: str
) -> None:
    """The first way that can be proven: attention behind the interface, else every mixer once per sequence."""
    reasons: list[str] = []
    for interface in {"auto": (True, False), "mixer": (False,)}.get(backend, (True,)):
        parts = anatomy.look(top, samples, stock, interface)
        if interface and not parts.attention:
            if backend != "auto":
                raise ConfigError(
                    f"{type(top).__name__} has no attention that {backend} could run: use backend='auto'", key="backend"
                )
            continue
        kind = "auto" if backend == "mixer" else backend
        if _try_carriers(top, inner, parts, samples, stock, kind, reasons):
            return
    raise NotModelled(f"{type(top).__name__} cannot be made padding-free ({'; '.join(dict.fromkeys(reasons))})")


def _try_carriers(
    top: PreTrainedModel,
    inner: PreTrainedModel,
    parts: anatomy.Anatomy,
    samples: tuple[Tensor, Tensor],
    stock: str,
    backend: str,
    reasons: list[str],
) -> bool:
    for carrier in ("mask", "mapping", "positions"):
        wiring = _wiring(top, carrier, bool(parts.mixers))
        if carrier == "mapping" and not wiring.layer_types:
            continue
        try:
            _install(top, inner, parts, wiring, stock, backend)
            _fit(top, inner, parts, wiring, samples)
            _prove(top, parts, wiring, samples)
            return True
        except Exception as error:  # a carrier that a model chokes on is a reason like any other
            if isinstance(error, ConfigError) and error.key == "backend":
                raise
            reasons.append(f"{carrier}: {type(error).__name__}: {error}")
            disable(top)
    return False


def disable(model: Model) -> Model:
    """Put `model` back as it was before `enable`; returns it. Does nothing to a model that is not enabled."""
    for handle in _handles.pop(model, []) if isinstance(model, nn.Module) else []:
        handle.remove()
    for module in model.modules():
        plan = module.__dict__.pop("padding_free_plan", None)
        if isinstance(plan, Plan) and isinstance(module, PreTrainedModel):
            for handle in _handles.pop(module, []):
                handle.remove()
            if module.config._attn_implementation != plan.implementation:
                module.set_attn_implementation(plan.implementation)
            inner = anatomy.backbone(module)
            if inner.config._attn_implementation != plan.implementation:
                inner.config._attn_implementation = plan.implementation
            _caches_on(plan.caches)
        if (config := module.__dict__.pop("padding_free_config", None)) is not None:
            module.config = config
        for key in ("padding_free", "padding_free_wiring", "build_alibi_tensor"):
            module.__dict__.pop(key, None)
        if module.__dict__.pop("padding_free_mixer", None) is not None:
            original = module.__dict__.pop("padding_free_forward", None)
            module.__dict__.pop("forward", None)
            if original is not None:
                module.forward = original
    return model


@contextlib.contextmanager
def paused(model: nn.Module) -> Iterator[None]:
    """A context in which an enabled model runs as transformers made it, boundaries ignored: for comparison."""
    wirings = [w for m in model.modules() if isinstance(w := m.__dict__.get("padding_free_wiring"), Wiring)]
    before = [wiring.paused for wiring in wirings]
    for wiring in wirings:
        wiring.paused = True
    try:
        yield
    finally:
        for wiring, value in zip(wirings, before, strict=True):
            wiring.paused = value


def enabled(model: nn.Module) -> bool:
    """Return whether `enable` was run on this model."""
    return any("padding_free_plan" in module.__dict__ for module in model.modules())


def describe(model: nn.Module) -> str:
    """One line: which layers run how; of attention, the back-end of its last call."""
    refuse(not enabled(model), "is not padding-free: call enable first", key="model")
    counts: Counter[str] = Counter()
    for module in model.modules():
        plan, mixer = module.__dict__.get("padding_free"), module.__dict__.get("padding_free_mixer")
        if isinstance(plan, LayerPlan):
            counts[f"attention layers ({plan.reach}) on {plan.ran_on}"] += 1
        elif isinstance(mixer, Convention):
            counts[f"{type(module).__name__} run once per sequence"] += 1
    return f"{type(anatomy.whole(model)).__name__}: " + ", ".join(f"{n} {noun}" for noun, n in counts.items())


def _wiring(top: PreTrainedModel, carrier: str, by_argument: bool) -> Wiring:
    text = top.config.get_text_config()
    types_of_layers = [*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())]
    # RoBERTa and its kin count positions from padding_idx + 1, and say so by a padding_idx in the table of positions.
    numbered = [
        module.padding_idx
        for name, module in top.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None
    ]
    return Wiring(
        carrier=carrier,
        by_argument=by_argument,
        one_row_each="SequenceClassification" in type(top).__name__,
        first_position=numbered[0] + 1 if numbered else 0,
        layer_types=tuple(dict.fromkeys(types_of_layers)),
        pad_token_id=getattr(text, "pad_token_id", None),
        model_takes=routing.arguments(top),
        backbone_takes=routing.arguments(anatomy.backbone(top)),
    )


def _install(
    top: PreTrainedModel,
    inner: PreTrainedModel,
    parts: anatomy.Anatomy,
    wiring: Wiring,
    stock: str,
    backend: str,
) -> None:
    top.padding_free_plan = Plan(wiring, inner.config._attn_implementation)  # type: ignore[assignment]
    if parts.attention:
        top.set_attn_implementation(NAMES[stock])
        took = inner.config._attn_implementation
        if took != NAMES[stock]:
            raise NotModelled(f"the attention implementation stayed {took!r} when {NAMES[stock]!r} was asked for")
    elif wiring.carrier == "positions":
        # The mask is then ours, not (T, T); the mixers themselves go on as they were, by a config of their own.
        for module in parts.mixers:
            if getattr(module, "config", None) is inner.config:
                module.padding_free_config = inner.config
                module.config = copy.copy(inner.config)
        inner.config._attn_implementation = NAMES[stock]
    for module, reach in parts.attention.items():
        module.padding_free = LayerPlan(reach, backend)  # type: ignore[assignment]
    for module, notes in parts.mixers.items():
        if "forward" in module.__dict__:
            module.padding_free_forward = module.__dict__["forward"]
        module.padding_free_mixer = notes  # type: ignore[assignment]
        module.forward = functools.partial(mixers.run_per_sequence, module)  # unlike a method, this can be pickled
    if hasattr(inner, "build_alibi_tensor"):
        inner.build_alibi_tensor = functools.partial(_alibi, inner)  # type: ignore[assignment]
    inner.padding_free_wiring = wiring  # type: ignore[assignment]
    handles = [
        inner.register_forward_pre_hook(routing.before_backbone, with_kwargs=True),
        inner.register_forward_hook(routing.after_backbone, with_kwargs=True),
    ]
    if top is not inner:
        top.padding_free_wiring = wiring  # type: ignore[assignment]
        handles.append(top.register_forward_pre_hook(routing.before_model, with_kwargs=True))
    _handles[top] = handles


def _alibi(module: nn.Module, mask: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A bias by position from a mask that carries boundaries: the one of an unpadded row."""
    if mask.dim() == 4:
        mask = torch.ones(1, mask.shape[-1], dtype=torch.long, device=mask.device)
    bias: Tensor = type(module).build_alibi_tensor(module, mask, *args, **kwargs)  # type: ignore[attr-defined]
    return bias


def _flat(samples: tuple[Tensor, Tensor]) -> dict[str, Any]:
    where = boundaries.from_lengths([sample.shape[1] for sample in samples])
    device = samples[0].device
    return {
        "input_ids": torch.cat(samples, 1),
        "position_ids": where.positions(device),
        "cu_seq_lens_q": where.cumulative(device),
    }


def _fit(
    top: PreTrainedModel,
    inner: PreTrainedModel,
    parts: anatomy.Anatomy,
    wiring: Wiring,
    samples: tuple[Tensor, Tensor],
) -> None:
    """See that boundaries reach the backbone, and learn how the mixers' arguments follow the tokens."""
    for notes in parts.mixers.values():
        notes.run = "flat"
    with torch.no_grad():
        if top is not inner and not wiring.one_row_each:
            try:
                wiring.flat_calls = 0
                top(**_flat(samples))
                wiring.from_top = wiring.flat_calls == 0
            except ConfigError:
                wiring.from_top = True
        if wiring.from_top or wiring.one_row_each or top is inner:
            (inner if wiring.one_row_each else top)(**_flat(samples))
    for module, notes in parts.mixers.items():
        if "flat" not in notes.calls:
            raise NotModelled(f"{type(module).__name__} is not called on a flat batch")
        convention = mixers.learn(module, notes, anatomy.LENGTHS, parts.reaches)
        if not convention.source:
            raise NotModelled(f"boundaries do not reach {type(module).__name__}")
        module.padding_free_mixer = convention  # type: ignore[assignment]


def _prove(top: PreTrainedModel, parts: anatomy.Anatomy, wiring: Wiring, samples: tuple[Tensor, Tensor]) -> None:
    """Outputs equal to each sequence alone, every layer reached, no gradient from one sequence to the other."""
    from loadgauge.train.leak_probe import leak

    model = anatomy.backbone(top) if wiring.one_row_each else top
    alone = parts.alone
    if wiring.one_row_each:
        with torch.no_grad(), paused(top):
            alone = tuple(anatomy.first_tensor(model(input_ids=s)) for s in samples)  # type: ignore[assignment]
    plans = [module.__dict__["padding_free"] for module in parts.attention]
    conventions = [module.__dict__["padding_free_mixer"] for module in parts.mixers]
    for counted in [*plans, *conventions]:
        counted.calls = 0
    with torch.no_grad():
        flat = anatomy.first_tensor(model(**_flat(samples)))[0]
    missed = [type(m).__name__ for m in [*parts.attention, *parts.mixers] if not _calls(m)]
    if missed:
        raise NotModelled(f"{len(missed)} layers ({missed[0]}) ran without boundaries")
    both = torch.cat([pair[0] for pair in alone])
    tolerance = 5e-2 if both.dtype in (torch.bfloat16, torch.float16) else 1e-4
    error = float((flat - both).abs().max() / both.abs().max())
    if not error <= tolerance:
        raise NotModelled(f"outputs differ from those of each sequence alone by {error:.1e} of the largest")
    leaked = leak(model, _flat(samples), [s.shape[1] for s in samples])
    if leaked.worst != 0:
        raise NotModelled(f"the gradient from one sequence to another is {leaked.worst:.1e} of a sequence's own, not 0")


def _calls(module: nn.Module) -> int:
    plan = module.__dict__.get("padding_free") or module.__dict__.get("padding_free_mixer")
    return int(getattr(plan, "calls", 0))


def _caches_off(top: PreTrainedModel) -> list[Any]:
    """The configurations whose caches were on, now off."""
    were_on = [config for config in anatomy.configs(top) if getattr(config, "use_cache", False)]
    for config in were_on:
        config.use_cache = False
    return were_on


def _caches_on(were_on: list[Any]) -> None:
    for config in were_on:
        config.use_cache = True


def _speak() -> None:
    """Let the choice of back-end be heard where no logging is set up."""
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
