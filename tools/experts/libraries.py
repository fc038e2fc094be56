"""The layers of experts of each library, made on the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from experts.case import Case


class Built(NamedTuple):
    """A layer: how it is called, and where its library has its own way of recomputing it, that."""

    module: torch.nn.Module
    call: Callable[[Any], Any]
    rerun: Callable[[Any], Any] | None = None


def transformers_layer(case: Case) -> Built:
    """transformers' module of a model, with the experts' implementation that the case names."""
    import importlib

    import transformers

    config = transformers.AutoConfig.for_model(case.model, **_config(case))
    config._experts_implementation = case.way
    name = {
        "mixtral": "MixtralSparseMoeBlock", "qwen2_moe": "Qwen2MoeSparseMoeBlock", "qwen3_moe": "Qwen3MoeSparseMoeBlock",
        "deepseek_v3": "DeepseekV3MoE", "gpt_oss": "GptOssMLP",
    }[case.model]  # fmt: skip
    file = importlib.import_module(f"transformers.models.{case.model}.modeling_{case.model}")
    with torch.device("cuda"):
        module = getattr(file, name)(config).to(torch.bfloat16).train()
    for own, buffer in module.named_buffers():
        if own.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()

    def call(x: Any) -> Any:
        result = module(x)
        return result[0] if isinstance(result, tuple) else result

    return Built(module, call)


def _config(case: Case) -> dict[str, Any]:
    sizes: dict[str, Any] = {"hidden_size": case.hidden, "num_experts_per_tok": case.chosen}
    if case.model in ("mixtral", "gpt_oss"):
        return sizes | {"intermediate_size": case.width, "num_local_experts": case.experts}
    sizes |= {"moe_intermediate_size": case.width}
    if case.model == "deepseek_v3":
        return sizes | {
            "n_routed_experts": case.experts, "n_group": 8, "topk_group": 4,
            "n_shared_experts": case.shared // case.width,
        }  # fmt: skip
    sizes |= {"num_experts": case.experts, "norm_topk_prob": case.model == "qwen3_moe"}
    return sizes | ({"shared_expert_intermediate_size": case.shared} if case.shared else {})


def torchtitan_layer(case: Case) -> Built:
    """torchtitan's `MoE`."""
    from torchtitan.distributed import utils as distributed
    from torchtitan.models.common.feed_forward import FeedForward
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

    distributed.set_spmd_backend("partial_dtensor")
    local = case.experts // case.ranks
    dispatcher = LocalTokenDispatcher if case.ranks == 1 else AllToAllTokenDispatcher
    scores = "sigmoid" if case.model == "deepseek_v3" else "softmax"

    def linear(i: int, o: int) -> Any:
        return Linear.Config(in_features=i, out_features=o)

    shared = None
    if case.shared:
        shared = FeedForward.Config(
            w1=linear(case.hidden, case.shared),
            w2=linear(case.shared, case.hidden),
            w3=linear(case.hidden, case.shared),
        )
    config = MoE.Config(
        num_experts=case.experts,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=case.hidden, hidden_dim=case.width, num_experts=local),
            token_dispatcher=dispatcher.Config(num_experts=case.experts, top_k=case.chosen),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=case.experts, gate=linear(case.hidden, case.experts), top_k=case.chosen, score_func=scores,
            route_norm=case.model != "qwen2_moe",
        ),
        shared_experts=shared,
    )  # fmt: skip
    with torch.device("cuda"):
        module = MoE(config).to(torch.bfloat16).train()
    module.tokens_per_expert_E = module.tokens_per_expert_E.float()
    if module.expert_bias_E is not None:
        module.expert_bias_E = module.expert_bias_E.float()
    if case.ranks > 1:
        from torch.distributed.device_mesh import init_device_mesh

        module.routed_experts.token_dispatcher.wire_meshes(
            ep_mesh=init_device_mesh("cuda", (case.ranks,), mesh_dim_names=("ep",))
        )
    return Built(module, module)


