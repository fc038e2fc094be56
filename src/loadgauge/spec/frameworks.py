"""Frameworks: everything in which they differ, as fields. Nothing outside this file asks for a framework by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from loadgauge.spec.axes import MODEL_PARALLEL
from loadgauge.spec.kernels import Kernels, LowPrecision
from loadgauge.spec.layout import SCHEDULES, Schedule
from loadgauge.spec.overlap import Overlap
from loadgauge.spec.precision import TORCHAO, TRANSFORMER_ENGINE


class Framework(msgspec.Struct, frozen=True, kw_only=True):
    """What a framework does by default, as far as it decides memory or time.

    Numbers and kernels:
    precision: its usual 16-bit recipe
    low_precisions: its 8- and 4-bit recipes by name
    casts: who casts float32 weights to 16 bits: `autocast`, which keeps the residual stream in float32, or `fsdp`, which
        casts whole parameters
    transformer_engine: its layers are Transformer Engine's: cuDNN's attention, cuBLASLt workspaces, FP8 products

    Gradients and weights:
    gradients_persist: the gradient buffer exists from the start (Megatron, DeepSpeed), not only from backward on
    gradient_tensors: each weight's gradient is a tensor of its own until it is added to the buffer
    ddp_copies: plain data parallelism holds gradients a second time, in communication buckets
    fully_shards: ZeRO 2 and 3 are PyTorch's FSDP2. Both hold weights in shards; stage 2 (`reshard_after_forward=False`)
        keeps each layer gathered from its forward to its backward, stage 3 gathers it for each pass
    unit_gradients: the gradients of a layer are whole, in a buffer, until they are scattered (ZeRO 2 and 3)
    torch_optimizer: it runs PyTorch's own optimizers, of which the fused ones are assumed
    foreach_step: the optimizer step makes a temporary of one weight-sized copy
    float32_step: the optimizer step copies 16-bit gradients to float32
    buckets: elements of each communication bucket under ZeRO; 0: none beyond the gradient buffer
    live_parameters: elements that ZeRO 3 keeps gathered at most, whatever their layer; 0: it gathers layer by layer

    Communication:
    overlap: which of it is hidden under compute
    reduced: elements of a gradient bucket; each waits for the latency of its own reduction
    reduced_per_rank: elements that a bucket has at least for each rank it is reduced over
    reduces_by_layer: under ZeRO a bucket is one layer, whatever its size
    splits_sends: without sequence parallelism each tensor-parallel rank sends its part of the activations to the next
        stage, where they are gathered
    sends_in_turn: pipeline schedules that send and receive in turn with computing, whatever the overlap
    scripts_overlap: its published launch scripts switch the overlap of gradients and sends on

    What a search may choose:
    splits_model: whether it runs tensor, pipeline, context and expert parallelism
    hybrid_shards: whether ZeRO shards may have replicas
    zero_stages, schedules: those it runs
    only_own_schedules: whether its pipeline is its own, so that no schedule can be added to it
    recomputes_parts: whether parts of a layer can be recomputed, or only whole layers
    """

    name: str
    kernels: Kernels
    precision: str
    low_precisions: tuple[tuple[str, LowPrecision], ...] = ()
    casts: Literal["autocast", "fsdp"] = "autocast"
    transformer_engine: bool = False
    gradients_persist: bool
    gradient_tensors: bool = False
    ddp_copies: bool = False
    fully_shards: bool = False
    unit_gradients: bool = False
    torch_optimizer: bool = False
    foreach_step: bool = False
    float32_step: bool = False
    buckets: int = 0
    live_parameters: int = 0
    overlap: Overlap = Overlap()
    reduced: float = 25 * 2**20 / 4
    reduced_per_rank: float = 0
    reduces_by_layer: bool = False
    splits_sends: bool = False
    sends_in_turn: tuple[Schedule, ...] = ()
    scripts_overlap: bool = False
    splits_model: bool = True
    hybrid_shards: bool = True
    zero_stages: tuple[int, ...] | None = None
    schedules: tuple[Schedule, ...] = SCHEDULES
    only_own_schedules: bool = False
    recomputes_parts: bool = True
    source: str

    @property
    def is_default(self) -> bool:
        """Whether it is the one where none is named and the model is not split."""
        return self.name == DEFAULT

    @property
    def weights_stage(self) -> int:
        """The ZeRO stage from which on weights are held in shards."""
        return 2 if self.fully_shards else 3


TRANSFORMERS = Kernels(
    norm="upcast", softmax_float32=True, repeat_kv=True, views_pin_storage=True, written_mask=True, joint_output=True
)
"""The modules of Hugging Face's transformers, as they are written."""

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework(
            name="huggingface",
            kernels=TRANSFORMERS,
            precision="bf16-mixed-16", gradients_persist=False, ddp_copies=True, fully_shards=True, torch_optimizer=True,
            # DDP, and FSDP's SHARD_GRAD_OP and FULL_SHARD; its models checkpoint whole layers, or none.
            splits_model=False, zero_stages=(0, 2, 3), schedules=("1f1b",), recomputes_parts=False,
            source="transformers",
        ),
        Framework(
            name="megatron",
            kernels=Kernels(
                activation="fused", experts="fused", loss="inplace", vocabulary_multiple=128, gradient_placeholders=True
            ),
            precision="bf16-mixed-18",
            low_precisions=(
                *TRANSFORMER_ENGINE.items(),
                *((f"{name}-primary", msgspec.structs.replace(low, weights="instead", gathers=True))
                  for name, low in TRANSFORMER_ENGINE.items()),
            ),
            transformer_engine=True, gradients_persist=True, gradient_tensors=True, unit_gradients=True,
            # As its buckets grow with the ranks, beyond 40 of them there are the fewer buckets the more ranks there are,
            # and a step with more GPUs may be the faster one.
            reduced=40e6, reduced_per_rank=1e6,
            splits_sends=True,  # source: narayanan2021
            sends_in_turn=("1f1b", "gpipe"), scripts_overlap=True,
            # ZeRO 2 and 3 are Megatron-FSDP's.
            schedules=("1f1b", "interleaved"), only_own_schedules=True,
            source="megatron-lm",
        ),
        Framework(
            name="torchtitan",
            kernels=Kernels(keep_gathered=True, views_pin_storage=True),
            precision="bf16-autocast", low_precisions=tuple(TORCHAO.items()), casts="fsdp",
            gradients_persist=False, fully_shards=True, torch_optimizer=True, reduces_by_layer=True,
            # FSDP2 shards everything, or nothing (DDP).
            zero_stages=(0, 3), schedules=("1f1b", "gpipe", "interleaved", "zb-v", "dualpipev"),
            source="pytorch",
        ),
        Framework(
            name="deepspeed",
            kernels=TRANSFORMERS,
            precision="bf16-mixed-16", gradients_persist=True, float32_step=True, buckets=500_000_000,
            live_parameters=10**9, reduced=500e6,
            splits_model=False, hybrid_shards=False, schedules=("1f1b",), recomputes_parts=False,
            source="rajbhandari2019",
        ),
    )
}  # fmt: skip
"""Every framework by name."""

