"""Memory of inference: weights, cache, what is alive in a forward, logits, and what lies outside PyTorch."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from loadgauge.core.base import MIB, Size, Verdict, judge, maximum
from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.definitions.model.lora import BASE_FORMATS
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.serving.by_card import captured_on
from loadgauge.core.definitions.serving.inference import CACHE_FORMATS, WEIGHT_FORMATS, WHOLE_FORMATS, Inference
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.core.estimate.memory.liveness import forward_peak
from loadgauge.core.estimate.memory.recompute import applied
from loadgauge.core.estimate.schedule.stages import Stage
from loadgauge.core.estimate.states.overhead import Assumed, non_pytorch_memory
from loadgauge.core.layers.attention.cache import Kept, kept_by_block
from loadgauge.core.layers.embedding_head import vocabulary
from loadgauge.core.layers.operations.operations import Weight
from loadgauge.core.serving.passes import of_chunk, parts

GRAPH = Assumed(16 * MIB, 5 * MIB, 45 * MIB)
"""A CUDA graph of one size of batch: all 67 take 1 to 3 GiB by vLLM's own warning (source: vllm, `model_runner.py`)."""
LARGEST_GRAPH = 512
SEQUENCES = 256
"""Sequences at once for which servers capture graphs at least (vLLM's `max_num_seqs`)."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the rank that needs the most.

    low, high: with what lies outside PyTorch at its least and most; beside: further parts, such as a draft and CUDA graphs
    host: bytes in host memory; starts: whether its server has room for the cache of one request
    """

    weights: float
    cache: float
    activations: float
    logits: float = 0.0
    beside: dict[str, float] = {}
    outside: float
    low: float
    high: float
    stage: int
    host: float = 0.0
    capacity: float | None = None
    starts: bool = True

    @property
    def parts(self) -> dict[str, float]:
        """Return its bytes by part."""
        own = {name: getattr(self, name) for name in ("weights", "cache", "activations", "logits")}
        return own | self.beside | {"outside": self.outside}

    @property
    def total(self) -> float:
        """The sum of all parts [bytes]."""
        return sum(self.parts.values())

    @property
    def verdict(self) -> Verdict:
        """Return whether the card holds it (see `loadgauge.core.base.verdict`)."""
        return judge(self.low, self.high, self.capacity) if self.starts else "does not fit"

    @property
    def fits(self) -> bool | None:
        """Return whether the card holds the upper end; None without a card."""
        return None if self.capacity is None else self.verdict == "fits"


def stored(weight: Weight, name: str) -> float:
    """Return the bytes of an element of a weight: matrices of the blocks in a format, all else in 16 bits; vectors alone, where
    the copy is stored whole.

    >>> stored(Weight("gate", 100), "nf4") < 0.52, stored(Weight("norm", 100, kind="vector"), "nf4")
    (True, 2)
    >>> stored(Weight("embedding", 100, kind="table"), "nf4"), stored(Weight("embedding", 100, kind="table"), "q4_0")
    (2, 0.5625)
    """
    if name in WHOLE_FORMATS and weight.kind != "vector":
        return WHOLE_FORMATS[name]
    usual = 4 if name == "fp32" else 2
    base = BASE_FORMATS.get(name)
    if weight.kind != "matrix" or (base is not None and base.experts_only and not weight.expert):
        return usual
    return WEIGHT_FORMATS[name]


def cache(model: ModelSpec, asked: Inference, stage: Stage) -> float:
    """Return the bytes of the cache of all sequences of the batch, at their whole context, on a rank of a stage.

    Keys and values (a window's at most), latents, and states. Of tokens that the cache of prefixes holds there is one copy.
    """
    if asked.task == "forward":
        return 0.0
    itemsize, total, shared = CACHE_FORMATS[asked.cache_format], 0.0, 0.0
    cached = engine_of(asked).cached or 0
    for kind in stage.pattern:
        kept = kept_by_block(model.blocks[kind], model.hidden_size, asked.tp)
        total += kept.elements(asked.context) * itemsize + fixed_bytes(kept)
        shared += kept.elements(cached) * itemsize
    return asked.batch * (total - shared) + shared


def fixed_bytes(kept: Kept) -> Size:
    """Return the bytes that a sequence keeps on a rank whatever its length: a linear mixer's state, which is float32 in the kernels
    that carry it from token to token, and the inputs of a convolution."""
    return 4 * kept.state + 2 * kept.convolution


def engine_of(asked: Inference) -> Engine:
    """Return the engine that serves, with its options; of none, one without graphs."""
    return Engine(kind="hf", graphs=False) if asked.server is None else Engine.parse(asked.server, "server")


