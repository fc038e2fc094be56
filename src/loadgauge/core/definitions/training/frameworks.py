"""Frameworks: everything in which they differ, as fields. Nothing outside this file asks for a framework by its name."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.definitions.hardware.host import HostBuffers
from loadgauge.core.definitions.layout.axes import MODEL_PARALLEL
from loadgauge.core.definitions.layout.layout import SCHEDULES, Schedule
from loadgauge.core.definitions.layout.overlap import Overlap
from loadgauge.core.definitions.layout.zero_engine import ZeroEngine
from loadgauge.core.definitions.model.attention_kernels import (
    SDPA,
    TORCHTITAN as TORCHTITAN_ATTENTION,
    TRANSFORMER_ENGINE as TRANSFORMER_ENGINE_ATTENTION,
    Choice,
    flash_kernel,
)
from loadgauge.core.definitions.model.kernels import Kernels, LowPrecision, with_compile
from loadgauge.core.definitions.training.memory_range import Stack
from loadgauge.core.definitions.training.precision import ALIASES, TORCHAO, TRANSFORMER_ENGINE
from loadgauge.core.definitions.training.stacks import (
    ADAMW_STEP,
    END_UNITS,
    EXPERTS_QUANTISED,
    EXPERTS_QUANTISED_UNSLOTH,
    EXPERTS_RUN,
    LOADED_DTYPE,
    LOADED_DTYPE_UNSLOTH,
    NEWEST_STACK,
    NON_REENTRANT,
    RERUNS,
    Habit,
    Stack as Releases,
)


class Framework(msgspec.Struct, frozen=True, kw_only=True):
    """A framework's defaults that decide memory or time.

    Numbers and kernels:
    precision: its usual 16-bit recipe
    stack: what it is used for, by which what its software adds to its kernels' time, and the spread of measured memory, are known
    low_precisions: its 8- and 4-bit recipes by name
    casts: who casts float32 weights to 16 bits: `autocast`, which keeps the residual stream in float32, or `fsdp`, which
        casts whole parameters
    loaded: the dtype in which weights are loaded, by its releases; they are trained in it, under autocast, without another
        copy. None: its recipe does not depend on it
    sharded: its usual recipe where FSDP shards the weights, if that is another one
    transformer_engine: its layers are Transformer Engine's: cuBLASLt workspaces, FP8 products
    flash: which kernel of fused attention it runs, by card and releases

    Gradients and weights:
    gradients_persist: the gradient buffer exists from the start (Megatron, DeepSpeed), not only from backward on
    gradient_tensors: each weight's gradient is a tensor of its own until it is added to the buffer
    ddp_copies: plain data parallelism holds gradients a second time, in communication buckets
    fully_shards: ZeRO 2 and 3 are PyTorch's FSDP2. Both hold weights in shards; stage 2 (`reshard_after_forward=False`)
        keeps each layer gathered from its forward to its backward, stage 3 gathers it for each pass
    end_units: whether its FSDP2 has the embedding and the head as units of their own (`apart`), where they are not tied
    unit_gradients: the gradients of a layer are whole, in a buffer, until they are scattered (ZeRO 2 and 3)
    returns_float32: what a model returns from autocast is copied to float32, its logits too (source: accelerate,
        `utils/operations.py`, `convert_to_fp32`)
    prepares: its adapters' base is prepared as PEFT does unless said otherwise: what is not quantised becomes float32
    peft: adapters are PEFT's, in float32 beside 16-bit weights, and run under autocast (Trainer's `bf16` and `fp16`)
    quantises_experts: routed experts of a base in 4 or 8 bits are quantised too, by its releases
    fused_adapters: it runs the adapters of attention and MLP inside the function of the layer (Unsloth), which keeps the layer's
        input and what the activation reads, and makes the rest again in backward
    joint_adapters: its adapters, and its quantised base, are LitGPT's (`Lora.joint`); one card recomputes nothing unless told to
    shared_matrix: it makes quantised matrices in 16 bits in one buffer as large as the largest, for good
    offloads_checkpoints: with full recomputation the inputs of the layers wait in host memory
    reduces_once: where it accumulates micro-batches under FSDP it reduces gradients with the last one only (`no_sync`), and
        every rank holds all of them whole until then
    flat_parameters: it shards by FSDP1, each unit as one flat tensor: where some of a unit's weights are trained, there is a
        gradient of all of them
    optimizer_step: how it runs an optimizer that can run in several ways (`Optimizer.variants`), by its releases
    own_optimizers: those ways that are its own, whatever the release
    engine: what runs ZeRO 1 to 3 where that is neither FSDP2 nor layer by layer; its optimizer step copies 16-bit gradients
        to float32
    embeddings_32bit: it tells bitsandbytes to keep the states of embeddings in float32 (transformers' `Trainer.create_optimizer`)
    host: what it has in host memory where states are offloaded
    expandable: its launch scripts let segments of the allocator grow (`expandable_segments`), where the card's driver can

    Communication:
    overlap: which of it is hidden under compute
    reduced: elements of a gradient bucket; each waits for the latency of its own reduction
    reduced_per_rank: elements that a bucket has at least for each rank it is reduced over
    reruns: how much of a checkpointed layer runs again (`RERUNS`)
    reduces_by_layer: under ZeRO a bucket is one layer, whatever its size
    experts: how it runs them, by its releases, where that is not always as its kernels say
    experts_by_te: models with experts are its own, of Transformer Engine's norms and attention
    sums_beside: its column-parallel matrices gather inputs and sum gradients beside their products in
        backward (`Overlap.prefetch`)
    splits_sends: without sequence parallelism each tensor-parallel rank sends its part of the activations to the next
        stage, where they are gathered
    sends_in_turn: pipeline schedules that send and receive in turn with computing, whatever the overlap
    scripts_overlap: its published launch scripts switch the overlap of gradients and sends on
    unties: its models have embedding and head as two matrices, whatever their configuration says
    scripts_zero: the ZeRO stage that they run where nothing is said, over several GPUs
    scripts_dispatch: on Blackwell they dispatch tokens by HybridEP (`Kernels.dispatch`)

    What a search may choose:
    splits_model: whether it runs tensor, pipeline, context and expert parallelism
    hybrid_shards: whether ZeRO shards may have replicas
    zero_stages, schedules: those it runs
    fsdp_apart: whether ZeRO 2 and 3 are another engine's, whose checkpoints are others (Megatron-FSDP)
    only_own_schedules: whether its pipeline is its own, so that no schedule can be added to it
    recomputes_parts: whether parts of a layer can be recomputed, or only whole layers
    selective: its own meaning of `--recompute selective`; Megatron's is the core of attention (korthikanti2022)
    """

    name: str
    kernels: Kernels
    precision: str
    stack: Stack = "fine-tuning"
    low_precisions: tuple[tuple[str, LowPrecision], ...] = ()
    casts: Literal["autocast", "fsdp"] = "autocast"
    loaded: Habit | None = None
    sharded: str = ""
    transformer_engine: bool = False
    flash: tuple[Choice, ...] = SDPA
    gradients_persist: bool
    gradient_tensors: bool = False
    ddp_copies: bool = False
    fully_shards: bool = False
    end_units: Habit = Habit.always("root", "its launch scripts")
    unit_gradients: bool = False
    reruns: Habit = Habit.always("whole", "its own function of autograd")
    peft: bool = False
    quantises_experts: Habit = EXPERTS_QUANTISED
    returns_float32: bool = False
    prepares: bool = True
    fused_adapters: bool = False
    joint_adapters: bool = False
    shared_matrix: bool = False
    offloads_checkpoints: bool = False
    reduces_once: bool = False
    flat_parameters: bool = False
    optimizer_step: Habit = Habit.always("fused", "its launch scripts")
    own_optimizers: tuple[str, ...] = ()
    engine: ZeroEngine | None = None
    embeddings_32bit: bool = False
    host: HostBuffers = HostBuffers()
    expandable: bool = False
    overlap: Overlap = Overlap()
    reduced: float = 25 * 2**20 / 4
    reduced_per_rank: float = 0
    reduces_by_layer: bool = False
    experts: Habit | None = None
    experts_by_te: bool = False
    splits_sends: bool = False
    sends_in_turn: tuple[Schedule, ...] = ()
    scripts_overlap: bool = False
    scripts_zero: int = 0
    scripts_dispatch: bool = False
    sums_beside: bool = False
    splits_model: bool = True
    unties: bool = False
    hybrid_shards: bool = True
    zero_stages: tuple[int, ...] | None = None
    schedules: tuple[Schedule, ...] = SCHEDULES
    fsdp_apart: bool = False
    only_own_schedules: bool = False
    recomputes_parts: bool = True
    selective: str = "selective"
    source: str

    def flash_on(self, card: Gpu | None, stack: Releases = NEWEST_STACK) -> str:
        """Return the kernel of fused attention that it runs on a card with these releases."""
        return flash_kernel(self.flash, card, stack)

    @property
    def flash_libraries(self) -> tuple[str, ...]:
        """The libraries whose releases decide which kernel of attention it runs."""
        return tuple(dict.fromkeys(library for choice in self.flash for library, _ in choice.since))

    @property
    def is_default(self) -> bool:
        """Return whether this is the framework that is assumed for an unsplit model."""
        return self.name == DEFAULT

    @property
    def weights_stage(self) -> int:
        """The ZeRO stage from which on weights are held in shards."""
        return 2 if self.fully_shards else 3


TRANSFORMERS = Kernels(
    norm="upcast",
    norm_kernel="written",
    softmax_float32=True,
    repeat_kv=True,
    views_pin_storage=True,
    written_mask=True,
    writes_groups=True,
    joint_output=True,
)
"""The modules of Hugging Face's transformers, as they are written."""

DDP = Overlap(dp=True)
"""PyTorch's DistributedDataParallel reduces its buckets beside the backward, always."""

FSDP_HOST = HostBuffers(gradients=("all",), copies=None)
"""FSDP2's `CPUOffloadPolicy`: shards and their gradients; of a plain optimizer on the host (torchao's
`CPUOffloadOptimizer`), a copy of each weight and of its gradient."""

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework(
            name="huggingface",
            kernels=TRANSFORMERS,
            precision="bf16-mixed-16", gradients_persist=False, ddp_copies=True, fully_shards=True, peft=True,
            # accelerate runs 8-bit products by torchao or Transformer Engine (its `fp8_backend`).
            low_precisions=tuple({**TRANSFORMER_ENGINE, **TORCHAO}.items()),
            loaded=LOADED_DTYPE, sharded="bf16-fsdp-16", end_units=END_UNITS, returns_float32=True,
            optimizer_step=ADAMW_STEP, own_optimizers=("transformers",),
            embeddings_32bit=True, host=FSDP_HOST, experts=EXPERTS_RUN,
            overlap=DDP, reruns=RERUNS,
            reduces_once=True,  # Trainer enters accelerate's `no_sync` for every micro-batch but the last
            # DDP, and FSDP's SHARD_GRAD_OP and FULL_SHARD; its models checkpoint whole layers, or none.
            splits_model=False, zero_stages=(0, 2, 3), schedules=("1f1b",), recomputes_parts=False,
            source="transformers",
        ),
        Framework(
            name="megatron",
            kernels=Kernels(
                norm_kernel="fused", activation="fused", experts="fused", loss="inplace", vocabulary_multiple=128,
                gradient_placeholders=True,
            ),
            flash=TRANSFORMER_ENGINE_ATTENTION,
            precision="bf16-mixed-18", stack="pretraining",
            optimizer_step=Habit.always("fused", "megatron-lm: optimizer/__init__.py, FusedAdam"),
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
            sums_beside=True,  # megatron-core: tensor_parallel/layers.py; transformer_engine: module/linear.py
            # Float32 weights and gradients are page-locked (optimizer/cpu_offloading/hybrid_optimizer.py).
            host=HostBuffers(copies=4, pinned_below=4, parts=True),
            # ZeRO 2 and 3 are Megatron-FSDP's.
            schedules=("1f1b", "interleaved"), only_own_schedules=True, fsdp_apart=True,
            source="megatron-lm",
        ),
        Framework(
            name="torchtitan",
            kernels=Kernels(keep_gathered=True, views_pin_storage=True, experts="scattered"), flash=TORCHTITAN_ATTENTION,
            precision="bf16-autocast", stack="FSDP", low_precisions=tuple(TORCHAO.items()), casts="fsdp",
            gradients_persist=False, fully_shards=True, reduces_by_layer=True,
            optimizer_step=Habit.always("fused", "torchtitan 0.2: components/optimizer.py"),
            overlap=DDP,
            host=FSDP_HOST, expandable=True,  # run_train.sh
            # FSDP2 shards everything, or nothing (DDP).
            zero_stages=(0, 3), schedules=("1f1b", "gpipe", "interleaved", "zb-v", "dualpipev"),
            scripts_zero=3,  # config/job_config.py: data_parallel_shard_degree = -1
            selective="per-op",  # distributed/activation_checkpoint.py, `_apply_op_sac`
            source="pytorch",
        ),
        Framework(
            name="torchtune",
            # GQA's keys and values are expanded to all heads; norms are in float32; weights, gradients and states in 16 bits.
            kernels=Kernels(norm="upcast", views_pin_storage=True, loss_pieces=8),
            overlap=DDP, reruns=Habit.always("part", NON_REENTRANT),
            precision="bf16-pure", low_precisions=tuple(TORCHAO.items()),
            gradients_persist=False, fully_shards=True, reduces_by_layer=True, host=FSDP_HOST,
            expandable=True,  # torchtune/__init__.py sets it unless the environment has a setting
            splits_model=False, zero_stages=(0, 2, 3), schedules=("1f1b",), recomputes_parts=False,
            scripts_zero=3,  # recipes/full_finetune_distributed.py: fsdp_reshard_after_forward = True
            source="torchtune",
        ),
        Framework(
            name="litgpt",
            kernels=Kernels(
                norm="upcast", norm_kernel="written", activation="unfused", written_gelu=False, views_pin_storage=True,
                # lightning: fabric/wrappers.py, _FabricModule.forward, and its plug-ins' convert_output.
                loss="plain", loss_pieces=8, holds_logits=True,
            ),
            joint_adapters=True,
            precision="bf16-pure", low_precisions=tuple(TORCHAO.items()),
            gradients_persist=False, fully_shards=True, reduces_once=True, flat_parameters=True,
            overlap=DDP, reruns=Habit.always("part", NON_REENTRANT),
            optimizer_step=Habit.always("foreach", "litgpt 0.5.13: utils.py, instantiate_torch_optimizer"),
            splits_model=False, zero_stages=(0, 3), schedules=("1f1b",), recomputes_parts=False,
            unties=True,  # litgpt/scripts/convert_hf_checkpoint.py writes both; of pretrain.py, `tie_embeddings` is False
            scripts_zero=3,  # litgpt/pretrain.py, finetune/full.py: FSDPStrategy over several devices
            source="litgpt",
        ),
        Framework(
            name="unsloth",
            # Norms, rotations and SwiGLU by its own kernels; of the logits a chunk at a time, in forward and in backward again.
            kernels=Kernels(
                norm="fused", norm_kernel="fused", activation="fused", activation_in_place=True, loss="chunked",
            ),
            precision="bf16-mixed-16", gradients_persist=False, ddp_copies=True, fully_shards=True, peft=True,
            loaded=LOADED_DTYPE_UNSLOTH, quantises_experts=EXPERTS_QUANTISED_UNSLOTH, sharded="bf16-fsdp-16",
            optimizer_step=ADAMW_STEP, own_optimizers=("transformers",), embeddings_32bit=True, host=FSDP_HOST,
            overlap=DDP,
            fused_adapters=True, shared_matrix=True, offloads_checkpoints=True, prepares=False, reduces_once=True,
            splits_model=False, zero_stages=(0,), schedules=("1f1b",), recomputes_parts=False,
            source="unsloth",
        ),
        Framework(
            name="deepspeed",
            kernels=TRANSFORMERS,
            precision="bf16-mixed-16", low_precisions=tuple(TRANSFORMER_ENGINE.items()),
            gradients_persist=True, engine=ZeroEngine(), reruns=RERUNS, experts=EXPERTS_RUN,
            optimizer_step=Habit.always("fused", "deepspeed 0.19.8: runtime/engine.py, FusedAdam"),
            reduced=500e6,
            # stage_1_and_2.py: fp32 partition, its gradient and a 16-bit buffer; stage3.py: gradients in float32 and 16 bits.
            host=HostBuffers(
                gradients=("optimizer", "all"), gradients_from=2, copies=6, pinned=("weights", "copies"),
                pinned_below=3, largest=True, accumulates=2, parts=True,
            ),
            splits_model=False, hybrid_shards=False, schedules=("1f1b",), recomputes_parts=False,
            source="rajbhandari2019",
        ),
    )
}  # fmt: skip
"""Every framework by name."""


