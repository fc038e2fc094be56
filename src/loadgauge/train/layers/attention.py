"""Attention over a flat batch, registered through transformers' attention and mask interfaces.

An attention layer that receives boundaries (see `boundaries`) attends within each sequence by the best back-end for its
device; one that receives anything else runs the implementation the model had before, so that generation still works.
"""

import importlib.util
import logging
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop, scaled_dot_product_attention, softmax
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from loadgauge.core.base.errors import ConfigError
from loadgauge.train.layers import boundaries
from loadgauge.train.layers.cpu_varlen import varlen_attention
from loadgauge.train.layers.masks import MaskFunction, Reach, reach_of

log = logging.getLogger("loadgauge.train")

BACKENDS = ("cpu_flash", "flash_attn", "varlen", "sdpa")
"""cpu_flash: one operator on PyTorch's CPU flash kernel; flash_attn: the package of that name, on CUDA; varlen:
`torch.nn.attention.varlen`, on CUDA; sdpa: `scaled_dot_product_attention` once per sequence, anywhere."""

NAMES = {"sdpa": "padding_free", "eager": "padding_free_eager"}
"""The registered name, by the implementation that runs when a layer receives no boundaries."""

PROBES = {stock: f"{name}_probe" for stock, name in NAMES.items()}
"""Registered names under which a layer notes in its `padding_free_notes` how it is called."""

TENSORS = frozenset({"query", "key", "value", "attention_mask"})
"""Arguments that every attention function takes, by position or by name."""

MADE: list[Any] = []
"""The mask functions that masks were made of under `PROBES`, in order."""


@dataclass
class LayerPlan:
    """Plan of one attention layer: what its tokens see, and the back-end asked for ("auto": the best there is)."""

    reach: Reach
    backend: str
    calls: int = 0
    ran_on: str = ""


@dataclass(frozen=True)
class Seen:
    """Arguments that a layer was called with while its model was inspected: `made_by` is the function its mask came from."""

    made_by: MaskFunction | None
    masked: bool
    is_causal: bool
    arguments: frozenset[str]

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the key of a layer's notes: notes with equal keys have an equal `reach`."""
        return self.made_by, self.masked, self.is_causal

    def reach(self) -> Reach | None:
        """Return the reach of the layer's tokens, or None where its mask did not come through the mask interface."""
        if self.made_by is not None:
            return reach_of(self.made_by)
        return None if self.masked else Reach(right=0 if self.is_causal else -1)


