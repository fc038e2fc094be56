"""Buffers of DeepSpeed's engine beside the model states under ZeRO 1, 2 and 3 (`Framework.engine`).

Read off deepspeed 0.19.8, `runtime/zero`, and seen in its allocations (`make stack`):

- One bucket of `reduce_bucket_size` elements, whatever the model's size: under ZeRO 3 from the start (stage3.py,
  `__setup_for_real_optimizer`), under ZeRO 1 and 2 from the first gradient of a micro-batch to the end of its backward
  (stage_1_and_2.py, `setup_buckets`). A full bucket is flattened into a second one to be reduced. A gradient larger than
  the bucket goes past it.
- ZeRO 1 holds gradients whole until the last micro-batch's backward is over. ZeRO 2 copies those of the rank's share into a
  buffer of their own (`copy_grads_in_partition`), which is freed after the step; with several micro-batches the sum of
  the earlier ones is a second buffer. Tensors are never split there, so that the buffer has at least the size of the
  largest one of the share. ZeRO 3 has one buffer for its share from the start.
- When backward is over, the norm of each gradient is taken in float64, of the rank's part of a tensor at a time
  (`get_grad_norm_direct`), also where nothing is clipped. Then the share is flattened in 16 bits and copied to float32,
  which stays until the optimizer has run.
- ZeRO 3 gathers, with each module that runs (one without weights too), the weights that come next, until
  `stage3_prefetch_bucket_size` elements are asked for or `stage3_max_live_parameters` are there (`_fetch_sub_module_impl`):
  it runs ahead until the latter stops it. What it finds gathered as it looks ahead is not dropped before that use, so that
  at the end of the forward as much of the end of the model is still there. Weights come in flat buffers, one for each
  request, out of which each weight is copied; a buffer goes with the last of them.
- Without gathering ahead a weight stays only if fewer than `stage3_max_reuse_distance` elements are used before it is used
  again (`__params_to_release`). Between its uses in forward and backward, all that comes after it is used twice.
- Weights of up to `stage3_param_persistence_threshold` elements are whole on every rank after the first step.
- With `overlap_comm` (the default of stage 3) weights are gathered, and gradients reduced, on streams of their own, of which
  PyTorch's allocator keeps pools of their own: what is reserved is the sum of what each pool holds at most (`pools`). Under
  ZeRO 1 and 2 there are two buckets then.
- With the optimizer on the host, ZeRO 1 and 2 have a buffer of the largest gradient on the card, and norms are taken as
  gradients leave it.
"""

from loadgauge.core.base.algebra import Size, maximum, minimum, where
from loadgauge.core.definitions.layout.zero_engine import ZeroEngine
from loadgauge.core.definitions.training.optimizers import OPTIMIZERS
from loadgauge.core.estimate.memory.points import At
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.schedule.stages import Stage
from loadgauge.core.estimate.states.optimizer_step import staying, step_temporaries, updated

BEFORE_BACKWARD = ("forward", "head", "loss")
GATHERED, BUFFER = "gathered weights", "buffer that weights were gathered in"


def gradients(memory: MemoryModel, stage: Stage, point: At) -> dict[str, Size]:
    """Return the bytes of the gradients that are held at a point of the step, by description.

    Those of the layer whose backward is at work are part of what that needs.
    """
    weights, precision = memory.weighed(stage)[1], memory.training.precision
    several = where(memory.layout.num_microbatches > 1, 1, 0)
    if memory.layout.zero == 3:
        return {"gradients of the rank's share": memory.weighed(stage)[2].gradients}
    if point.doing in ("clip", "step"):
        return {"gradients of the rank's share": _share_of_gradients(memory, stage)}
    whole = precision.gradient * weights.all.trainable
    if memory.layout.zero == 1:
        grown: Size = 0 if point.doing in BEFORE_BACKWARD else precision.gradient * _done(memory, stage, point)
        return {"whole gradients of layers whose backward is over": where(several > 0, whole, grown)}
    share = _share_of_gradients(memory, stage)
    terms = {"gradients of the rank's share, of earlier micro-batches": several * share}
    if point.doing not in BEFORE_BACKWARD:
        # Made when the first bucket has been reduced, of which there is no copy any more then.
        terms["gradients of the rank's share"] = share * _flushed(memory, stage, point, before=True)
    return terms


