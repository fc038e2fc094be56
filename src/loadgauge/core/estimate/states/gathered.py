"""Copies besides the model states at each point of a step: gathered weights, whole gradients, buckets, 16-bit copies.

What PyTorch's FSDP2 holds of one rank's model, layer by layer (source: pytorch, `torch/distributed/fsdp/_fully_shard`):

- a head and its norm are a unit, and the embedding another one, where the framework says so and they are not tied
  (`Framework.end_units`): the embedding is gathered for its forward, the head from its forward to its backward, after which
  its gradients are reduced;
- else embedding and head are one unit, gathered from the first forward to the end of backward; their gradients are whole until
  then;
- in forward, a layer is gathered into a buffer and copied out of it; the buffer stays until the next layer is copied;
- stage 2 (`reshard_after_forward=False`) keeps every layer gathered from its forward to its backward; stage 3 gathers it
  for each pass, and in backward the next one ahead (at the loss, the last layer);
- the gradient of a layer is computed in the compute dtype, is copied to the dtype it is reduced in, and this copy
  stays until the backward of the next layer is over.

One rank gathers nothing; from two on, gathered weights exist alongside the shards, so that where most weights are frozen
(LoRA) each of two ranks holds more than a single one.

Where gradients are reduced with the last micro-batch only (`Framework.reduces_once`), they are whole until then, in the
dtype they are reduced in, and no part of these copies.

With pipeline stages, PyTorch reduces gradients after the last micro-batch alone: weights stay gathered and gradients whole.

DeepSpeed's stages 1 to 3 are in `zero_engine`.
"""

from collections.abc import Callable

from loadgauge.core.base.algebra import Size, maximum, same, where
from loadgauge.core.estimate.memory.points import At, Pass
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.schedule.stages import Key, Stage
from loadgauge.core.estimate.states import zero_engine
from loadgauge.core.estimate.states.states import RankWeights
from loadgauge.core.layers.embedding_head import vocabulary


def at(memory: MemoryModel, stage: Stage, doing: Pass, position: int | None = None) -> At:
    """Return the `At` of one pass on a pipeline stage, the key under which its copies are computed once.

    position: the layer at work (numbered through all stages); None where the pass is not a layer's. Only what the copies
    depend on is distinguished, so that few points need computing.
    """
    if memory.by_layer or ((memory.copied or memory.caches or memory.engine is not None) and memory.layout.pp == 1):
        return _in_turn(memory, stage, doing, position)
    if memory.training.framework.unit_gradients and doing == "backward" and position is not None:
        return At("backward", (stage.kind(position), False))
    return At()


def _in_turn(memory: MemoryModel, stage: Stage, doing: Pass, position: int | None) -> At:
    if stage.start == stage.stop or doing == "ends":
        return At(doing)
    if doing == "embedding":
        return At(doing, before=memory.key(stage, stage.start))
    layer_index = stage.stop - 1 if position is None else position
    in_backward = tuple(memory.counts(stage, stage.start, layer_index + 1).items())
    layer = memory.key(stage, layer_index)
    if doing == "prediction":
        return At(doing, ahead=layer, held=in_backward)
    if doing != "backward":
        return At(doing, layer, held=in_backward)
    ahead = memory.key(stage, layer_index - 1) if layer_index > stage.start else None
    before = memory.key(stage, layer_index + 1) if layer_index + 1 < stage.stop else None
    return At(doing, layer, ahead, before, in_backward)


def copies(memory: MemoryModel, stage: Stage, point: At) -> dict[str, Size]:
    """Return the bytes of each copy that exists alongside the model states at a point of the step, by its description."""
    terms = _copies(memory, stage, point)
    if memory.training.framework.shared_matrix:
        terms["one matrix of the quantised base in 16 bits"] = shared_matrix(memory)
    if memory.view.kernels.holds_logits:
        terms["logits of the micro-batch before"] = 4 * memory.view.tokens * vocabulary(memory.model, memory.view)
    hosted = memory.training.host.activations == "checkpoints" and memory.layout.recompute.mode == "full"
    if memory.training.framework.offloads_checkpoints and hosted:
        # The last layer's stays on the card (`LAST_GC_INDEX`), and two buffers bring the others back.
        input_bytes = memory.view.tokens * memory.model.stream_size * memory.training.precision.compute
        terms["inputs of three layers on their way"] = 3 * input_bytes
    return terms