def megatron_layer(case: Case) -> Built:
    """Megatron-Core's `MoELayer`: `grouped` by Transformer Engine's grouped linear, `legacy` by grouped_gemm, else `sequential`.

    Neither library has kernels here: what stands in for their products keeps what they keep.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import experts
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    _fused_permutes()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(expert_model_parallel_size=case.ranks, create_gloo_process_groups=False)
    sigmoid = case.model == "deepseek_v3"
    config = TransformerConfig(
        num_layers=1, hidden_size=case.hidden, num_attention_heads=8, num_moe_experts=case.experts,
        moe_router_topk=case.chosen, moe_ffn_hidden_size=case.width, ffn_hidden_size=case.width, add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, bf16=True, params_dtype=torch.bfloat16,
        moe_router_dtype="fp32", moe_token_dispatcher_type="alltoall", moe_grouped_gemm="sequential" not in case.way,
        expert_model_parallel_size=case.ranks, moe_router_score_function="sigmoid" if sigmoid else "softmax",
        moe_router_pre_softmax=case.model == "qwen2_moe", moe_router_load_balancing_type="none",
        moe_shared_expert_intermediate_size=case.shared or None, use_cpu_initialization=False,
        perform_initialization=False, bias_activation_fusion=True, bias_dropout_fusion=False,
        moe_permute_fusion="unfused" not in case.way,
        recompute_granularity="selective" if "again" in case.way else None,
        moe_shared_expert_gate=case.model == "qwen2_moe",
    )  # fmt: skip
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    grouped = MLPSubmodules(linear_fc1=_grouped_linear(), linear_fc2=_grouped_linear())
    kind = {
        "grouped": ModuleSpec(module=experts.TEGroupedMLP, submodules=grouped),
        "sequential": ModuleSpec(module=experts.SequentialMLP, submodules=linears),
    }[case.way.partition(" ")[0]]  # fmt: skip
    with torch.device("cuda"):
        module = MoELayer(
            config, MoESubmodules(experts=kind, shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linears)),
            layer_number=1,
        ).to(torch.bfloat16).train()  # fmt: skip
    with unset_fake_temporarily():  # the order of chunks is a list of the program's own
        order = torch.arange(case.experts).reshape(-1, case.experts // case.ranks)
        module.token_dispatcher.sort_input_by_local_experts = order.T.ravel()
        module.token_dispatcher.restore_output_by_local_experts = order.reshape(order.shape[::-1]).T.ravel()
    return Built(module, lambda x: module(x)[0])


class _Products(torch.autograd.Function):
    """The products of Transformer Engine's grouped linear: it keeps its input, and its matrices, which are parameters."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return x.new_empty((x.shape[0], weight.shape[1]))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _grouped_linear() -> Any:
    class GroupedLinear(torch.nn.Module):
        def __init__(self, experts: int, i: int, o: int, **_: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(experts, o, i, dtype=torch.bfloat16))

        def forward(self, x: Any, _: Any) -> Any:
            return _Products.apply(x, self.weight), None

    return GroupedLinear


class _Permuted(torch.autograd.Function):
    """Transformer Engine's `permute` with probabilities by a mask: it keeps a table of rows, of each token and expert.

    Source: transformer_engine 2.8, `permutation.py`, `triton/permutation.py` (`make_row_id_map`).
    """

    @staticmethod
    def forward(ctx: Any, x: Any, probabilities: Any, table: Any, rows: int) -> Any:
        ctx.save_for_backward(table)
        ctx.shapes = x.shape, probabilities.shape, probabilities.dtype
        return x.new_empty((rows, x.shape[1])), probabilities.new_empty((rows,))

    @staticmethod
    def backward(ctx: Any, gradient: Any, of_probabilities: Any) -> Any:
        _ = ctx.saved_tensors
        x, probabilities, dtype = ctx.shapes
        return gradient.new_empty(x), gradient.new_empty(probabilities, dtype=dtype), None, None