def _engine(memory: MemoryModel) -> ZeroEngine:
    engine = memory.training.framework.engine
    assert engine is not None
    return engine


def copies(memory: MemoryModel, stage: Stage, point: At) -> dict[str, Size]:
    """Return the bytes of buckets, gathered weights and buffers at a point of the step, by description."""
    engine, training, zero = _engine(memory), memory.training, memory.layout.zero
    compute, weights = training.precision.compute, memory.weighed(stage)[1]
    in_backward = point.doing not in (*BEFORE_BACKWARD, "clip", "step")
    terms: dict[str, Size] = {}
    number = _buckets(memory)
    if zero == 3 or in_backward:
        terms["reduce bucket"] = number * compute * engine.bucket
    elif zero == 1 and point.doing in BEFORE_BACKWARD:
        # Nothing is reduced before the last micro-batch, and the bucket of the first one stays.
        stays = where(memory.layout.num_microbatches > 1, 1, 0)
        terms["reduce bucket"] = stays * number * compute * engine.bucket
    if zero < 3 and "optimizer" in memory.offloaded:
        terms["buffer of gradients on their way to the host"] = compute * memory.largest_trained
    if zero == 3 and point.doing not in ("clip", "step"):
        moved = 1 if "weights" in memory.offloaded else where(memory.sharded, 1, 0)
        itemsize = memory.gathered_bytes(weights) / maximum(weights.total, 1)
        held, flat = _gathered(memory, stage, point)
        terms[GATHERED] = moved * itemsize * held
        terms[BUFFER] = moved * itemsize * flat
    if zero == 3:
        kept = minimum(
            _whole(memory, stage), maximum(weights.total - _ahead(memory), 0)
        )  # else among the gathered ones
        terms["small weights that stay whole"] = where(memory.sharded, 1, 0) * compute * kept
    return terms


def pools(memory: MemoryModel, stage: Stage, point: At) -> dict[str, tuple[Size, Size]]:
    """Return the bytes at a point of the step that come from pools of their own, by what their stream is for.

    Of each, what it holds at the moment at which the layer needs the most, which is part of `gradients` and `copies`; and what it
    holds at most around then. That is more by a full bucket's flat copy, and by the largest weight: it is asked for when a little
    less than `live` is there, and copied out of its buffer.
    """
    engine, zero = memory.training.framework.engine, memory.layout.zero
    if engine is None or not engine.overlaps(zero):
        return {}
    terms: dict[str, tuple[Size, Size]] = {}
    if zero == 3:
        copied, weights = copies(memory, stage, point), memory.weighed(stage)[1]
        held: Size = sum(copied.get(name, 0) for name in (GATHERED, BUFFER))
        more: Size = 0
        if point.doing == "backward":
            once = 2 * memory.largest_weight * memory.gathered_bytes(weights) / maximum(weights.total, 1)
            more = where(weights.total > _ahead(memory), once, 0)
        terms["gathering"] = held, held + more
    if point.doing not in (*BEFORE_BACKWARD, "clip", "step"):
        share = _share_of_gradients(memory, stage) if zero == 2 else 0
        terms["reduction"] = share, share + flattened(memory, stage, point)
    return terms


def _whole(memory: MemoryModel, stage: Stage) -> Size:
    """Elements of weights that are not shared out, as they are small."""
    engine = _engine(memory)
    layers = [
        (memory.facts[key].layer, number) for key, number in memory.counts(stage, stage.start, stage.stop).items()
    ]
    ends = [(memory.embedding, 1)] * stage.first + [(memory.head, 1)] * stage.last
    whole: Size = 0
    for layer, number in (*layers, *ends):
        for weight in layer.weights:
            whole = whole + number * where(weight.numel > engine.whole, 0, weight.numel)
    return whole