LOW_PRECISIONS: dict[str, dict[str, LowPrecision]] = {
    name: dict(framework.low_precisions) for name, framework in FRAMEWORKS.items() if framework.low_precisions
}
"""Recipes of 8 and 4 bits by framework and name, on top of the framework's 16-bit recipe.

`-primary` holds the weights in 8 or 4 bits and not in 16 too (Megatron's `--fp8-param-gather`, with
`--reuse-grad-buf-for-mxfp8-param-ag` for MXFP8). In 16 bits remain attention itself, norms, the router, the embedding,
the head and adapters.
"""

DEFAULT, DEFAULT_SPLIT = "huggingface", "megatron"
"""The framework where none is named: of a model that one GPU holds, and of one that is split over GPUs."""


def default_framework(degrees: Mapping[str, Sequence[int]], *, adapters: bool = False) -> str:
    """Return the framework where none is named. Every command and function uses this rule.

    `megatron` where the model must be split over GPUs, or may be while all of it is trained; else `huggingface`.

    degrees: for each of `MODEL_PARALLEL` the values that it may have: one where it is settled, several where a search
        is to choose; an axis that is left out is 1
    adapters: whether only adapters are trained

    >>> default_framework({"tp": [1]}), default_framework({"tp": [8]}), default_framework({"tp": [1, 2, 4, 8]})
    ('huggingface', 'megatron', 'megatron')
    >>> default_framework({"tp": [1, 2, 4, 8]}, adapters=True), default_framework({"tp": [2, 4]}, adapters=True)
    ('huggingface', 'megatron')
    """
    axes = [degrees.get(name, (1,)) for name in MODEL_PARALLEL]
    must = any(min(values) > 1 for values in axes)
    may = any(max(values) > 1 for values in axes)
    return DEFAULT_SPLIT if must or (may and not adapters) else DEFAULT
