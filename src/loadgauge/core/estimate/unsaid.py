"""Alternative outcomes of unspecified library defaults, which widen the range of the memory."""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy

import msgspec

from loadgauge.core.definitions.job.uncounted import Parts, Uncounted
from loadgauge.core.definitions.layout.overlap import Overlap
from loadgauge.core.definitions.training.optimizers import Optimizer, parse
from loadgauge.core.definitions.training.stacks import BEFORE_ONE_TENSOR, Stack
from loadgauge.core.definitions.training.training import Training, spell_loss
from loadgauge.core.estimate.memory.phases import Phase, StageAtWork
from loadgauge.core.estimate.memory.question import Alternative, Unsaid
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.estimate.time.step import Time
from loadgauge.core.estimate.workings import Workings

FAR = 0.05
"""Share of the memory from which on another outcome is an alternative; what is nearer widens the range."""


def with_unsaid(result: Estimate, others: Sequence[Training]) -> Estimate:
    """Return the estimate with the other ways in which the run may train: those nearby in its range, the rest as alternatives.

    others: one for each value of a thing that is not said; things are separate causes, whose differences add up

    >>> from loadgauge import Layout, estimate, model, training
    >>> llama, layout = model("llama-3.1-8b"), Layout(seq_len=4096)
    >>> own = estimate(llama, layout, training(weights="bfloat16"))
    >>> open_ = with_unsaid(own, [training(weights="float32")]).memory
    >>> [(thing.flag, thing.assumed, round(thing.more / 1e9)) for thing in open_.unsaid], open_.high == own.memory.high
    ([('--weights', 'bfloat16', 69)], True)
    """
    changes: dict[tuple[str, str], list[Alternative]] = {}
    for other in others:
        flag, assumed, value = spelled(result.training, other)
        change = _change(result, _recipe_of(other, result))
        if change:
            changes.setdefault((flag, assumed), []).append(Alternative(value, change))
    return open_to(result, [Unsaid(*key, tuple(values)) for key, values in changes.items()])


def open_to(result: Estimate, things: Iterable[Unsaid]) -> Estimate:
    """Return the estimate with things that are not said: those nearby in its range, the rest as alternatives."""
    memory = result.memory
    things = [thing for thing in things if thing.others]
    far = [thing for thing in things if thing.endless or max(thing.more, thing.fewer) >= FAR * memory.total]
    near = [thing for thing in things if thing not in far]
    for thing in near:
        memory = memory.widened(thing.fewer, thing.more, thing.flag)
    if not things:
        return result
    return result.replace(memory=msgspec.structs.replace(memory, unsaid=(*memory.unsaid, *far)))


def overlap_ends(result: Estimate) -> tuple[Time, dict[str, float]]:
    """Return the time with its range from all communication hidden to none, and the step of either end [s] by its word.

    The estimate has a time.

    >>> from loadgauge import Layout, cluster, estimate, gpu, model, training
    >>> layout, cards = Layout(dp=8, global_batch=8, seq_len=4096), cluster(gpu("h100-sxm5-80gb"), 8)
    >>> own = estimate(model("llama-3.1-8b"), layout, training("megatron"), cluster=cards)
    >>> time, ends = overlap_ends(own)
    >>> ends["all"] < time.step <= ends["none"], time.low < own.time.low, time.high >= own.time.high
    (True, True, True)
    """
    time = result.timing
    steps = {word: result.workings.overlapping(Overlap.parse(word)).step for word in ("all", "none")}
    ends = {word: float(step.alone().step * time.scale) for word, step in steps.items()}
    low, high = (time.low / time.step * min(ends.values()), time.high / time.step * max(ends.values()))
    return msgspec.structs.replace(time, low=min(low, time.low), high=max(high, time.high)), ends


def parts_of(result: Estimate) -> Parts:
    """Return the parts of the memory of an estimate that settings which are not counted may change."""
    memory = result.memory
    largest = {part: memory.largest(part).parts[part] for part in memory.parts}
    return Parts(memory.parts, largest, result.params / result.layout.gpus)


def unread_things(items: Sequence[Uncounted], memory: Parts) -> Iterator[Unsaid]:
    """Return settings of a job file that are not counted as things that are not said: each may do nothing, or the most or least.

    memory: without them

    >>> qat = Uncounted("", "qat", effect="costs", parts=("weights",))
    >>> [thing.more for thing in unread_things([qat], Parts({"weights": 2.0}, {"weights": 2.0}, 1))]
    [2.0]
    """
    for item in items:
        low, high = item.change(memory)
        ends = (Alternative("at most", high), Alternative("at least", -low))
        if low or high:
            yield Unsaid(item.key, "without it", tuple(end for end in ends if end.change), key=True)
    endless = [item.key for item in items if item.endless]
    if endless:
        yield Unsaid(", ".join(endless), "without it", (Alternative("with it", 0.0),), key=True, endless=True)