def _register(stock: str) -> None:
    """Register attention and mask functions under `NAMES[stock]`, and under `PROBES[stock]` ones that take notes."""

    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        plan = getattr(module, "padding_free", None)
        if isinstance(plan, LayerPlan) and boundaries.is_marks(attention_mask, query.shape[2]):
            return attend(module, plan, query, key, value, attention_mask, **kwargs), None
        return _before(stock, module, query, key, value, attention_mask, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        flat = getattr(kwargs.get("attention_mask"), "boundaries", None)
        if flat is not None:  # layers that learn boundaries from their positions need no mask over (T, T)
            return torch.ones(1, 1, 1, kwargs["q_length"], dtype=torch.bool, device=kwargs.get("device"))
        dense: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[stock](*args, **kwargs)
        return dense

    def noted(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        notes = getattr(module, "padding_free_notes", None)
        if isinstance(notes, list):
            # Trinity's layers give every tensor by name.
            notes.append(_seen(module, args[3] if len(args) > 3 else kwargs.get("attention_mask"), kwargs))
        return _before(stock, module, *args, **kwargs)

    def noted_mask(*args: Any, **kwargs: Any) -> Tensor | None:
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        dense: Tensor | None = ALL_MASK_ATTENTION_FUNCTIONS[stock](*args, **kwargs)
        if dense is not None:
            dense.made_by = kwargs.get("mask_function")  # type: ignore[attr-defined]
        MADE.append(kwargs.get("mask_function"))
        return dense

    AttentionInterface.register(NAMES[stock], attention)
    AttentionMaskInterface.register(NAMES[stock], mask)
    AttentionInterface.register(PROBES[stock], noted)
    AttentionMaskInterface.register(PROBES[stock], noted_mask)


def _before(stock: str, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Run the attention that the layer had before it was made padding-free; each modeling file has an eager one of its own."""
    if stock == "eager":
        function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if function is None:
            raise ConfigError(f"{type(module).__name__} has no eager attention to fall back to")
    else:
        function = ALL_ATTENTION_FUNCTIONS[stock]
    output: tuple[Tensor, Tensor | None] = function(module, *args, **kwargs)
    return output


def _seen(module: torch.nn.Module, mask: Tensor | None, kwargs: dict[str, Any]) -> Seen:
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    arguments = frozenset(name for name, value in kwargs.items() if value is not None) - TENSORS
    return Seen(getattr(mask, "made_by", None), mask is not None, bool(causal), arguments)


@cache
def flash_attn_installed() -> bool:
    """Return whether the flash-attn package can be imported."""
    return importlib.util.find_spec("flash_attn") is not None


def varlen_supported(device: torch.device) -> bool:
    """Return whether `torch.nn.attention.varlen` is there and the GPU can run it (compute capability 8.0 and above)."""
    return importlib.util.find_spec("torch.nn.attention.varlen") is not None and (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def backend_for(plan: LayerPlan, query: Tensor, *, dropout: float, softcap: float | None, sinks: bool) -> str:
    """Return the name of the back-end of this call. query: (1, H, T, D); sinks: whether the layer has attention sinks

    Raises `ConfigError` where the back-end asked for cannot do it.
    """
    device, width = query.device, query.shape[-1]
    half = query.dtype in (torch.float16, torch.bfloat16) and width <= 256 and width % 8 == 0
    general = plan.reach.function is None
    able = {
        "cpu_flash": device.type == "cpu" and general and not dropout and softcap is None,
        "flash_attn": device.type == "cuda"
        and half
        and general
        and not plan.reach.chunk
        and not sinks
        and flash_attn_installed(),
        "varlen": device.type == "cuda"
        and half
        and general
        and not (plan.reach.chunk or dropout or sinks)
        and softcap is None
        and varlen_supported(device),
        "sdpa": True,
    }
    if plan.backend == "auto":
        return next(name for name in BACKENDS if able[name])
    if not able[plan.backend]:
        # Dropout comes and goes with training mode; the kernels that lack it hand over to SDPA.
        if dropout and plan.backend in ("cpu_flash", "varlen"):
            return "sdpa"
        raise ConfigError(
            f"{plan.backend} cannot run this layer ({plan.reach}, {query.dtype}, {device.type}): use backend='auto'",
            key="backend",
        )
    return plan.backend


def attend(
    module: torch.nn.Module,
    plan: LayerPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    marks: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Attention within each sequence: query (1, H, T, D), key and value (1, G, T, ...), output (1, T, H, E)."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    reach = plan.reach
    chosen = backend_for(plan, query, dropout=dropout, softcap=softcap, sinks=s_aux is not None)
    if not torch.compiler.is_compiling():
        plan.calls, plan.ran_on = plan.calls + 1, chosen
    if chosen == "cpu_flash":
        sinks = None if s_aux is None else s_aux.reshape(-1)
        output: Tensor = varlen_attention(query, key, value, marks, sinks, reach.left, reach.right, reach.chunk, scale)[
            0
        ]
        return output
    if chosen == "sdpa":
        return per_sequence(query, key, value, boundaries.read(marks), reach, dropout, scale, softcap, s_aux)
    return _on_cuda(chosen, query, key, value, boundaries.read(marks), reach, dropout, scale, softcap)


def per_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    where: boundaries.Boundaries,
    reach: Reach,
    dropout: float,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention within each sequence, computed by one call a sequence; shapes as in `attend`.

    where: the boundaries; reach: what a token sees of its sequence. Scores are written out only where a soft cap or a sink
    asks for it.
    """
    lengths = list(where.lengths)
    outputs = []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        length, device = q.shape[2], q.device
        mask = reach.dense(length, device)
        if softcap is None and sinks is None:
            outputs.append(
                scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=mask,
                    dropout_p=dropout,
                    is_causal=mask is None and reach.right == 0 and length > 1,
                    scale=scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
            )
            continue
        if mask is None and reach.right == 0:
            mask = reach.over(length, device)
        outputs.append(_written_out(q, k, v, mask, dropout, scale, softcap, sinks))
    return torch.cat([output.transpose(1, 2) for output in outputs], 1)


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    exact = scores.dtype if scores.dtype == torch.float64 else torch.float32
    if sinks is not None:
        sink = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        shares = softmax(torch.cat([scores, sink.to(scores.dtype)], -1), -1, dtype=exact)[..., :-1]
    else:
        shares = softmax(scores, -1, dtype=exact)
    return drop(shares.to(value.dtype), dropout) @ value


def _on_cuda(
    backend: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    where: boundaries.Boundaries,
    reach: Reach,
    dropout: float,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """flash-attn or `torch.nn.attention.varlen`: tokens first, cumulated lengths, one kernel for all sequences."""
    width, of_value = query.shape[-1], value.shape[-1]
    if of_value < width:  # latent attention: the kernels want one head width
        value = torch.nn.functional.pad(value, (0, width - of_value))
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    cumulative, longest = where.cumulative(query.device), max(where.lengths)
    if backend == "flash_attn":
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

        output = flash_attn_varlen_func(
            query,
            key,
            value,
            cumulative,
            cumulative,
            longest,
            longest,
            dropout_p=dropout,
            softmax_scale=scale,
            causal=reach.right == 0,
            window_size=(reach.left, reach.right),
            softcap=softcap or 0.0,
        )
    else:
        from torch.nn.attention.varlen import varlen_attn

        output = varlen_attn(
            query,
            key,
            value,
            cumulative,
            cumulative,
            longest,
            longest,
            scale=scale,
            window_size=(reach.left, reach.right),
            enable_gqa=query.shape[1] != key.shape[1],
        )
    flat: Tensor = output[..., :of_value][None]
    return flat


for _stock in NAMES:
    _register(_stock)