def shared_matrix(memory: MemoryModel) -> Size:
    """Return the bytes of the buffer in which the matrices of a quantised base are made in 16 bits, and of their scales:
    a float32 for each block of 64 (source: unsloth, `kernels/utils.py`)."""
    lora = memory.training.lora
    if lora is None or lora.stored is None:
        return 0
    largest: Size = 0
    for facts in memory.facts.values():
        for weight in facts.layer.weights:
            if weight.base and not weight.expert:  # theirs are made in 16 bits by the layer
                largest = maximum(largest, weight.numel)
    return largest * (memory.training.precision.compute + 4 / 64)


def _copies(memory: MemoryModel, stage: Stage, point: At) -> dict[str, Size]:
    """Return those of the framework and its sharding.

    Gathered weights, unsharded gradients, communication buckets, 16-bit copies, placeholders and layers fetched from the
    host, by the rules of FSDP2 and DeepSpeed at the head of this file.
    """
    layout, framework, precision = memory.layout, memory.training.framework, memory.training.precision
    ends, weights, *_ = memory.weighed(stage)
    several = where(memory.sharded, 1, 0)
    buckets = "gradient buckets of data parallelism"
    wide = (4 - precision.gradient) * weights.all.wide
    in_buckets = several * (precision.gradient * weights.all.trainable + wide)
    if memory.engine is not None:
        return zero_engine.copies(memory, stage, point)
    if point.doing == "step":  # of all copies only DDP's buckets are there from the first step to the last
        if memory.by_layer and framework.flat_parameters:
            return {label: several * nbytes for label, nbytes in _flat(memory, stage, point).items()}
        return {buckets: in_buckets} if layout.zero < 2 and framework.ddp_copies else {}
    if memory.fully_sharded:
        terms = _fsdp(memory, stage, point) if memory.by_layer else _fsdp_in_pipeline(memory, weights)
        if memory.by_layer and framework.flat_parameters:
            terms |= _flat(memory, stage, point)
        terms = {label: several * nbytes for label, nbytes in terms.items()}
        if precision.autocast:
            terms["16-bit copies of the weights"] = (
                (1 - several) * precision.compute * _cast(memory, stage, point, weights)
            )
        return terms | _fetched(memory, ends, 1 - several)
    terms = {}
    if layout.zero == 3:
        # One layer in use and the next one on its way.
        terms["gathered embedding and head"] = several * memory.gathered_bytes(ends)
        terms["two gathered layers"] = several * 2 * _largest(memory)
    if framework.unit_gradients and layout.zero >= 2 and point.doing == "backward" and point.layer is not None:
        # In the compute dtype, and in float32 on the way to its shards.
        trainable = memory.facts[point.layer].weights.all.trainable
        terms["unsharded gradient of one layer"] = several * (precision.compute + 4) * trainable
    if memory.copied:
        terms["16-bit copies of the weights"] = precision.compute * _cast(memory, stage, point, weights)
    if memory.caches and point.doing in ("forward", "gather", "head"):
        terms["16-bit copies of adapters in autocast's cache"] = _cached(memory, stage, point)
    terms["placeholders of weights' gradients"] = memory.placeholders
    if layout.zero < 2 and framework.ddp_copies:
        terms[buckets] = in_buckets
    return terms | _fetched(memory, ends, 1 - several if layout.zero == 3 else 1)