def spelled(own: Training, other: Training) -> tuple[str, str, str]:
    """Return the flag by which two ways to train differ, and its value in each."""
    if other.weights and other.weights != own.weights:
        return "--weights", own.weights, other.weights
    if own.lora is not None and other.lora is not None and own.lora.upcast != other.lora.upcast:
        return "--kbit-upcast", own.lora.upcast, other.lora.upcast
    if own.lora is not None and other.lora is not None and own.lora.experts_stay != other.lora.experts_stay:
        return "--version", Stack().text("transformers").replace(" ", "="), BEFORE_ONE_TENSOR
    if other.optimizer != own.optimizer:
        return "--optimizer", _spell_optimizer(own.optimizer), _spell_optimizer(other.optimizer)
    return "--loss", spell_loss(own), spell_loss(other)


def _spell_optimizer(optimizer: Optimizer) -> str:
    ways = [each.suffix for each in parse(optimizer.name).variants if each.step == optimizer.step]
    return f"{optimizer.name}-{ways[0]}" if ways else optimizer.name


def _recipe_of(other: Training, result: Estimate) -> Training:
    """Return the fields of another way to train that memory depends on; the dtype of loaded weights is in the recipe."""
    own = result.training
    there = other.under(result.layout.zero)
    return msgspec.structs.replace(there, weights=own.weights, by_sharding=own.by_sharding)


def _change(result: Estimate, other: Training) -> float:
    """Bytes that the peak is higher if the run trains in another way."""
    own, workings = result.training, result.workings
    if not _freezes(workings):  # what frozen weights are held in is of none
        recipe = msgspec.structs.replace(other.precision, frozen=own.precision.frozen)
        other = msgspec.structs.replace(other, precision=recipe)
    if other == own:
        return 0.0
    if msgspec.structs.replace(other, optimizer=own.optimizer) == own:
        return _moment_change(workings, other, Phase.STEP)
    loss = msgspec.structs.replace(other.kernels, loss=own.kernels.loss, loss_chunks=own.kernels.loss_chunks)
    if result.layout.pp == 1 and msgspec.structs.replace(other, kernels=loss) == own:
        return _moment_change(workings, other, Phase.LOSS)
    if own.lora is not None and other.lora is not None and own.lora.upcast != other.lora.upcast:
        return _upcast_change(workings, other.lora.upcast == "all")
    there = Workings(result.model, result.layout, other, workings.gpu)
    return float(max(there.worst.stages) - max(workings.worst.stages))


def _freezes(workings: Workings) -> bool:
    """Return whether any weight is not trained."""
    memory = workings.memory
    layers = (memory.embedding, memory.head, *(facts.layer for facts in memory.facts.values()))
    return any(not weight.trainable for layer in layers for weight in layer.weights)


def _moment_change(workings: Workings, other: Training, phase: Phase) -> float:
    """The same where only the optimizer step, or only the loss, is another: all other moments are alike."""
    rank, phases = workings.worst.rank, workings.worst.phases
    memory = rank.memory.with_end(other) if phase == Phase.LOSS else copy(rank.memory)
    memory.training = other
    there = StageAtWork(memory, rank.stage)
    totals = []
    for moment in phases:
        if moment.phase == phase:
            moment = there.at_step() if moment.work is None else there.at_loss(moment.work)
        totals.append(moment.total)
    return float(max(totals) - max(moment.total for moment in phases))


def _upcast_change(workings: Workings, more: bool) -> float:
    """The same where frozen weights that are not quantised are held in float32 instead of 16 bits, or the other way round.

    What their layers keep and make for a moment is taken to be the same.
    """
    rank, layout = workings.worst.rank, workings.layout
    memory, stage = rank.memory, rank.stage
    counts = memory.counts(stage, stage.start, stage.stop)
    layers = [(memory.facts[key].layer, count) for key, count in counts.items()]
    layers += [(memory.embedding, 1)] * stage.first + [(memory.head, 1)] * stage.last
    held = sum(
        count * weight.numel
        for layer, count in layers
        for weight in layer.weights
        if not weight.trainable and not weight.base
    )
    ranks = layout.zero_ranks if layout.zero >= workings.training.framework.weights_stage else 1
    return float((4 - 2) * (1 if more else -1) * held / ranks)
