"""One rank's part of a module under tensor and expert parallelism, by the plan that its class states: parameters of the rank's own
sizes, and the exchanges among ranks where the plan has them.

Styles are those of transformers (`distributed/tensor_parallel.py`, `expert_parallel.py`). A head that is split has its loss split
over the vocabulary too, where that is the usual one: transformers gathers the logits, Megatron and torchtitan do not.
"""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from loadgauge.core.base.errors import NotModelled, first_line, refuse
from loadgauge.pytorch.capture.lists.exchanges import enter, exchange, gather, leave, part, vocabulary_loss
from loadgauge.pytorch.capture.symbols.splits import Splits
from loadgauge.pytorch.trace.transformers_api import text_config

COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")
WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts", "local_params", "all_reduce")
"""Styles whose modules keep their parameters whole, or have parameters with entries of their own."""
TABLE = "embedding_rowwise"
EXPERTS, DISPATCH = "grouped_gemm", "ep_dispatch_experts"
LOSS = "ForCausalLMLoss"
NOT_HEADS = frozenset({"head_dim", "head_size", "attention_head_size", "layer_idx", "layer_id", "layer_number"})
"""Whole numbers of a module that stay, though they may be equal to the number of heads."""
IGNORED = -100
BASE = "base_layer"
"""PEFT's name for the layer that adapters lie beside."""


def any_number(path: str) -> str:
    """Return the path of a parameter with `*` in the place of each index, as the plans of transformers have it.

    >>> any_number("model.layers.12.mlp.experts.3.up")
    'model.layers.*.mlp.experts.*.up'
    """
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


def _plan(model: Any, name: str) -> dict[str, str]:
    return _stated(model, name)[0]


def _stated(model: Any, name: str) -> tuple[dict[str, str], str]:
    """A plan of a class, and why it cannot be read."""
    try:
        plan = getattr(model, name, None)
    except Exception as error:  # a property that reads parts which this class does not have
        return {}, f"the {name} of {type(model).__name__} cannot be read: {first_line(error)[:200]}"
    return (dict(plan) if isinstance(plan, dict) else {}), ""


def _planned(model: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str, nn.Module, str]]:
    """Each module or parameter with an entry: its path, its style, the module, and the parameter's name or "".

    Of a layer with adapters, the layer that PEFT put them beside.
    """
    for path, module in model.named_modules():
        if _adapted(module):
            continue
        path = path.removesuffix(f".{BASE}")
        style = plan.get(any_number(path))
        if style is not None:
            yield path, style, module, ""
        for name in module._parameters:
            own = f"{path}.{name}"
            if (style := plan.get(any_number(own))) is not None:
                yield own, style, module, name


def splits_of(model: Any, found_pairs: dict[str, str] | None = None) -> Splits:
    """Return what of a model may be split, and what its parts must divide by; else why not.

    found_pairs: a plan that was recognised (`recognise`), which is taken where the class states none for its layers
    """
    plan, experts = _plan(model, "tp_plan"), _plan(model, "ep_plan")
    pairs = {} if "rowwise" in plan.values() else found_pairs or {}
    plan |= pairs
    kind = type(model).__name__
    sizes: dict[str, int] = {}
    closed = ""
    rowwise = False
    for path, style, module, name in _planned(model, plan):
        if style not in (*COLUMNS, *ROWS, *WHOLE, TABLE):
            closed = f"the style {style} of {any_number(path)} in the plan of {kind} is not modelled"
            break
        if style not in (*COLUMNS, *ROWS) or module is _output(model):
            continue
        shape = (
            [_shape(module, name)]
            if name
            else [tuple(tensor.shape) for tensor in module._parameters.values() if tensor is not None]
        )
        if all(shape):
            rowwise |= style.startswith("rowwise")
            widest = max(shape, key=len)
            dim = len(widest) - (2 if style in COLUMNS else 1)
            sizes.setdefault(f"width of {any_number(path).rpartition('.')[2]}", widest[dim])
    if not closed and not rowwise:
        closed = _stated(model, "tp_plan")[1] or (
            f"no plan of tensor parallelism is stated for the layers of {kind} (tp_plan), and no matrices are recognised in"
            " them that follow one another through attention or operations on each element alone"
        )
    heads = {name: value for name in ("num_attention_heads", "num_key_value_heads") if (value := _number(model, name))}
    with_heads = any(".self_attn." in any_number(path) or "attention" in path for path, *_ in _planned(model, plan))
    split = any(style == "moe_tp_experts" for style in plan.values())
    count, why = _experts_of(model, experts)
    return Splits(
        tp=() if closed else tuple({**(heads if with_heads else {}), **sizes}.items()),
        tp_closed=closed,
        experts=count,
        ep_closed=why,
        experts_by_tp=split and count > 0,
        plan=tuple(sorted(pairs.items())),
        tables=bool(tables_of(model)),
    )


