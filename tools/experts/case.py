"""`Case`: a layer of experts of one library, and the list of operations for it."""

from __future__ import annotations

from typing import Any

import msgspec

from loadgauge.core.definitions.model.kernels import Dtypes, Kernels
from loadgauge.core.definitions.model.model import Mlp, Moe
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS, TRANSFORMERS
from loadgauge.core.estimate.memory.liveness import backward_peak, forward_peak, rerun_peak
from loadgauge.core.layers import View
from loadgauge.core.layers.feed_forward.moe import moe
from loadgauge.core.layers.operations.builder import Builder
from loadgauge.core.layers.operations.operations import Layer, Recompute


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One combination. model: whose sizes and router; ways: of the library, such as how experts are multiplied

    >>> Case(library="transformers", model="qwen3_moe", way="grouped_mm", experts=8, chosen=2, width=48, hidden=64, tokens=32).rows
    64
    """

    library: str
    model: str
    way: str
    experts: int
    chosen: int
    width: int
    hidden: int
    tokens: int
    shared: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, library: str, way: str, model: str, *, chosen: int = 0, tokens: int = 4096, ranks: int = 1) -> Case:
        """A case with the sizes of a model. chosen: experts a token, 0: the model's own"""
        sizes = SHAPES[model]
        shared = 0 if library == "torchtitan" and model == "qwen2_moe" else sizes.get("shared", 0)
        return cls(
            library=library, way=way, model=model, tokens=tokens, ranks=ranks, chosen=chosen or sizes["chosen"],
            experts=sizes["experts"], width=sizes["width"], hidden=sizes["hidden"], shared=shared,
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """Rows that a rank's experts compute."""
        return self.tokens * self.chosen

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the layer's input."""
        return (self.tokens, 1, self.hidden) if self.library == "megatron" else (1, self.tokens, self.hidden)

    @property
    def words(self) -> str:
        """The case in words."""
        size = f"{self.experts} x {self.width} of {self.hidden}, top {self.chosen}"
        return f"{self.library} {self.way} {self.model} {size}, {self.tokens} tokens, {self.ranks} ranks"


FIGURES = "kept", "forward", "backward", "rerun"
SHAPES: dict[str, dict[str, int]] = {
    "mixtral": {"experts": 8, "width": 14336, "hidden": 4096, "chosen": 2},
    "qwen2_moe": {"experts": 64, "width": 1408, "hidden": 2048, "shared": 5632, "chosen": 4},
    "qwen3_moe": {"experts": 128, "width": 768, "hidden": 2048, "chosen": 8},
    "deepseek_v3": {"experts": 256, "width": 2048, "hidden": 7168, "shared": 2048, "chosen": 8},
    "gpt_oss": {"experts": 32, "width": 2880, "hidden": 2880, "chosen": 4},
}
"""Sizes of Mixtral 8x7B, Qwen1.5-MoE, Qwen3-30B-A3B, DeepSeek-V3 and gpt-oss-20b."""


def spec(case: Case) -> Moe:
    """The mixture, as a family's reader describes it."""
    sizes: dict[str, Any] = {
        "num_experts": case.experts, "num_experts_per_tok": case.chosen, "moe_intermediate_size": case.width,
    }  # fmt: skip
    if case.shared:
        sizes["shared"] = Mlp(intermediate_size=case.shared)
    return Moe(**sizes, **MODELS[case.model])


MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"weights_float32": True},
    "qwen2_moe": {"norm_topk_prob": False, "shared_gate": True},
    "qwen3_moe": {},
    "deepseek_v3": {"router_score": "sigmoid", "router_float32": True, "weights_float32": True},
    "gpt_oss": {
        "activation": "clamped_swiglu", "expert_bias": True, "router_bias": True, "router_score": "softmax_of_chosen",
        "scores_float32": False,
    },
}  # fmt: skip


def kernels(case: Case) -> Kernels:
    """The kernels of the framework, with the case's way of running experts."""
    own = TRANSFORMERS if case.library == "transformers" else FRAMEWORKS[case.library].kernels
    how = {"eager": "looped", "batched_mm": "batched"}.get(case.way, own.experts)
    return msgspec.structs.replace(own, experts=how, dtypes=Dtypes(activation=2))


def listed(case: Case) -> Layer:
    """The list of operations for a case."""
    build = Builder(View.of(case.tokens, 1, kernels=kernels(case), ep=case.ranks))
    moe(build, build.residual("input", case.hidden), spec(case), case.hidden)
    return build.layer("moe")


def predicted(case: Case) -> tuple[float, float, float, float]:
    """The bytes that the list keeps, the most alive in its forward and in its backward, and in a backward that runs it again."""
    layer = listed(case)
    again = Recompute(checkpointed=layer.names)
    kept = layer.saved()
    return (
        kept,
        forward_peak(layer, held=("input",)),
        backward_peak(layer, 2),
        max(backward_peak(layer, 2, again), rerun_peak(layer)),
    )