def _fsdp(memory: MemoryModel, stage: Stage, point: At) -> dict[str, Size]:
    """Return the weights and gradients that FSDP2 has gathered and not yet reduced."""
    precision, facts = memory.training.precision, memory.facts
    if point.doing == "ends":
        return {}

    def gathered(key: Key | None) -> Size:
        return 0 if key is None else memory.gathered_bytes(facts[key].weights)

    if memory.ends_apart:
        return _fsdp_apart(memory, point, gathered)
    terms: dict[str, Size] = {"gathered embedding and head": memory.gathered_bytes(memory.weighed(stage)[0])}
    if memory.layout.zero == 3:
        if point.doing == "forward":
            terms["gathered layer, and the buffer it came in"] = 2 * gathered(point.layer)
        elif point.doing != "embedding":
            terms["gathered layer, and the next one"] = gathered(point.layer) + gathered(point.ahead)
    elif point.doing != "embedding":
        terms["layers gathered until their backward"] = sum(count * gathered(key) for key, count in point.held)
        if point.doing in ("forward", "head"):
            terms["buffer that a layer was gathered in"] = gathered(point.layer)
        if memory.prediction is not None and point.doing in ("head", "loss", "prediction"):
            terms["gathered multi-token prediction"] = memory.gathered_bytes(memory.prediction.weights)
    reduces = _reduces(memory)
    if point.doing in ("prediction", "backward", "embedding"):
        terms["whole gradient of the head"] = reduces * precision.compute * memory.head_trainable
    if point.before is not None:
        trainable = facts[point.before].weights.all.trainable
        terms["gradient of one layer on its way to its shards"] = reduces * precision.reduced * trainable
    return terms


def _reduces(memory: MemoryModel) -> Size:
    """1 where a gradient has a copy on its way to its shards: whole ones give their place to the shards and to this copy,
    unless a shard is as large as they are."""
    precision = memory.training.precision
    precise = precision.gradient >= memory.layout.zero_ranks * precision.reduced
    return where(memory.whole_gradients, where(precise, 1, 0), 1)


def _fsdp_apart(memory: MemoryModel, point: At, gathered: Callable[[Key | None], Size]) -> dict[str, Size]:
    """The same where embedding and head are units of their own."""
    precision, doing = memory.training.precision, point.doing
    embedding, head = (memory.gathered_bytes(weights) for weights in memory.end_weights)
    trained = memory.end_weights[1].all.trainable
    terms: dict[str, Size] = {}
    if doing == "enter":
        return {"gathered embedding, and the buffer it came in": 2 * embedding}
    if doing in ("gather", "head", "loss"):
        terms["gathered head"] = head
    if doing in ("gather", "head"):
        terms["buffer that the head was gathered in"] = head
    if doing in ("forward", "gather"):
        terms["buffer that a layer was gathered in"] = gathered(point.layer)
    if memory.layout.zero == 2:
        terms["gathered embedding"] = embedding
        if doing != "embedding":
            terms["layers gathered until their backward"] = sum(count * gathered(key) for key, count in point.held)
    elif doing == "forward":
        terms["gathered layer"] = gathered(point.layer)
    elif doing in ("reduce", "backward"):
        # The next one is gathered in the order of the forward, whether or not it is needed.
        ahead = gathered(point.ahead) if point.ahead is not None else embedding
        terms["gathered layer, and the next one"] = gathered(point.layer) + (ahead if doing == "backward" else 0)
    elif doing == "embedding":
        terms["gathered embedding"] = embedding
    reduces = _reduces(memory)
    if doing == "reduce":
        terms["whole gradient of the head"] = reduces * precision.compute * trained
    if doing in ("reduce", "backward", "embedding"):
        above = trained if point.before is None else memory.facts[point.before].weights.all.trainable
        terms["gradient of one unit on its way to its shards"] = reduces * precision.reduced * above
    return terms


def _flat(memory: MemoryModel, stage: Stage, point: At) -> dict[str, Size]:
    """Gradients of frozen weights that are in one flat tensor with trained ones (FSDP1, source: pytorch,
    `distributed/fsdp/_flat_param.py`, which warns of it for mixed `requires_grad`); none with a base of few bits, whose adapters
    are units of their own (peft, `utils/other.py`, `fsdp_auto_wrap_policy`; fsdp_qlora, `get_wrapping_policy`)."""
    lora = memory.training.lora
    if lora is not None and lora.stored is not None:
        return {}
    reduced, compute = memory.training.precision.reduced, memory.training.precision.compute

    def frozen(key: Key) -> Size:
        count = memory.facts[key].weights.all
        return 0 if same(count.trainable, 0) else count.total - count.trainable

    counts = memory.counts(stage, stage.start, stage.stop)
    every: Size = reduced * sum(number * frozen(key) for key, number in counts.items())
    shards = every / memory.layout.zero_ranks
    if point.doing in ("step", "ends"):
        return {"gradients of frozen weights in flat units": shards}
    whole = where(memory.whole_gradients, every, shards)
    if point.doing != "backward" and same(memory.whole_gradients, False):
        return {}
    terms = {"gradients of frozen weights in flat units": whole}
    if point.doing == "backward" and point.layer is not None:
        terms["unsharded gradient of frozen weights of one unit"] = compute * frozen(point.layer)
    return terms