class Drafted(NamedTuple):
    """Bytes of a draft on a rank: weights and cache; and its layers. tower, seeing, seen: bytes of a tower of pictures: weights,
    what is alive while it runs, and what it makes"""

    weights: float = 0.0
    cache: float = 0.0
    layers: int = 0
    tower: float = 0.0
    seeing: float = 0.0
    seen: float = 0.0


UNAIDED = Drafted()


def bare(asked: Inference) -> Drafted:
    """Return what lies beside a model that has neither a draft nor a tower."""
    return UNAIDED


def memory(
    model: ModelSpec, asked: Inference, stages: tuple[Stage, ...], gpu: Gpu | None, drafted: Drafted = UNAIDED
) -> Memory:
    """Return the memory of the fullest stage. drafted: of a draft beside it"""
    return max((_of(model, asked, stage, gpu, drafted) for stage in stages), key=lambda held: held.total)


def captured(sequences: int, most: int | None = None) -> int:
    """Return the number of batch sizes that vLLM captures: 1, 2, 4 and the multiples of 8 up to twice the sequences, 512 at most.

    most: the largest of them, where it is said

    >>> captured(256), captured(4), captured(256, most=8)
    (67, 4, 4)
    """
    most = most or min(2 * sequences, LARGEST_GRAPH)
    return sum(1 for size in (1, 2, 4) if size <= most) + most // 8


def kept_and_held(model: ModelSpec, asked: Inference, stage: Stage, *, ends: bool) -> tuple[float, float]:
    """Return the bytes of weights and of cache of a model on a rank. ends: with embedding and head"""
    listed = parts(model, stage, of_chunk(model, asked), 1, asked.attentions)
    weights: Size = sum(
        part.times * sum(weight.numel * stored(weight, asked.weight_format) for weight in part.layer.weights)
        for part in listed
        if ends or part.name not in ("embedding", "head")
    )
    return weights, cache(model, asked, stage)


def _of(model: ModelSpec, asked: Inference, stage: Stage, gpu: Gpu | None, drafted: Drafted) -> Memory:
    rows = asked.batch if asked.task == "generate" else asked.at_once
    view, nothing = of_chunk(model, asked), RecomputePolicy(mode="full")
    weights: Size = 0
    hosted: Size = 0
    alive: Size = 0
    logits: Size = 0
    for part in parts(model, stage, view, rows, asked.attentions):
        for weight in part.layer.weights:
            nbytes = part.times * weight.numel * stored(weight, asked.weight_format)
            if asked.experts_from and weight.expert and weight.kind == "matrix":
                hosted += nbytes
            else:
                weights += nbytes
        if part.name == "head":
            logits = 2 * rows * (vocabulary(model, view) if model.head.kind == "lm" else 0)
        elif part.name != "embedding":
            again = applied(nothing, part.layer, part.layer.names)
            alive = maximum(alive, forward_peak(part.layer, again, ("input",)))
    outside = non_pytorch_memory(Layout(tp=asked.tp, pp=asked.pp, ep=asked.ep, dp=asked.attentions, seq_len=1), gpu)
    kept = cache(model, asked, stage)
    # Logits of the last tokens are made when the layers' tensors are gone.
    beside, spread = {}, Assumed(0, 0, 0)
    if drafted.weights or drafted.cache:
        beside["draft"] = drafted.weights + drafted.cache
    if drafted.tower and stage.first:
        beside["tower"] = drafted.tower
        alive = maximum(alive + drafted.seen, drafted.seeing)
    engine = engine_of(asked)
    if engine.graphs:
        usual = captured(max(asked.batch, SEQUENCES), engine.captured)
        sizes = captured_on(engine.kind, gpu, asked.tp, engine.captured) or usual
        graphs = sizes * (1 + drafted.layers / len(model.pattern))
        beside["graphs"] = GRAPH.value * graphs
        spread = Assumed(0, (GRAPH.low - GRAPH.value) * graphs, (GRAPH.high - GRAPH.value) * graphs)
    inside = weights + kept + max(alive, logits) + sum(beside.values())
    return Memory(
        weights=weights,
        cache=kept,
        activations=max(0, alive - logits),
        logits=logits,
        outside=outside.value,
        beside=beside,
        host=hosted,
        low=inside + outside.low + spread.low,
        high=inside + outside.high + spread.high,
        stage=stage.index,
        capacity=None if gpu is None else gpu.capacity,
    )


def largest_batch(
    model: ModelSpec,
    asked: Inference,
    stages: tuple[Stage, ...],
    gpu: Gpu,
    held: Callable[[Inference], Drafted] = bare,
) -> int:
    """Return the largest batch whose memory fits the card, upper end included; 0 where not even one sequence fits.

    held: the memory of speculation at a batch: a draft model or MTP heads
    """

    def fits(batch: int) -> bool:
        of = msgspec.structs.replace(asked, batch=batch)
        return bool(memory(model, of, stages, gpu, held(of)).fits)

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 10**6:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
