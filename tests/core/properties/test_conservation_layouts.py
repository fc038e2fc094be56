"""All ranks of a layout together hold one whole and do its work once, whatever tp, pp, cp, ep, etp and ZeRO divide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
from hypothesis import assume, given, settings, strategies as st

from loadgauge import Layout, RecomputePolicy, estimate
from loadgauge.core.definitions.model.model import Block, ModelSpec, Norm
from loadgauge.core.definitions.training.training import Training, training
from loadgauge.core.estimate.estimate import view_of
from loadgauge.core.estimate.memory.rank_memory import MemoryModel, Stage, stages
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.estimate.states.states import RankWeights
from loadgauge.core.families.reference import deepseek_block, llama_block, mixtral_block
from loadgauge.core.layers import head_layer
from loadgauge.core.layers.embedding_head import prediction_layer
from loadgauge.core.layers.operations.operations import Collective, Layer

HIDDEN, LENGTH = 512, 512
"""Of every model here; whole numbers remain after any of the degrees below."""
ON_EVERY_RANK = ("norm", "router", "down.weight", "down.bias")
"""What tensor parallelism does not divide: norms, routers, the matrices into a latent."""
STATES = ("optimizer", 1, 12), ("gradients", 2, 4), ("weights", 3, 2)
"""The stage of ZeRO that shards it, and bytes per parameter in Megatron's recipe of 18 (source: megatron-lm)."""
FEW = settings(max_examples=60, deadline=None)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """A dense model, one with experts, or one with latent attention, experts and dense layers before them."""
    experts, chosen, width = 8 * draw(st.integers(1, 4)), draw(st.integers(1, 8)), 256 * draw(st.integers(1, 4))
    dense = llama_block(HIDDEN, 16, draw(st.sampled_from([4, 16])), 64, 1024)
    kind = draw(st.sampled_from(["dense", "mixtral", "deepseek"]))
    blocks: tuple[Block, ...] = (dense,)
    if kind == "mixtral":
        blocks = (mixtral_block(HIDDEN, 16, 4, 64, experts, chosen, width),)
    elif kind == "deepseek":
        rank = draw(st.sampled_from([None, 256]))
        sparse = deepseek_block(HIDDEN, 16, rank, 256, 64, 64, 64, experts, chosen, width, 512)
        blocks = (msgspec.structs.replace(sparse, mlp=dense.mlp), sparse)
    layers = 4 * draw(st.integers(1, 3))
    first = draw(st.integers(1, layers - 1)) if len(blocks) > 1 else layers
    return ModelSpec(
        name=kind, model_type=kind, hidden_size=HIDDEN, vocab_size=1024 * draw(st.integers(1, 8)), blocks=blocks,
        pattern=(0,) * first + (1,) * (layers - first), final_norm=Norm("rmsnorm"),
        tie_word_embeddings=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn, model: ModelSpec, **fixed: int) -> Layout:
    """A valid layout of it. Tensor-parallel ranks share the tokens too, so that nothing is computed twice."""
    some = st.sampled_from([1, 2, 4])
    dp, tp, cp, pp = (fixed.get(axis) or draw(some) for axis in ("dp", "tp", "cp", "pp"))
    ep, etp = (draw(some), draw(some)) if model.name != "dense" else (1, 1)
    ep, etp = fixed.get("ep", ep), fixed.get("etp", etp)
    assume(dp * tp * cp % (ep * etp) == 0)
    batch = draw(st.integers(1, 2))
    layout = Layout(
        dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, sequence_parallel=tp > 1, zero=draw(st.integers(0, 3)),
        micro_batch=batch, global_batch=batch * dp * draw(st.integers(1, 4)), seq_len=LENGTH,
        cp_comm=draw(st.sampled_from(["ring", "all_gather", "all_to_all"])),
    )  # fmt: skip
    layout.check(model)
    return layout


@st.composite
def runs(draw: st.DrawFn, **fixed: int) -> tuple[ModelSpec, Layout]:
    model = draw(models())
    return model, draw(layouts(model, **fixed))


def how(precision: str = "bf16") -> Training:
    return training("megatron", precision)


def facts_of(model: ModelSpec, layout: Layout, chosen: Training | None = None) -> MemoryModel:
    chosen = chosen or how()
    return MemoryModel(model, layout, chosen, view_of(layout, chosen))


def weights_of(facts: MemoryModel, stage: Stage) -> RankWeights:
    return facts.weights(facts.counts(stage, stage.start, stage.stop)) + facts.ends(stage)


def layers_of(facts: MemoryModel, stage: Stage) -> Iterator[Layer]:
    """Every layer of a stage, embedding and head included."""
    for key, count in facts.counts(stage, stage.start, stage.stop).items():
        yield from [facts.facts[key].layer] * count
    if stage.first:
        yield facts.embedding
    if stage.last:
        yield facts.head