def _buckets(memory: MemoryModel) -> int:
    """Number of buckets that gradients are collected in."""
    engine, zero = _engine(memory), memory.layout.zero
    return 2 if zero < 3 and engine.overlaps(zero) else 1


def flattened(memory: MemoryModel, stage: Stage, point: At) -> Size:
    """Return the bytes of a full bucket's flat copy in the backward of a layer.

    It comes when a part of the layer's gradients is there, and so not at the moment at which the layer needs the most.
    """
    if memory.engine is None or memory.layout.zero == 1:
        return 0
    full = _sent(memory) * minimum(memory.engine.bucket, memory.weighed(stage)[1].all.trainable)
    return full * _flushed(memory, stage, point)


def _sent(memory: MemoryModel) -> Size:
    """Bytes of the copies of a gradient element of a bucket that is reduced: flat, in float32 under Ulysses.

    There `communication_data_type` is float32 (runtime/engine.py): ZeRO 2 casts the flat copy, ZeRO 3 each gradient before it
    flattens them (`allreduce_bucket`, `__avg_scatter_grads`).
    """
    compute, layout = memory.training.precision.compute, memory.layout
    wide = 8 if layout.zero == 3 else compute + 4
    return where(layout.cp > 1, wide, compute) if layout.cp_comm == "all_to_all" else compute


def first_full(memory: MemoryModel, stage: Stage) -> tuple[int, ...]:
    """Return the position of the layer in whose backward a bucket is full for the first time, unless it is the last one.

    Of later ones the bucket is as full, and fewer activations are left.
    """
    engine, zero = _engine(memory), memory.layout.zero
    if zero < 2:
        return ()
    done: Size = memory.head_trainable
    for layer in range(stage.stop - 1, stage.start - 1, -1):
        done = done + memory.facts[memory.key(stage, layer)].weights.all.trainable
        if not isinstance(done, int | float):
            return ()  # of many layouts at once
        if done > engine.bucket:
            return (layer,) if layer < stage.stop - 1 else ()
    return ()


def _gathered(memory: MemoryModel, stage: Stage, point: At) -> tuple[Size, Size]:
    """Elements of weights that ZeRO 3 has gathered, and of the flat buffers they came in."""
    engine = _engine(memory)
    total, near = memory.weighed(stage)[1].total, _ahead(memory)
    request = engine.prefetch + _largest_of_layers(memory)
    fetched = minimum(total, request)
    if point.doing == "forward":
        return maximum(minimum(total, near), fetched), fetched
    if point.doing in ("head", "loss", "prediction"):
        head: Size = sum(weight.numel for operation in memory.head for weight in operation.weights)
        return maximum(minimum(total, near), head), 0
    left: Size = memory.weights_of(memory.embedding).total
    for key, count in point.held:
        left = left + count * memory.facts[key].weights.total
    again = point.layer is not None and point.layer[1]
    current: Size = memory.facts[point.layer].weights.total if again and point.layer is not None else 0
    if not again:
        current = minimum(left, fetched)
    # A model that is there whole is dropped as the backward goes on, and nothing is gathered again.
    kept = maximum(minimum(left, near), where(total > near, current, 0))
    return kept, where(total > near, minimum(left, fetched), 0)


