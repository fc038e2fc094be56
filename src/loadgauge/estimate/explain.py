"""Why a part of the memory is as large as it is: the rule, the user's numbers put in, and the source.

Each explanation adds up, step by step, to the very number that `estimate` gives for that part at that moment.
"""

from __future__ import annotations

import msgspec

from loadgauge.errors import ConfigError
from loadgauge.estimate.explain_layers import activations, loss, transient
from loadgauge.estimate.memory.gathered import copies
from loadgauge.estimate.memory.overhead import COMMUNICATOR, CONTEXT, communicators
from loadgauge.estimate.memory.phases import PARTS
from loadgauge.estimate.memory.states import RankWeights, WeightCount
from loadgauge.estimate.result import Estimate, When
from loadgauge.estimate.workings import Apart, Explanation, Key, Step, cited
from loadgauge.spec.lora import base_format
from loadgauge.spec.optimizers import OPTIMIZERS


def explain(result: Estimate, part: str, at: When = "peak") -> Explanation:
    """The explanation of one part of an estimate (`PARTS`) at one moment of the worst rank.

    at: "peak", "largest" (where this part is largest), or a phase of the step, in which the moment is chosen at which
    the part is largest. Raises `ConfigError` where the rank has no moment in that phase.

    >>> from loadgauge import Layout, estimate, model
    >>> result = estimate(model("gpt2"), Layout(seq_len=1024))
    >>> found = explain(result, "activations")
    >>> sum(step.nbytes for step in found.steps) == result.memory.parts["activations"]
    True
    """
    if part not in PARTS:
        raise ConfigError(f"unknown part {part!r} (known: {', '.join(PARTS)})", key="explain")
    apart = Apart(result, part, at)
    if part in apart.facts.offloaded:
        held = getattr(apart.facts.states(apart.weights), part)
        return apart.explanation(
            "offloaded: none of it stays on the GPU", (), notes=(f"on the host: {held:,.0f} bytes",)
        )
    readers = {
        "weights": _weights,
        "gradients": _gradients,
        "optimizer": _optimizer,
        "gathered": _gathered,
        "activations": activations,
        "loss": loss,
        "transient": transient,
        "outside": _outside,
    }
    return readers[part](apart)


def _parameters(apart: Apart) -> str:
    """How the parameters of the rank add up."""
    facts, stage = apart.facts, apart.stage
    layers: dict[Key, int] = {}
    for (kind, _), count in apart.counts.items():
        layers[kind, False] = layers.get((kind, False), 0) + count
    terms = [f"{count} x {facts.facts[key].weights.total:,} ({apart.kind(key)})" for key, count in layers.items()]
    for name, layer, here in (("embedding", facts.embedding, stage.first), ("head", facts.head, stage.last)):
        if here and layer.params:
            terms.append(f"{layer.params:,} ({name})")
    if facts.prediction is not None and stage.last:
        terms.append(f"{facts.prediction.weights.total:,} (multi-token prediction)")
    return f"parameters on this rank before ZeRO: {' + '.join(terms)} = {apart.weights.total:,}"


def _weights(apart: Apart) -> Explanation:
    precision, steps = apart.training.precision, []
    stored, low = base_format(apart.quantised), precision.products
    each = f"{precision.weight} B" if stored is None else stored.words
    for where, count, ranks in apart.groups():
        over = apart.over(ranks, apart.training.framework.weights_stage)
        plain, base = WeightCount(trainable=count.trainable, frozen=count.frozen), WeightCount(base=count.base)
        what = f"{plain.total:,} parameters{where} x {precision.weight} B{over}"
        steps.append(Step(what, apart.states(plain, ranks).weights))
        what = f"{base.total:,} frozen base parameters{where} x {each}{over}"
        steps.append(Step(what, apart.states(base, ranks).weights))
        if low is not None:
            instead = low.weights == "instead"
            less = f" instead of {precision.weight} B{over}" if instead else " beside them"
            what = (
                f"{count.quantised:,} of them{where} in {low.format}, by rows and by columns, {low.weight_element:g} B"
            )
            steps.append(Step(what + less, apart.states(WeightCount(quantised=count.quantised), ranks).weights))
    stages = "ZeRO 3" if apart.training.framework.weights_stage == 3 else "ZeRO 2 and 3 (FSDP)"
    adapters = () if apart.training.lora is None else ("hu2021", *(() if stored is None else (stored.source,)))
    return apart.explanation(
        f"parameters on the rank x bytes per parameter, sharded over the data-parallel ranks by {stages}",
        tuple(steps),
        sources=cited(precision.source, "rajbhandari2019", *adapters),
        notes=(_parameters(apart),),
    )