def _fsdp_in_pipeline(memory: MemoryModel, weights: RankWeights) -> dict[str, Size]:
    """Between micro-batches neither weights nor gradients are sharded again."""
    return {
        "gathered weights of the stage": memory.gathered_bytes(weights),
        "unsharded gradients of the stage": memory.training.precision.gradient * weights.all.trainable,
    }


def _cast(memory: MemoryModel, stage: Stage, point: At, weights: RankWeights) -> Size:
    """Elements that autocast has 16-bit copies of: in forward all but the head's, which comes last; in backward, of layers
    that are not through with it.

    A layer that runs again in backward has its copies again; nothing else remembers those of its forward, but autocast's
    cache, which has those of trained weights (source: pytorch, `aten/src/ATen/autocast_mode.cpp`, `cached_cast`).
    """
    every: Size = weights.all.matrices + memory.tied_matrices
    again = {key for key, facts in memory.facts.items() if facts.recompute}  # none around the blocks of a tower
    by_tile = memory.view.kernels.loss == "tiled"  # which casts the head's rows itself
    if memory.layout.pp > 1:
        return every
    if point.doing in ("forward", "gather", "head"):
        cached_bytes: Size = every if point.doing == "head" and not by_tile else 0
        for key, count in memory.counts(stage, stage.start, stage.stop).items():
            of = memory.facts[key].weights.all
            frozen = memory.training.lora is not None or not same(of.frozen, 0)
            cached = of.trainable_matrices if key in again and frozen else of.matrices
            cached_bytes = cached_bytes + count * (
                cached - (of.matrices if point.doing == "head" and not by_tile else 0)
            )
        return cached_bytes
    if point.doing in ("embedding", "ends"):
        return 0
    left: Size = sum(count * memory.facts[key].weights.all.matrices for key, count in point.held if key not in again)
    if point.doing == "backward" and point.layer in again:
        left = left + memory.facts[point.layer].weights.all.matrices
    if point.doing in ("loss", "prediction"):
        layers: Size = sum(count * memory.facts[key].weights.all.matrices for key, count in point.held)
        # Liger's loss has made both gradients in forward, and keeps no copy.
        left = left if by_tile or memory.view.kernels.loss == "liger" else left + every - layers
    return left


def _cached(memory: MemoryModel, stage: Stage, point: At) -> Size:
    """Bytes of copies of adapters of layers that run again, but of the one at work, which are counted with it."""
    total: Size = 0
    for key, count in memory.counts(stage, stage.start, stage.stop).items():
        copies = (kept.nbytes for kept in memory.facts[key].layer.kept() if kept.name.endswith(".weight.cast"))
        own = point.doing == "forward" and key == point.layer
        total = total + key[1] * (count - own) * sum(copies)
    return total


def _largest(memory: MemoryModel) -> Size:
    """Bytes of the largest layer, gathered."""
    largest: Size = 0
    for facts in memory.facts.values():
        largest = maximum(largest, memory.gathered_bytes(facts.weights))
    return largest


def _fetched(memory: MemoryModel, ends: RankWeights, alone: Size) -> dict[str, Size]:
    """Return what is fetched of weights that are offloaded and not gathered (`alone`: 1, else 0): like ZeRO 3's layers."""
    if "weights" not in memory.offloaded:
        return {}
    return {"layers fetched from the host": alone * (memory.gathered_bytes(ends) + 2 * _largest(memory))}
