"""Memory between steps: evaluation batches and the logits kept of them, generation, and the state gathered for a checkpoint.

In an evaluation no tensor is kept for backward and no gradient exists, where the framework frees them. transformers' Trainer
keeps the logits of every batch, gathered from all ranks, unless it is told to compute the loss alone or to move them to the
host (`eval_accumulation_steps`); each new batch is joined to them, and for that moment they exist twice (source: transformers,
trainer_pt_utils.nested_concat). A cache of keys and values grows in the same way, layer by layer (cache_utils.DynamicLayer).
"""

from collections.abc import Iterator

import msgspec

from loadgauge.core.base import NotModelled, Size, maximum
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.definitions.model.model import Attention, ModelSpec
from loadgauge.core.definitions.training.training import Training
from loadgauge.core.estimate.memory.liveness import forward_peak
from loadgauge.core.estimate.memory.phases import Moment, Phase, StageAtWork
from loadgauge.core.estimate.memory.rank_memory import MemoryModel
from loadgauge.core.estimate.memory.recompute import applied
from loadgauge.core.layers import View
from loadgauge.core.layers.attention.cache import kept_by

Items = tuple[tuple[str, Size], ...]
"""Names and bytes of what a moment holds beside the model states and gathered copies."""


def evaluated(layout: Layout, training: Training) -> Layout:
    """Return the layout of an evaluation batch: nothing is kept, which is what full recomputation keeps inside a layer."""
    batch = training.around.eval_batch or layout.micro_batch
    return msgspec.structs.replace(
        layout,
        micro_batch=batch,
        global_batch=batch * layout.dp,
        recompute=RecomputePolicy(mode="full"),
        tokens=None,
        pairs=None,
        kernel_tokens=None,
        fullest=None,
    )


def moments(rank: StageAtWork, model: ModelSpec, evaluation: MemoryModel | None) -> Iterator[Moment]:
    """Yield the moments around the steps of a rank. evaluation: the memory of an evaluation batch, where there is one

    Raises `NotModelled` for what is not modelled over pipeline stages.
    """
    around = rank.memory.training.around
    if around.load:
        yield _whole_weight(rank, "loading: a weight before it is sharded", Phase.SETUP, gradients=0, optimizer=0)
    if not (around.eval_batch or around.save == "full"):
        return
    if rank.layout.pp > 1:
        raise NotModelled("evaluation, generation and saving with pipeline stages")
    if evaluation is not None:
        yield from _evaluation(rank, evaluation)
        if around.generate:
            yield _generation(rank, model, evaluation)
    if around.save == "full":
        yield _whole_weight(rank, "saving: a weight gathered whole", Phase.SAVING)


def _moment(
    rank: StageAtWork, name: str, phase: Phase, items: Items, *, forward: bool = True, part: str = "evaluation"
) -> Moment:
    """Make a moment of these items of a part; `forward`: with the copies gathered in a forward."""
    point = rank.point("forward", rank.stage.stop - 1) if forward else None
    gradients = 0 if rank.memory.frees_gradients else rank.states.gradients
    items = tuple((label, nbytes) for label, nbytes in items if nbytes)
    total: Size = sum(nbytes for _, nbytes in items)
    moment = rank.at(name, phase, None, point, gradients=gradients, **{part: total})
    return msgspec.structs.replace(moment, items=items)


def _evaluation(rank: StageAtWork, memory: MemoryModel) -> Iterator[Moment]:
    around, batch, model = rank.memory.training.around, memory.layout.micro_batch, memory.model
    logits = logits_bytes(memory.view, memory.model, memory.training) * rank.layout.dp
    kept = max(0, around.eval_batches - 1) * logits
    before = f"logits kept of {max(0, around.eval_batches - 1)} batches before it, of all ranks"
    working: Size = 0
    for (_, nothing_kept), facts in memory.facts.items():
        if nothing_kept:
            # The caller of the MLP holds its input, which no backward needs here.
            working = maximum(working, forward_peak(facts.layer, facts.recompute, ("input", "mlp.norm")))
    largest = f"the largest set alive at once in the forward of a layer, {batch} sequences, nothing kept"
    outer = "held by the model's forward: rotary tables, masks, the embedding's output"
    embedded = memory.embedding.operations[-1].outputs[0].nbytes  # in a step the first layer's checkpoint, here none
    yield _moment(
        rank,
        "evaluation: forward of a layer",
        Phase.EVALUATION,
        ((largest, working), (outer, embedded + memory.shared), (before, kept)),
    )
    head = f"the largest set alive at once in the head's forward, {batch} sequences, nothing kept"
    forming = forward_peak(memory.head, applied(memory.layout.recompute, memory.head, frozenset(memory.head.names)))
    returned: Size = 0
    if memory.view.kernels.loss == "float32":  # made from a copy; the model returns the logits beside the loss
        returned = memory.view.tokens * model.vocab_size * memory.view.kernels.dtypes.activation
    yield _moment(
        rank,
        "evaluation: loss",
        Phase.EVALUATION,
        ((head, forming), ("the logits themselves, which the model returns", returned), (before, kept)),
    )
    if around.eval_batches:
        yield _moment(
            rank,
            "evaluation: logits joined",
            Phase.EVALUATION,
            (
                (f"logits kept of {around.eval_batches} batches, of all ranks", around.eval_batches * logits),
                ("the same once more, while the last batch is joined to them", around.eval_batches * logits),
            ),
            forward=False,
        )