def _gradients(apart: Apart) -> Explanation:
    precision = apart.training.precision
    accumulating = apart.layout.num_microbatches > 1
    facts, fsdp = apart.facts, apart.facts.fully_sharded and apart.layout.zero_ranks > 1
    over_layers = apart.at_embedding or apart.at_reduction
    whole = not facts.lazy or accumulating or apart.at_step or over_layers
    unreduced = RankWeights()
    if fsdp and not facts.by_layer and not apart.at_step:
        pieces = []  # whole ones, among the gathered copies
    elif whole:
        pieces = [("all of the rank", apart.weights)]
        if fsdp and over_layers and not accumulating:
            unreduced = apart.ends
        if accumulating and facts.lazy and not fsdp and apart.key is not None and apart.stage.last:
            tied = RankWeights.of(tuple(weight for one in apart.facts.head for weight in one.borrows))
            pieces.append(("the tied table's new gradient, not summed yet", tied))
    elif apart.key is None:
        pieces = []
    else:
        held = (
            [weight for one in apart.facts.head for weight in (*one.weights, *one.borrows)] if apart.stage.last else []
        )
        head = RankWeights.of(() if fsdp else tuple(held))
        if apart.facts.prediction is not None and apart.stage.last:
            head = head + apart.facts.prediction.weights
        done = sum(apart.done.values())
        pieces = [("head", head), (f"the {done} layers whose backward is over", apart.facts.weights(apart.done))]
    over = apart.over(apart.layout.zero_ranks, 2)
    steps = [
        Step(
            f"{count.all.trainable:,} parameters ({what}) x {precision.gradient} B{over}",
            apart.facts.states(count).gradients,
        )
        for what, count in pieces
    ]
    what = (
        f"{unreduced.all.trainable:,} parameters (embedding and head, not reduced yet) x {precision.gradient} B{over}"
    )
    steps.append(Step(what, -facts.states(unreduced).gradients))
    note = "gradients are held through the whole step" if whole else "gradients come into being during backward"
    return apart.explanation(
        "trainable parameters that have a gradient at this moment x bytes, sharded by ZeRO 2 and 3",
        tuple(steps),
        sources=cited(precision.source, "rajbhandari2019"),
        notes=(note,),
    )


def _optimizer(apart: Apart) -> Explanation:
    precision, optimizer, steps = apart.training.precision, apart.training.optimizer, []
    bare = msgspec.structs.replace(precision, main_gradient=0, master=0)
    for where, count, ranks in apart.groups():
        of = f"{count.trainable:,} parameters{where}"
        over = apart.over(ranks, 1)
        for what, field in (("float32 main gradients", "main_gradient"), ("float32 master weights", "master")):
            each = getattr(precision, field)
            only = msgspec.structs.replace(bare, **{field: each})
            held = apart.states(count, ranks, precision=only, optimizer=OPTIMIZERS["sgd"]).optimizer
            steps.append(Step(f"{what}: {of} x {each} B{over}", held))
        held = apart.states(count, ranks, precision=bare).optimizer
        steps.append(Step(f"{optimizer.name}: {of} x {_moments(apart)}{over}", held))
    return apart.explanation(
        "trainable parameters x bytes of optimizer states, sharded over the data-parallel ranks by ZeRO 1 and above",
        tuple(steps),
        sources=cited(precision.source, optimizer.source, "rajbhandari2019"),
    )


def _moments(apart: Apart) -> str:
    optimizer = apart.training.optimizer
    if optimizer.factored:
        return "a row and a column of float32 for each matrix"
    each = optimizer.moment(apart.training.precision)
    special = optimizer.matrix_moments
    fewer = "" if special is None else f" ({special} for the matrices of the blocks)"
    return f"{optimizer.moments} moments{fewer} x {each:g} B"


def _gathered(apart: Apart) -> Explanation:
    point = apart.at_work.point
    terms = {} if point is None else copies(apart.facts, apart.stage, point)
    return apart.explanation(
        "copies beside the model states, as the framework makes them",
        tuple(Step(what, nbytes) for what, nbytes in terms.items()),
        sources=cited(apart.training.framework.source),
    )


def _outside(apart: Apart) -> Explanation:
    groups = communicators(apart.layout)
    steps = (
        Step("CUDA context and loaded kernels", CONTEXT.value),
        Step("workspaces of cuBLAS and Transformer Engine, from PyTorch's allocator", apart.result.memory.workspaces),
        Step(f"buffers of {groups} NCCL communicators, one an axis with several ranks", groups * COMMUNICATOR.value),
    )
    return apart.explanation(
        "memory beside the tensors of the step", steps, notes=("assumed figures, not measured here",)
    )