def tables_of(model: nn.Module) -> list[Any]:
    """The tables of a model that are trained by rows, in backward, and may be spread over ranks (`recommenders.Tables`)."""
    return [module for module in model.modules() if getattr(module, "by_rows", False) is True]


def _number(model: Any, name: str) -> int:
    """A number of the text model's configuration; 0 where it has none, or one for each layer."""
    try:
        value = getattr(text_config(model.config), name, None)
    except (AttributeError, RuntimeError, ValueError):  # no such config, numbers by layer, or several text models
        return 0
    return value if isinstance(value, int) else 0


def _shape(module: nn.Module, name: str) -> tuple[int, ...]:
    parameter = module._parameters.get(name)
    return () if parameter is None else tuple(parameter.shape)


def _experts_of(model: Any, plan: dict[str, str]) -> tuple[int, str]:
    """How many experts a layer has, and why they cannot be spread over ranks."""
    if tables_of(model):
        return 1, ""
    counts = {
        int(module._parameters[name].shape[0])  # type: ignore[union-attr]
        for _, style, module, name in _planned(model, plan)
        if style == EXPERTS and name
    }
    kind = type(model).__name__
    if not counts:
        return (
            0,
            _stated(model, "ep_plan")[1] or f"no plan of expert parallelism is stated for {kind} (ep_plan)"
            if not plan
            else f"{kind} has no experts",
        )
    modelled = {EXPERTS, DISPATCH, "replicate"}
    other = sorted({style for _, style, *_ in _planned(model, plan)} - modelled)
    if other:
        return min(counts), f"the style {other[0]} in the expert plan of {kind} is not modelled"
    if len(counts) > 1:
        return min(counts), f"layers of {kind} have different numbers of experts: {', '.join(map(str, sorted(counts)))}"
    return counts.pop(), ""