class _Restored(torch.autograd.Function):
    """Its `unpermute` without probabilities."""

    @staticmethod
    def forward(ctx: Any, rows: Any, table: Any, shape: Any) -> Any:
        ctx.save_for_backward(table)
        ctx.shape = rows.shape
        return rows.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        _ = ctx.saved_tensors
        return gradient.new_empty(ctx.shape), None, None


class _Sorted(torch.autograd.Function):
    """Its `sort_chunks_by_index`, with probabilities or without."""

    @staticmethod
    def forward(ctx: Any, rows: Any, probabilities: Any, table: Any) -> Any:
        ctx.save_for_backward(table)
        return torch.empty_like(rows), None if probabilities is None else torch.empty_like(probabilities)

    @staticmethod
    def backward(ctx: Any, gradient: Any, of_probabilities: Any) -> Any:
        _ = ctx.saved_tensors
        return (
            torch.empty_like(gradient),
            None if of_probabilities is None else torch.empty_like(of_probabilities),
            None,
        )


def _general_gemm(
    weight: Any, x: Any, dtype: Any, layout: str = "TN", bias: Any = None, grad: bool = False
) -> tuple[Any]:
    """Its product with operands of any dtype: of `layout`, the router's output, the input's gradient, or the weight's."""
    rows, columns = {"TN": (x, weight.shape[0]), "NN": (x, weight.shape[1]), "NT": (x.T, weight.shape[1])}[layout]
    return (torch.empty((rows.shape[0], columns), dtype=dtype, device="cuda"),)


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Counts on the host: those that are wanted as an array are numbers already."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return tensor.numpy() if as_numpy else tensor.to("cpu")


def _fused_permutes() -> None:
    """Puts what stands in for Transformer Engine's kernels into Megatron-Core's module."""
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def permute(x: Any, probabilities: Any, routing: Any, num_out_tokens: Any = None) -> Any:
        tokens, experts = routing.shape
        table = torch.empty((tokens, 2 * experts + 1), dtype=torch.int32, device="cuda")
        rows, weights = _Permuted.apply(x, probabilities, table, int(num_out_tokens))
        return rows, weights, table

    def unpermute(rows: Any, table: Any, merging_probs: Any = None, restore_shape: Any = None) -> Any:
        return _Restored.apply(rows, table, restore_shape)

    def sort_with(rows: Any, probabilities: Any, sizes: Any, order: Any) -> Any:
        return _Sorted.apply(rows, probabilities, torch.empty((rows.shape[0],), dtype=torch.int32, device="cuda"))

    # What torch.compile makes one kernel of.
    kernels = vars(fused_bias_swiglu)
    kernels["swiglu"] = lambda y: y.new_empty((*y.shape[:-1], y.shape[-1] // 2))
    kernels["weighted_swiglu"] = lambda y, weights: kernels["swiglu"](y)
    kernels["swiglu_back"] = lambda gradient, y: torch.empty_like(y)
    kernels["weighted_swiglu_back"] = lambda gradient, y, weights: (torch.empty_like(y), torch.empty_like(weights))
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host
    moe_utils.HAVE_TE, moe_utils.te_general_gemm, moe_utils.fused_permute = True, _general_gemm, permute
    moe_utils.fused_permute_with_probs, moe_utils.fused_unpermute = permute, unpermute
    moe_utils.fused_sort_chunks_by_index_with_probs = sort_with
    moe_utils.fused_sort_chunks_by_index = lambda rows, sizes, order: sort_with(rows, None, sizes, order)[0]


LIBRARIES: dict[str, Callable[[Case], Built]] = {
    "transformers": transformers_layer, "torchtitan": torchtitan_layer, "megatron": megatron_layer,
}  # fmt: skip