def _ahead(memory: MemoryModel) -> Size:
    """Elements of weights that are there at once, of a model that has more."""
    engine = _engine(memory)
    uses = (
        3 if memory.layout.recompute.mode == "full" else 2
    )  # of a weight between the end of its forward and its next use
    return max(engine.live if engine.prefetch else 0, engine.reuse // uses)


def _largest_of_layers(memory: MemoryModel) -> Size:
    """Elements of the largest tensor of weights of a layer."""
    largest: Size = 0
    for facts in memory.facts.values():
        for weight in facts.layer.weights:
            largest = maximum(largest, weight.numel)
    return largest


def before_step(memory: MemoryModel, stage: Stage) -> Size:
    """Return the bytes of temporaries between the last backward and the optimizer step, beside the shares of gradients.

    The most of: the last reduction, the float64 copy of a gradient for its norm, and the float32 copy of the share.
    """
    engine, precision, zero = _engine(memory), memory.training.precision, memory.layout.zero
    weights, share = memory.weighed(stage)[1], updated(memory, memory.weighed(stage)[1])
    largest, bucket = memory.largest_trained, engine.bucket
    compute, several = precision.compute, where(memory.layout.num_microbatches > 1, 1, 0)
    full = where(
        weights.all.trainable > bucket, 0, _sent(memory) * weights.all.trainable
    )  # of many, the last one is part full
    table: Size = memory.weights_of(memory.embedding).all.trainable
    past = where(table > bucket, compute * table, 0)
    buckets = _buckets(memory) * compute * bucket
    norm = engine.norm * minimum(share, largest)
    flat = (precision.gradient if precision.gradient < 4 else 0) * share + 4 * share
    held = _share_of_gradients(memory, stage)
    if zero == 3:
        embedding = memory.weights_of(memory.embedding).total
        again = where(
            weights.total > _ahead(memory), 1, 0
        )  # gathered for the backward, in a buffer that is still there
        read = compute * (1 + again) * embedding
        part = table / memory.layout.zero_ranks
        if "gradients" in memory.offloaded:
            return read + maximum(full, past + (engine.norm + compute) * part)
        taken = minimum(share, engine.step_elements)
        return maximum(read + full + past, (precision.gradient + 4) * taken)
    if "gradients" in memory.offloaded:
        return buckets + maximum(past + norm, full)
    if zero == 1:
        whole = precision.gradient * weights.all.trainable
        freed = where(largest > bucket, 0, minimum(full, whole))
        reduced = whole + buckets + maximum(held - freed, 0) - held
    else:
        # Where one bucket holds all gradients, it is reduced before they are copied into the share's buffer.
        reduced = buckets + full + past + several * held - where(weights.all.trainable > bucket, 0, held)
    return maximum(reduced, maximum(norm, flat))


def in_step(memory: MemoryModel, stage: Stage) -> Size:
    """Return the bytes of temporaries of the optimizer step: float32 gradients of the share, and the optimizer's own."""
    engine, step = _engine(memory), step_temporaries(memory, stage)
    share = updated(memory, memory.weighed(stage)[1])
    if "gradients" in memory.offloaded:
        # What stays on the card is torch's AdamW's, over one sub-group at a time (stage3.py, `backup_optimizer`).
        lists = OPTIMIZERS["adamw-foreach"].step.lists if memory.training.offloaded_share % 1 else 0
        return maximum(step, 4 * lists * minimum(staying(memory, stage) * share, engine.step_elements))
    if memory.layout.zero == 3:
        taken = minimum(share, engine.step_elements)
        step, share = where(share > engine.step_elements, step * (taken / maximum(share, 1)), step), taken
    return 4 * share + step


def _share_of_gradients(memory: MemoryModel, stage: Stage) -> Size:
    """Bytes of the buffer with the gradients of a rank's share, of whole tensors under ZeRO 1 and 2."""
    return memory.training.precision.gradient * maximum(
        updated(memory, memory.weighed(stage)[1]), memory.largest_trained
    )


def _done(memory: MemoryModel, stage: Stage, point: At) -> Size:
    """Trained elements of the head and of layers whose backward is over."""
    left: Size = memory.weights_of(memory.embedding).all.trainable
    for key, count in point.held:
        left = left + count * memory.facts[key].weights.all.trainable
    return memory.weighed(stage)[1].all.trainable - left


def _flushed(memory: MemoryModel, stage: Stage, point: At, *, before: bool = False) -> Size:
    """1 where the bucket has been full before the backward at work is over (`before`: before it began), else 0."""
    engine = _engine(memory)
    done = _done(memory, stage, point)
    if point.layer is not None and not before:
        done = done + memory.facts[point.layer].weights.all.trainable
    return where(done > engine.bucket, 1, 0)
