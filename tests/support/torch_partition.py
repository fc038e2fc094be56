"""What torch.compile keeps of a layer for its backward: PyTorch's own partitioner, on tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx import Node

VIEWS = ("view", "_unsafe_view", "permute", "transpose", "alias", "expand", "reshape", "squeeze", "unsqueeze", "t")


def kept_by_compile(
    make: Callable[[], tuple[torch.nn.Module, torch.Tensor, tuple[torch.Tensor, ...]]], around: Callable[[], Any]
) -> int:
    """Return the bytes that the compiled form of a layer keeps, each storage once, parameters and their 16-bit copies left out.

    make: the layer, its input, and the tables of its rotation if it has some, made on fake tensors
    around: the context its forward runs in
    """
    kept: list[int] = []

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, compiler="inductor", **more
        )
        (output,) = (node for node in forward.graph.nodes if node.op == "output")
        given = [node for node in forward.graph.nodes if node.op == "placeholder"]
        stored = {_storage(node) for node in output.args[0][num_fwd_outputs:]}
        kept.append(sum(_nbytes(node) for node in stored if node is given[0] or not _of(node, given)))
        return forward, backward

    with FakeTensorMode(allow_non_fake_inputs=True), _flash():
        layer, x, tables = make()
        names, values = zip(*layer.named_parameters(), strict=True)

        def run(x: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
            rotation, parameters = given[: len(tables)], given[len(tables) :]
            with around():
                called = torch.func.functional_call(
                    layer, dict(zip(names, parameters, strict=True)), (x,),
                    {"position_embeddings": rotation} if rotation else {},
                )  # fmt: skip
            return called[0] if isinstance(called, tuple) else called

        def compiled(graph: Any, _: Any) -> Any:
            return make_boxed_func(graph.forward)

        aot_function(run, compiled, partition_fn=partition, decompositions=select_decomp_table())(x, *tables, *values)
    return kept[0]


def _storage(node: Node) -> Node:
    """The node whose memory a view is of."""
    while node.op == "call_function" and str(node.target).partition("aten.")[2].split(".")[0] in VIEWS:
        node = node.all_input_nodes[0]
    return node


def _of(node: Node, given: list[Node]) -> bool:
    """Whether a node is a parameter or a constant of the layer's call, or a cast of one."""
    while node.op == "call_function" and "convert_element_type" in str(node.target):
        node = _storage(node.all_input_nodes[0])
    return node in given[1:] or (node.op == "get_attr")


def _nbytes(node: Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size()


class _flash:
    """Attention as CUDA's flash kernel, which takes grouped keys, and 16 bits under autocast."""

    def __enter__(self) -> None:
        self.before = F.scaled_dot_product_attention
        F.scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention = _attention

    def __exit__(self, *_: object) -> None:
        F.scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention = self.before


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    query, key, value = (each.to(torch.bfloat16) for each in (query, key, value))
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, True, scale=scale)[0]
