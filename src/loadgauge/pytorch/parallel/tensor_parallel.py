"""Tensor and sequence parallelism by DTensor: transformers' plan of how each matrix product is sharded, applied by PyTorch."""

from __future__ import annotations

from typing import Any

from torch import nn

from loadgauge.core.base.errors import LayoutError, NotModelled
from loadgauge.pytorch.record.allocations import any_layer
from loadgauge.pytorch.trace.transformers_api import text_config

KNOWN = ("colwise", "rowwise", "colwise_gather_output", "replicated_with_grad_allreduce")
"""Styles of transformers that have their like in `torch.distributed.tensor.parallel`."""


def shard_layers(model: Any, mesh: Any, sequence_parallel: bool) -> None:
    """Shards a model's matrix products over a mesh of one axis, in place. The embedding and the logits are sharded over the
    vocabulary; with `sequence_parallel` norms work on their part of the sequence.

    Raises NotModelled for models whose plan has other styles, LayoutError for heads that do not divide.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    if not any(style == "rowwise" for style in plan.values()):
        raise NotModelled(f"transformers has no tensor-parallel plan for {type(model).__name__}")
    between = Shard(1) if sequence_parallel else Replicate()
    styles: dict[str, Any] = {}
    for name, module in model.named_modules():
        style = _style(plan, name)
        if style is None or name == "lm_head" or module is model.base_model.embed_tokens:
            continue
        if style not in KNOWN or ("wise" in style and not isinstance(module, nn.Linear)):
            raise NotModelled(f"tensor parallelism of {name} ({style}): write the model's own as a script")
        if style.startswith("colwise"):
            _divides(module.out_features, mesh, name)
            styles[name] = ColwiseParallel()
        elif style == "rowwise":
            styles[name] = RowwiseParallel(output_layouts=between)
        else:  # a norm of heads: each rank has its own
            styles[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    _heads(text_config(model.config), mesh)
    tied = getattr(model.config, "tie_word_embeddings", False)
    embedding = _name(model, model.base_model.embed_tokens)
    if embedding is not None:
        styles[embedding] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if _has(model, "lm_head"):
        styles["lm_head"] = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    for name, module in model.named_modules():
        if type(module).__name__ in set(model._no_split_modules or ()):
            norms = [f"{name}.{norm}" for norm, _ in module.named_children() if "norm" in norm]
            styles |= {norm: SequenceParallel() if sequence_parallel else whole() for norm in norms}
            if sequence_parallel:
                styles[f"{name}.self_attn"] = PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                )
                styles[f"{name}.mlp"] = PrepareModuleInput(
                    input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                )
    norm = _name(model, model.base_model.norm)
    if norm is not None and not isinstance(model.base_model.norm, nn.Identity):
        styles[norm] = SequenceParallel() if sequence_parallel else whole()
    parallelize_module(model, mesh, styles)
    if tied and embedding is not None and _has(model, "lm_head"):
        model.lm_head.weight = model.base_model.embed_tokens.weight


def whole() -> Any:
    """The style of a module that every rank runs whole, with weights that are DTensors as the others are: optimizers
    refuse to mix them."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_module
    from torch.distributed.tensor.parallel.style import ParallelStyle

    class Whole(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            def taken(_: Any, inputs: Any, mesh: Any) -> Any:
                return (DTensor.from_local(inputs[0], mesh, (Replicate(),), run_check=False), *inputs[1:])

            return distribute_module(module, device_mesh, None, taken, lambda _, output, __: output.to_local())

    return Whole()


def _style(plan: dict[str, str], name: str) -> str | None:
    return plan.get(any_layer(name))


def _has(model: Any, name: str) -> bool:
    return isinstance(getattr(model, name, None), nn.Linear)


def _name(model: Any, module: Any) -> str | None:
    return next((name for name, part in model.named_modules() if part is module), None)


def _divides(size: int, mesh: Any, name: str) -> None:
    if size % mesh.size():
        raise LayoutError(f"{name}: {size} columns do not divide by tp = {mesh.size()}")


def _heads(config: Any, mesh: Any) -> None:
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if heads is not None and heads % mesh.size():
            raise LayoutError(f"{key} = {heads} does not divide by tp = {mesh.size()}")