def _output(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


# -- adapters ----------------------------------------------------------------------------------------------------------


def _adapted(module: nn.Module) -> bool:
    return isinstance(getattr(module, BASE, None), nn.Module)


def unsplit(model: Any) -> str:
    """Why adapters cannot be split with the layers that they lie beside; "" where they can."""
    plan = _plan(model, "tp_plan")
    for path, module in model.named_modules():
        if hasattr(module, "modules_to_save"):
            return f"{path}, which is trained whole beside adapters, is captured on one rank"
        style = plan.get(any_number(path))
        if not _adapted(module) or style is None:
            continue
        if style not in ("colwise", "rowwise") or not isinstance(getattr(module, BASE), nn.Linear):
            return f"PEFT splits adapters of colwise and rowwise layers alone, and {any_number(path)} is {style}"
        if any(getattr(module, "use_dora", {}).values()):
            return "PEFT splits the matrices of LoRA, and no magnitudes of DoRA"
    return ""


def _split_adapters(model: Any, ranks: int) -> None:
    """Split adapters as PEFT does: of a layer that is split by columns the second matrix, of one split by rows the first."""
    plan = _plan(model, "tp_plan")
    for path, module in list(model.named_modules()):
        style = plan.get(any_number(path))
        if _adapted(module) and style is not None:
            columns = style == "colwise"
            for adapter in (module.lora_B if columns else module.lora_A).values():
                _cut(adapter, "weight", 0 if columns else 1, ranks, path)
                _around(adapter, entered if columns else None, None if columns else leave)


# -- one rank's part ---------------------------------------------------------------------------------------------------


def mark_experts(model: Any) -> None:
    """Say of each parameter of routed experts that it is one, by the plans of the class; so are tables that ranks share out."""
    for table in tables_of(model):
        table.weight.of_experts = True
    for plan in (_plan(model, "ep_plan"), _plan(model, "tp_plan")):
        holders: list[Any] = [
            module
            for _, style, module, name in _planned(model, plan)
            if not name and style in (DISPATCH, "moe_tp_experts")
        ]
        for holder in holders:
            for parameter in holder.parameters():
                parameter.of_experts = True


def shard(model: Any, tp: int, ep: int, found_pairs: dict[str, str] | None = None) -> None:
    """Leave in a model what the first of `tp` and of `ep` ranks has of it, with the exchanges that the plan asks for; in place.

    found_pairs: as for `splits_of`
    Raises NotModelled for what has no plan, or sizes that do not divide.
    """
    splits = splits_of(model, found_pairs)
    for problem in splits.problems(tp=tp, ep=ep):
        raise NotModelled(problem)
    if tp > 1:
        refuse((why := unsplit(model)), f"tp = {tp}: {why}", NotModelled)
        _Tensor(model, tp, dict(splits.plan)).apply()
        _split_adapters(model, tp)
    for module in tables_of(model) if ep > 1 else ():
        _cut(module, "weight", 0, ep, "tables", uneven=True)
        module.ranks = ep
    if ep > 1 and not splits.tables:
        for path, style, module, name in list(_planned(model, _plan(model, "ep_plan"))):
            if style == EXPERTS:
                _cut(module, name, 0, ep, path)
            elif style == DISPATCH:
                _dispatch(module, ep)


def _cut(module: nn.Module, name: str, dim: int, ranks: int, path: str, *, uneven: bool = False) -> None:
    """Give a module the rank's part of one of its parameters. uneven: the first ranks may have one more"""
    whole = module._parameters[name]
    if whole is None or getattr(whole, "cut", False):
        return
    size = int(whole.shape[dim])
    if size % ranks and not uneven:
        raise NotModelled(f"{any_number(path)}: {size} over {ranks} ranks leaves {size % ranks}")
    shape = list(whole.shape)
    shape[dim] = -(-size // ranks)
    own: Any = nn.Parameter(torch.empty(shape, dtype=whole.dtype, device=whole.device), whole.requires_grad)
    own.cut, own.shards = True, ranks
    own.of_experts = getattr(whole, "of_experts", False)
    module._parameters[name] = own


def _around(module: Any, before: Callable[..., Any] | None = None, after: Callable[[Any], Any] | None = None) -> None:
    """Run something on a module's inputs, and on its result."""
    own = module.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            if not args:
                name, first = next(iter(kwargs.items()))
                kwargs[name] = before(first)
            else:
                args = (before(args[0]), *args[1:])
        result = own(*args, **kwargs)
        return result if after is None else after(result)

    module.forward = forward


def entered(x: Any) -> Any:
    """Return what split modules read in place of a tensor; those that read the same one send one gradient together."""
    copied: Any = getattr(x, "entered_once", None)
    if copied is None and torch.is_grad_enabled() and x.requires_grad:
        copied = x.entered_once = enter(x)
    return x if copied is None else copied


class _Tensor:
    """Splits a model over tensor-parallel ranks."""

    def __init__(self, model: Any, ranks: int, found_pairs: dict[str, str]) -> None:
        self.model, self.ranks, self.pairs = model, ranks, found_pairs
        self.plan = {**_plan(model, "tp_plan"), **found_pairs}

    def apply(self) -> None:
        """Go through the plan."""
        head = _output(self.model)
        split = self._vocabulary(head)
        self._own_numbers()
        for path, style, module, name in list(_planned(self.model, self.plan)):
            if module is not head or not split:
                if name:
                    self._parameter(path, style, module, name)
                else:
                    self._module(path, style, module)

    def _parameter(self, path: str, style: str, module: Any, name: str) -> None:
        whole = module._parameters[name]
        if whole is None or style in WHOLE:
            return
        turned = isinstance(module, Conv1D) and whole.ndim == 2
        if style in COLUMNS:
            _cut(module, name, 1 if turned else max(whole.ndim - 2, 0), self.ranks, path)
            if turned:
                module.nf //= self.ranks
        elif name != "bias" and whole.ndim > 1:
            _cut(module, name, 0 if turned else whole.ndim - 1, self.ranks, path)

    def _own_numbers(self) -> None:
        """Divide the numbers of heads and columns that a module without a plan has beside its matrices."""
        heads = {_number(self.model, name) for name in ("num_attention_heads", "num_key_value_heads")} - {0}
        done: set[int] = set()
        for path, style, module, _ in list(_planned(self.model, self.pairs)):
            parent = self.model.get_submodule(path.rpartition(".")[0])
            if style != "rowwise" or id(parent) in done:
                continue
            done.add(id(parent))
            width = _shape(module, "weight")[0 if isinstance(module, Conv1D) else 1]
            for name, value in list(vars(parent).items()):
                if type(value) is int and value in heads | {width} and name not in NOT_HEADS:
                    setattr(parent, name, value // self.ranks)

    def _module(self, path: str, style: str, module: nn.Module) -> None:
        ranks = self.ranks
        if style in COLUMNS or style in ROWS:
            for name in list(module._parameters):
                self._parameter(f"{path}.{name}", style, module, name)
        around: dict[str, tuple[Any, Any]] = {
            **dict.fromkeys(COLUMNS, (entered, lambda y: gather(y, ranks))),
            **dict.fromkeys(("colwise", "packed_colwise"), (entered, None)),
            **dict.fromkeys(ROWS, (lambda x: part(x, ranks), leave)),
            **dict.fromkeys(("rowwise", "packed_rowwise", "all_reduce"), (None, leave)),
        }
        if style in around:
            _around(module, *around[style])
        elif style == "moe_tp_experts":
            own = module.forward

            @functools.wraps(own)
            def forward(hidden: Any, index: Any, weights: Any, *rest: Any, **more: Any) -> Any:
                return leave(own(entered(hidden), index, entered(weights), *rest, **more))

            module.forward = forward
        elif style == TABLE:
            self._table(module)
        elif style == "mla_kv_a_proj":
            width = _number(self.model, "qk_rope_head_dim")
            if not width:
                raise NotModelled(f"{any_number(path)}: the configuration does not say how wide its rotated part is")

            def apart(y: Any) -> Any:
                rest, rotated = y.split([y.shape[-1] - width, width], dim=-1)
                return torch.cat([rest, enter(rotated)], dim=-1)

            _around(module, None, apart)
        elif style == "replicated_with_grad_allreduce":
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.summed = True  # type: ignore[attr-defined]

    def _vocabulary(self, head: Any) -> bool:
        """Split the head over the vocabulary, and with the usual loss do not gather the logits: the loss is split too.

        False where the class does not split its head so.
        """
        model, ranks = self.model, self.ranks
        path = next((path for path, module in model.named_modules() if module is head), "")
        if not (self.plan.get(any_number(path), "").startswith("colwise") and isinstance(head, nn.Linear)):
            return False
        usual = getattr(getattr(model, "loss_function", None), "__name__", "") == LOSS
        table = model.get_input_embeddings()
        tied = head.weight is getattr(table, "weight", None)
        for name in list(head._parameters):
            _cut(head, name, 0, ranks, path, uneven=usual)
        if tied:
            table._parameters["weight"] = head._parameters["weight"]
            if not any(module is table for _, style, module, _ in _planned(model, self.plan) if style == TABLE):
                self._table(table)
        if usual:
            _around(head, entered)
            model.loss_function = _loss
        else:
            _around(head, entered, lambda y: gather(y, ranks))
        return True

    def _table(self, module: Any) -> None:
        """Split a table by its rows: each rank looks up the ids of its own, and the results are summed."""
        if module.weight.shape[0] and not getattr(module.weight, "cut", False):
            _cut(module, "weight", 0, self.ranks, "embedding", uneven=True)
        module.padding_idx = None
        rows, own = int(module.weight.shape[0]), module.forward

        @functools.wraps(own)
        def looked_up(ids: torch.Tensor) -> Any:
            outside = (ids < 0) | (ids >= rows)
            rows_held = own(ids.masked_fill(outside, 0))
            return leave(rows_held.masked_fill_(outside.unsqueeze(-1), 0))

        module.forward = looked_up


def _loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """transformers' loss of causal models, on a rank's columns of the logits."""
    logits = logits.float()
    shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    result: torch.Tensor = vocabulary_loss(logits.view(-1, logits.shape[-1]), shifted.view(-1))
    return result


def _dispatch(module: Any, ranks: int) -> None:
    """Send rows to the ranks of their experts and back, as transformers' `AllToAllEP` does."""
    module.num_experts //= ranks
    module._is_expert_parallel = True
    own = module.forward

    @functools.wraps(own)
    def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        copies = index.shape[-1]
        order = torch.argsort(index.reshape(-1))
        received = exchange(hidden[order // copies], ranks)
        local = (order % module.num_experts).unsqueeze(-1)
        ones = torch.ones_like(local, dtype=received.dtype)
        back = exchange(own(received, local, ones), ranks)
        result = torch.empty_like(back)
        result[order] = back
        rows = result.view(*weights.shape, hidden.shape[-1])
        return (rows * weights.unsqueeze(-1)).sum(dim=1).to(hidden.dtype)  # as experts of one rank give it

    module.forward = forward