def whole_weights(model: ModelSpec, pp: int) -> tuple[int, int, int]:
    """Parameters of the model that tensor parallelism divides, that it does not, and of the routed experts."""
    facts = facts_of(model, Layout(seq_len=LENGTH))
    total: Counter[str] = Counter()
    for layer in layers_of(facts, stages(model, Layout(seq_len=1))[0]):
        for weight in layer.weights:
            copied = any(part in weight.name for part in ON_EVERY_RANK[:2]) or weight.name.endswith(ON_EVERY_RANK[2:])
            # The last matrix of an MLP is called `down` too, and is divided.
            copied = copied and not weight.name.startswith(("mlp.down", "mlp.shared.down"))
            total["expert" if weight.expert else "copied" if copied else "divided"] += weight.numel
    assert sum(total.values()) == parameters(model).total
    if pp > 1 and model.tie_word_embeddings:
        total["divided"] += model.vocab_size * model.hidden_size  # the last stage has a table of its own
    return total["divided"], total["copied"], total["expert"]


# -- model states ------------------------------------------------------------------------------------------------------


@FEW
@given(runs())
def test_ranks_together_hold_the_model_states(run: tuple[ModelSpec, Layout]) -> None:
    """Each state is there once where ZeRO shards it, else once for each rank that has a copy of the weights."""
    model, layout = run
    facts = facts_of(model, layout)
    divided, copied, experts = whole_weights(model, layout.pp)
    dense = divided + layout.tp * copied
    copies, expert_copies = layout.dp * layout.cp, layout.dp * layout.cp * layout.tp // (layout.ep * layout.etp)
    held = [facts.states(weights_of(facts, stage)) for stage in stages(model, layout)]
    ranks = layout.dp * layout.cp * layout.tp
    for part, first, each in STATES:
        many, many_experts = (1, 1) if layout.zero >= first else (copies, expert_copies)
        assert ranks * sum(getattr(states, part) for states in held) == each * (many * dense + many_experts * experts)