def _like(name: str, other: str, **changes: Any) -> None:
    """Adds a framework that is another one but for what is said."""
    FRAMEWORKS[name] = msgspec.structs.replace(FRAMEWORKS[other], name=name, **changes)


_like(
    # Megatron-Bridge and NeMo: Megatron's core, with what their recipes switch on.
    "nemo",
    "megatron",
    overlap=Overlap(tp=True, dp=True),
    scripts_overlap=False,
    scripts_zero=1,
    scripts_dispatch=True,  # perf_recipes: of those for Blackwell four of five, for Hopper a third
    source="megatron-bridge",
)
_like(
    # Of 2021-22 (BLOOM, MT-NLG): kernels from before FlashAttention; gradients reduced, and activations sent, in turn with
    # computing (runtime/pipe/engine.py: `_exec_reduce_grads` after the last backward, blocking `p2p.send`).
    "megatron-deepspeed",
    "megatron",
    kernels=msgspec.structs.replace(
        FRAMEWORKS["megatron"].kernels, attention="eager", experts="grouped", gradient_placeholders=False
    ),
    host=HostBuffers(),
    precision="bf16-mixed-16",
    low_precisions=(),
    transformer_engine=False,
    unit_gradients=False,
    flash=SDPA[-1:],
    overlap=Overlap(cp=False, pp=False),
    scripts_overlap=False,
    sums_beside=False,
    splits_sends=False,
    zero_stages=(0, 1),
    schedules=("1f1b",),
    source="smith2022",
)
_like(
    # Plain scripts over PyTorch's FSDP (fms-fsdp, Lightning): one unit a layer, each a flat tensor (FSDP1).
    "fsdp",
    "torchtitan",
    kernels=Kernels(views_pin_storage=True),
    flat_parameters=True,
    splits_model=False,
    zero_stages=(0, 2, 3),
    schedules=("1f1b",),
    expandable=False,
    reruns=Habit.always("part", NON_REENTRANT),
)
_like(
    "llm-foundry",
    "fsdp",
    precision="bf16-autocast",
    flash=(
        Choice("fa2", "llm-foundry 0.4: setup.py, flash-attn 2", since=(("flash-attn", (2,)),)),
        Choice("fa1", "llm-foundry 0.3: setup.py, flash-attn 1 and triton-pre-mlir"),
    ),
    source="llm-foundry",
)
_like(
    # transformers' modules over FSDP2, with PyTorch's tensor and pipeline parallelism.
    "automodel",
    "torchtitan",
    kernels=msgspec.structs.replace(TRANSFORMERS, keep_gathered=True),
    stack="fine-tuning",
    low_precisions=(*TORCHAO.items(),),
    zero_stages=(0, 2, 3),
    expandable=False,
    source="nemo-automodel",
    experts_by_te=True,  # components/moe/utils.py: BackendConfig
    reruns=Habit.always("part", NON_REENTRANT),
)
_like(
    # One compiled model under DDP.
    "nanogpt",
    "fsdp",
    kernels=with_compile(Kernels()),
    flat_parameters=False,
    fully_shards=False,
    ddp_copies=True,
    hybrid_shards=False,
    low_precisions=(),
    casts="autocast",
    zero_stages=(0, 1),
    scripts_zero=0,
    source="pytorch",
)
_like(
    # XLA fuses what is done element by element, and its scheduler hides collectives under other work; GSPMD shards float32
    # weights, which are read in bfloat16, over the `fsdp` axis.
    "maxtext",
    "torchtitan",
    kernels=with_compile(Kernels(keep_gathered=True)),  # and experts as transformers groups them
    overlap=Overlap(tp=True, dp=True),
    stack="pretraining",
    expandable=False,
    low_precisions=(),
    schedules=("1f1b", "interleaved"),
    flash=TRANSFORMER_ENGINE_ATTENTION,
    source="maxtext",
    reruns=Habit.always("part", "XLA, which leaves out what nothing reads"),
)

LOW_PRECISIONS: dict[str, dict[str, LowPrecision]] = {
    name: dict(framework.low_precisions) for name, framework in FRAMEWORKS.items() if framework.low_precisions
}
"""Recipes of 8 and 4 bits by framework and name, on top of the framework's 16-bit recipe.

`-primary` holds the weights in 8 or 4 bits and not in 16 too (Megatron's `--fp8-param-gather`, with
`--reuse-grad-buf-for-mxfp8-param-ag` for MXFP8). In 16 bits remain attention itself, norms, the router, the embedding,
the head and adapters.
"""
LOW_NAMES = tuple(dict.fromkeys((*ALIASES, *(name for recipes in LOW_PRECISIONS.values() for name in recipes))))
"""Names of all recipes of 8 and 4 bits."""

OTHER_NAMES = dict.fromkeys(("transformers", "hf", "trl", "accelerate", "peft"), "huggingface") | {
    "megatron-lm": "megatron"
}
"""Other names of frameworks: of the libraries that train in the same way."""

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