def logits_bytes(view: View, model: ModelSpec, training: Training) -> Size:
    """Return the bytes of one batch's logits as an evaluation keeps them on one rank; in float32 under autocast."""
    if model.head.kind != "lm":
        raise NotModelled(f"an evaluation of {model.name}, which has no language-model head")
    itemsize = 4 if training.precision.autocast else view.kernels.dtypes.activation
    return view.tokens * model.vocab_size * itemsize


def cache_bytes(model: ModelSpec, sequences: Size, tokens: Size, itemsize: int, tp: Size = 1) -> Size:
    """Return the bytes of the keys and values of all layers: sequences x tokens, a window's at most.

    Raises `NotModelled` for mixers that are not softmax attention.

    >>> from loadgauge.core.families.catalogue import find_model
    >>> cache_bytes(find_model("llama-3.1-8b"), 1, 1024, 2) == 2 * 32 * 8 * 128 * 1024 * 2
    True
    """
    total: Size = 0
    for kind in model.pattern:
        mixer = model.blocks[kind].attention
        if not isinstance(mixer, Attention):
            raise NotModelled(f"the cache of {model.name} in generation: not all of its layers are softmax attention")
        total = total + sequences * kept_by(mixer, model.hidden_size, tp).elements(tokens) * itemsize
    return total


def _generation(rank: StageAtWork, model: ModelSpec, memory: MemoryModel) -> Moment:
    layout, itemsize = memory.layout, memory.view.kernels.dtypes.activation
    tokens = layout.seq_len + memory.training.around.generate
    cache = cache_bytes(model, layout.micro_batch, tokens, itemsize, layout.tp)
    label = f"keys and values of {layout.micro_batch} sequences x {tokens:,} tokens"
    return _moment(
        rank,
        "generation: the last token",
        Phase.GENERATION,
        (
            (label, cache),
            ("one layer's keys once more, while a token is joined to them", cache / (2 * len(model.pattern))),
        ),
    )


def _whole_weight(rank: StageAtWork, name: str, phase: Phase, **none: Size) -> Moment:
    """The moment at which the largest weight is whole on the card: on its way to a checkpoint, or from one before it is sharded.

    none: parts that do not exist then (sources: accelerate, `fsdp2_load_full_state_dict`; deepspeed, `zero.Init`)
    """
    way = (
        "gathered from all ranks on its way to the host"
        if phase is Phase.SAVING
        else "whole until each rank has its shard"
    )
    items = ((f"the largest weight, {way}", gathered_for_saving(rank.memory)),)
    moment = _moment(rank, name, phase, items, forward=False, part="gathered")
    return msgspec.structs.replace(moment, parts=moment.parts | none)


def gathered_for_saving(memory: MemoryModel) -> Size:
    """Return the bytes of the largest weight that a full checkpoint gathers: weight by weight, in the dtype it is held in.

    0 where the weights are not sharded. (Sources: pytorch, `get_model_state_dict` with `full_state_dict`; deepspeed,
    `_zero3_consolidated_16bit_state_dict`.)
    """
    training, layout = memory.training, memory.layout
    if layout.zero < training.framework.weights_stage or layout.zero_ranks == 1:
        return 0
    layers = [*(facts.layer for facts in memory.facts.values()), memory.embedding, memory.head]
    return training.precision.weight * max(
        weight.numel for layer in layers for operation in layer for weight in operation.weights
    )


def host_for_saving(rank: StageAtWork) -> Size:
    """Return the bytes of host memory that the first rank needs for a full checkpoint of sharded weights, or each rank for a copy
    of its shards, optimizer states included.

    FSDP saves the adapters alone where only they are trained; DeepSpeed gathers everything. Shards are copied to the host as a
    whole before they are written (source: pytorch, `StateDictOptions(cpu_offload)`, `async_save`).
    """
    training, weights = rank.memory.training, rank.weights
    alone = training.lora is not None and training.framework.fully_shards
    if training.around.save == "sharded":
        held = rank.states.weights
        return rank.states.optimizer + (held * weights.all.trainable / weights.total if alone else held)
    if training.around.save != "full" or not gathered_for_saving(rank.memory):
        return 0
    layout = rank.memory.layout
    if alone:
        return training.precision.weight * (weights.dense.trainable + layout.ep * weights.expert.trainable)
    # Those of all ranks; what tensor parallelism does not split (norms, routers) is next to nothing.
    whole = layout.tp * weights.dense.total + layout.ep * layout.etp * weights.expert.total
    return training.precision.weight * whole