@FEW
@given(runs(pp=1))
def test_the_estimate_holds_them(run: tuple[ModelSpec, Layout]) -> None:
    model, layout = run
    moment = estimate(model, layout, how()).memory.moments[0]
    divided, copied, experts = whole_weights(model, 1)
    dense, routed = divided // layout.tp + copied, experts // (layout.ep * layout.etp)
    expert_copies = layout.dp * layout.cp * layout.tp // (layout.ep * layout.etp)
    for part, first, each in STATES:
        shards, expert_shards = (layout.dp * layout.cp, expert_copies) if layout.zero >= first else (1, 1)
        assert moment.parts[part] == each * (dense // shards + routed // expert_shards)


@FEW
@given(runs())
def test_groups_of_experts_fill_the_ranks_of_a_stage(run: tuple[ModelSpec, Layout]) -> None:
    _, layout = run
    assert layout.ep * layout.etp * layout.expert_dp == layout.dp * layout.cp * layout.tp == layout.gpus // layout.pp
    assert layout.zero_ranks * layout.tp == layout.gpus // layout.pp


# -- activations -------------------------------------------------------------------------------------------------------


@FEW
@given(runs(tp=1, ep=1, etp=1), st.sampled_from([2, 4, 8]))
def test_context_parallel_ranks_share_what_is_kept(run: tuple[ModelSpec, Layout], cp: int) -> None:
    model, layout = run
    one = msgspec.structs.replace(layout, cp=1)
    many = msgspec.structs.replace(layout, cp=cp, cp_comm="ring")
    whole, part = facts_of(model, one), facts_of(model, many)
    for stage in stages(model, layout):
        counts = whole.counts(stage, stage.start, stage.stop)
        assert cp * part.of_layers(counts).kept == whole.of_layers(counts).kept > 0
    assert cp * part.embedding.saved() == whole.embedding.saved() > 0
    for name in ("shared", "head_kept"):
        assert cp * getattr(part, name) == getattr(whole, name) > 0


@FEW
@given(runs())
def test_ranks_together_keep_the_activations_of_one(run: tuple[ModelSpec, Layout]) -> None:
    """Of a layer, over all the ranks that share a micro-batch; the experts' rows are on the ranks of their experts."""
    model, layout = run
    one = facts_of(model, Layout(micro_batch=layout.micro_batch, global_batch=layout.micro_batch, seq_len=LENGTH))
    here = facts_of(model, layout)
    for key, facts in one.facts.items():
        gathered = 0
        for tensor in here.facts[key].layer.kept():
            # The t_e ranks of an expert hold the same rows.
            if tensor.name in ("mlp.dispatch", "mlp.multiply.weights"):
                gathered += (layout.etp - 1) * tensor.nbytes // layout.etp
            # With Ulysses the kernel keeps the context by heads, and the last matrix keeps it by tokens.
            if tensor.name == "attention.exchanged":
                gathered += tensor.nbytes
        assert layout.tp * layout.cp * (here.facts[key].kept - gathered) == facts.kept


@FEW
@given(runs())
def test_every_copy_of_a_token_is_computed_once(run: tuple[ModelSpec, Layout]) -> None:
    """Over the ranks of a stage; the t_e ranks of an expert compute a part of each row."""
    model, layout = run
    facts = facts_of(model, layout)
    for kind, block in enumerate(model.blocks):
        dispatched = [op.outputs[0] for op in facts.facts[kind, False].layer if op.name == "mlp.dispatch"]
        rows = sum(tensor.numel for tensor in dispatched) // HIDDEN
        chosen = getattr(block.mlp, "num_experts_per_tok", 0)
        tokens = layout.dp * layout.micro_batch * LENGTH
        assert rows * layout.dp * layout.cp * layout.tp == layout.etp * tokens * chosen


def causal_pairs(length: int, cp: int, rank: int) -> int:
    """Pairs of a query on a rank and a key it may see, one by one: a ring gives each rank a piece from either end."""
    piece = length // (2 * cp)
    queries = [*range(rank * piece, (rank + 1) * piece)]
    queries += range(length - (rank + 1) * piece, length - rank * piece)
    return sum(query + 1 for query in queries)


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 4))
def test_a_ring_shares_the_pairs_evenly(cp: int, pieces: int, batch: int) -> None:
    """Every rank has as many as the next, and as many as the list of operations says: half of its pairs (and a bit)."""
    length = 2 * cp * pieces
    view = view_of(Layout(cp=cp, micro_batch=batch, global_batch=batch, seq_len=length), how())
    assert view.pairs * cp == length * length * batch
    assert view.tokens * cp == length * batch
    counted = {batch * causal_pairs(length, cp, rank) for rank in range(cp)}
    assert counted == {(view.pairs + view.tokens) // 2}


# -- work and traffic --------------------------------------------------------------------------------------------------


POLICIES = ("none", "selective", "full", "full:every=2", "full:every=3", "full:layers=1", "mlp", "mlp.dispatch")


@FEW
@given(runs(), st.sampled_from(POLICIES))
def test_ranks_together_do_the_work_of_the_model_once(run: tuple[ModelSpec, Layout], again: str) -> None:
    """And what runs again is what runs again on each stage."""
    model, layout = run
    assume(again != "mlp.dispatch" or model.name != "dense")
    layout = msgspec.structs.replace(layout, recompute=RecomputePolicy.parse(again))
    facts = facts_of(model, layout)
    steps = layout.num_microbatches * layout.dp * layout.cp * layout.tp
    done: Counter[str] = Counter()
    for stage in stages(model, layout):
        for place in range(stage.start, stage.stop):
            one = facts.facts[stage.kind(place), stage.repeated(layout.recompute, place)]
            done["forward"] += steps * one.layer.forward_flops
            done["backward"] += steps * one.layer.backward_flops
            done["recompute"] += steps * one.layer.recompute_flops(one.recompute)
        for end, here in ((facts.embedding, stage.first), (facts.head, stage.last)):
            done["forward"] += steps * end.forward_flops * here
            done["backward"] += steps * end.backward_flops * here
    flops = estimate(model, layout, how()).flops
    assert msgspec.to_builtins(flops) == done
    alone = estimate(model, Layout(global_batch=layout.global_batch, seq_len=LENGTH), how()).flops
    assert (alone.forward, alone.backward) == (flops.forward, flops.backward)


@FEW
@given(runs(), st.integers(1, 2))
def test_multi_token_prediction_is_shared_as_the_rest_is(run: tuple[ModelSpec, Layout], modules: int) -> None:
    model, layout = run
    more, view = model.with_mtp(modules), view_of(layout, how())
    block = facts_of(model, layout).facts[model.pattern[-1], False].layer
    own = [prediction_layer(more, view), block, head_layer(more, view, shared=True)]
    steps = modules * layout.num_microbatches * layout.dp * layout.cp * layout.tp
    once, both = (estimate(each, layout, how()).flops for each in (model, more))
    assert both.forward - once.forward == steps * sum(layer.forward_flops for layer in own)
    assert both.backward - once.backward == steps * sum(layer.backward_flops for layer in own)
    held = modules * sum(weight.numel * weight.shards for layer in own for weight in layer.weights)
    assert held == parameters(more).mtp
    for collective in (collective for layer in own for collective in layer.comm):
        assert collective.ranks == getattr(layout, collective.axis)


DEGREES = ("tp", "cp", "ep", "etp")


@FEW
@given(runs())
def test_nothing_is_sent_along_an_axis_of_one_rank(run: tuple[ModelSpec, Layout]) -> None:
    """And something along every other."""
    model, layout = run
    facts = facts_of(model, layout)
    sent: Counter[str] = Counter()
    found: list[Collective] = []
    for stage in stages(model, layout):
        for layer in layers_of(facts, stage):
            found += layer.comm
    for collective in found:
        assert collective.ranks == getattr(layout, collective.axis)
        sent[collective.axis] += collective.wire
    for axis in DEGREES:
        assert (sent[axis] > 0) == (getattr(layout, axis) > 1), axis
