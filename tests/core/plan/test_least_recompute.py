"""`plan --recompute least`: of all that may run again, the fastest that fits, as a loop over all of it finds."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import msgspec
import pytest

from loadgauge import cluster, gpu, model, training
from loadgauge.core.base.errors import NothingFits
from loadgauge.core.definitions.hardware.hardware import with_memory
from loadgauge.core.definitions.layout.layout import Layout, RecomputePolicy
from loadgauge.core.layers.operations.operations import Recompute
from loadgauge.core.plan.request import PlanRequest, cases
from loadgauge.core.plan.search import Case, search
from loadgauge.core.plan.space.axis_values import space_for
from loadgauge.core.resolve.recompute_words import MODULES, _layers, _names, _of_modules, recompute_policy
from spaces import ends

LOCKS: dict[str, tuple[Any, ...]] = {
    "tp": (1,), "cp": (1,), "ep": (1,), "etp": (1,), "micro_batch": (1,), "replicas": (1,), "vpp": (1,),
    "schedule": ("1f1b",), "recompute": ("least",),
}  # fmt: skip
WHOLE = ("none", "full", *(f"full:layers={n}" for n in (1, 2, 3)), *(f"full:every={n}" for n in (2, 3)))

DRAWN = (
    "gpt2",
    "llama-3.1-8b",
    "qwen3-8b",
    "gemma-3-27b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "olmoe-1b-7b",
)


def four_layers(framework: str, name: str, pp: int, memory: str) -> Case:
    spec = model(name)
    spec = msgspec.structs.replace(spec, pattern=spec.pattern[-4:])
    kind, ranks = training(framework), pp * (2 if framework == "torchtitan" else 1)
    space = space_for(spec, kind, ranks, 8, 4096, locks=LOCKS | {"pp": (pp,)})
    machines = cluster(with_memory(gpu("h100-sxm5-80gb"), memory), ranks)
    return Case(space=space, training=kind, cluster=machines, locks=LOCKS)


@pytest.mark.parametrize(
    ("framework", "name", "modules", "pp", "memory"),
    [
        ("megatron", "llama-3.1-8b", ("core_attn", "layernorm", "mlp"), 1, "48.2GiB"),
        ("megatron", "llama-3.1-8b", ("core_attn", "layernorm", "mlp"), 2, "27.0GiB"),
        ("megatron", "mixtral-8x7b", ("core_attn", "layernorm", "moe", "moe_act"), 1, "134GiB"),
    ],
)
def test_the_least_that_fits_is_what_a_loop_finds(
    framework: str, name: str, modules: tuple[str, ...], pp: int, memory: str
) -> None:
    given = four_layers(framework, name, pp, memory)
    best = search([given], top=1).layouts[0]
    assert best.time is not None
    sets = itertools.chain(*(itertools.combinations(modules, count) for count in range(1, len(modules) + 1)))
    rows: dict[str, tuple[float, float]] = {}
    layout: Layout = best.layout
    for word in (*WHOLE, *("modules:" + ",".join(chosen) for chosen in sets)):
        policy = recompute_policy(word, given.space.model, given.training)
        _, high, step = ends(given, msgspec.structs.replace(layout, recompute=policy))
        rows[word] = high, step
    room = given.cluster.gpu.capacity
    fitting = {word: step for word, (high, step) in rows.items() if high <= room}
    assert 1 < len(fitting) < len(rows)
    assert best.time.step == min(fitting.values())
    assert best.time.step <= min(step for word, step in fitting.items() if word == "full" or "every" in word)


def test_a_framework_that_chooses_by_operation_is_asked_by_operation() -> None:
    given = four_layers("torchtitan", "llama-3.1-8b", 1, "50GiB")
    policies = [policy for policy in given.space.recompute if policy.ops and not policy.word]
    assert {frozenset({"mlp.activation"}), frozenset({"mlp.activation", "mlp.multiply"})} <= {
        each.ops for each in policies
    }


@pytest.mark.parametrize("link", ["8GB/s", "400GB/s"])
def test_what_runs_again_and_what_is_off_the_card_are_chosen_together_as_a_loop_finds(link: str) -> None:
    """The fewest seconds of all policies with each kind of tensors off the card; a quick link to the host changes the answer."""
    flags = {
        "gpu": "h100-sxm5-80gb",
        "gpus": 1,
        "seq_len": 16384,
        "global_batch": 2,
        "framework": "megatron",
        "zero": 0,
    }
    one = dict.fromkeys(("tp", "pp", "cp", "micro_batch"), 1)
    spec = model("llama-3.1-8b")
    spec = msgspec.structs.replace(spec, pattern=spec.pattern[-4:])
    chosen = {"recompute": "least", "activation_offload": "least", "memory": "60GiB", "host_link": link}
    request = PlanRequest.of(spec.name, flags | one | chosen)
    searches = [msgspec.structs.replace(each, others=()) for each in cases(request, spec)[1]]
    best = search(searches, top=1).layouts[0]
    assert best.time is not None
    words = ("none", "checkpoints", "all", "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
    modules = ("core_attn", "layernorm", "mlp")
    sets = itertools.chain(*(itertools.combinations(modules, count) for count in range(1, len(modules) + 1)))
    policies = (*WHOLE, *("modules:" + ",".join(some) for some in sets))
    kind, rows = searches[0].training, {}
    for word, text in itertools.product(words, policies):
        policy = recompute_policy(text, spec, kind)
        if word == "checkpoints" and policy.mode != "full":
            continue
        host = msgspec.structs.replace(kind.host, activations=word)
        moved = msgspec.structs.replace(searches[0], training=msgspec.structs.replace(kind, host=host))
        alone = moved.estimate(msgspec.structs.replace(best.layout, recompute=policy))
        assert alone.time is not None
        rows[word, text] = alone.memory.verdict, alone.time.step
    fitting = {key: step for key, (verdict, step) in rows.items() if verdict == "fits"}
    assert 1 < len(fitting) < len(rows)
    assert best.time.step == min(fitting.values())
    without = min(step for (word, _), step in fitting.items() if word == "none")
    assert (best.time.step < without) == (link == "400GB/s")


def drawn(seed: int) -> tuple[Case, Layout, tuple[str, ...]]:
    """Four layers of a drawn model and framework on a card that holds some policies, a layout, and all policies by hand."""
    pick = random.Random(seed)
    framework = pick.choice(("megatron", "megatron", "deepspeed", "huggingface"))
    spec, kind = model(pick.choice(DRAWN)), training(framework)
    spec = msgspec.structs.replace(spec, pattern=spec.pattern[-4:])
    pp = pick.choice((1, 1, 2)) if framework == "megatron" else 1
    seq_len, ranks = pick.choice((512, 1024) if spec.learned_positions else (1024, 4096, 8192)), 2 * pp
    locks = LOCKS | {"pp": (pp,), "zero": (pick.choice((0, 1)),)}
    space = space_for(spec, kind, ranks, 8, seq_len, locks=locks)
    roomy = Case(space=space, training=kind, cluster=cluster(with_memory(gpu("h100"), "4000GiB"), ranks), locks=locks)
    layout = search([roomy], top=1).layouts[0].layout
    names = [name for name in MODULES if framework == "megatron" and _of_modules([name], spec, _names(spec, kind))]
    sets = itertools.chain(*(itertools.combinations(names, count) for count in range(1, len(names) + 1)))
    words = (*WHOLE, *("modules:" + ",".join(chosen) for chosen in sets))
    highs = {ends(roomy, with_policy(layout, word, roomy))[1] for word in words}
    room = f"{pick.choice(sorted(highs)) * 1.0005 / 2**30:.6f}GiB"
    tight = msgspec.structs.replace(roomy, cluster=cluster(with_memory(gpu("h100"), room), ranks))
    return tight, layout, words


def with_policy(layout: Layout, word: str, given: Case) -> Layout:
    return msgspec.structs.replace(layout, recompute=recompute_policy(word, given.space.model, given.training))


@pytest.mark.parametrize("seed", range(100))
def test_of_drawn_spaces_the_least_is_what_a_loop_finds_and_never_slower_than_whole_layers(seed: int) -> None:
    given, layout, words = drawn(seed)
    room = given.cluster.gpu.capacity
    rows = {word: ends(given, with_policy(layout, word, given))[1:] for word in words}
    fitting = {word: step for word, (high, step) in rows.items() if high <= room}
    try:
        best = search([given], top=1).layouts[0]
    except NothingFits:
        assert not fitting
        return
    assert best.time is not None
    if fitting:
        assert best.memory.verdict == "fits"
        assert best.time.step == min(fitting.values())
        whole = [step for word, step in fitting.items() if word.startswith("full")]
        assert best.time.step <= min(whole, default=math.inf)
    else:
        assert best.memory.verdict == "tight"


def test_sets_of_operations_are_as_quick_as_any_of_all_subsets() -> None:
    """Every subset of the operations of a layer (65,536): for each room the quickest of them, estimated, is hardly quicker."""
    given = four_layers("torchtitan", "llama-3.1-8b", 1, "4000GiB")
    given = msgspec.structs.replace(given, space=msgspec.structs.replace(given.space, seq_len=1024))
    layout, spec, kind = search([given], top=1).layouts[0].layout, given.space.model, given.training
    (layer,) = _layers(spec, kind)
    names = [each.name for each in layer if each.gradients]

    def estimated(names: tuple[str, ...]) -> tuple[float, float]:
        policy = RecomputePolicy(mode="ops", ops=frozenset(names)) if names else RecomputePolicy()
        return ends(given, msgspec.structs.replace(layout, recompute=policy))[1:]

    alone = {each: estimated((each,))[1] - estimated(())[1] for each in names}
    subsets = itertools.chain(*(itertools.combinations(names, count) for count in range(len(names) + 1)))
    kept = ((layer.saved(Recompute(discarded=frozenset(some))), sum(map(alone.get, some)), some) for some in subsets)
    front: list[tuple[str, ...]] = []
    least = math.inf
    for _, took, some in sorted(kept, key=lambda row: row[:2]):
        if took < least - 1e-9:
            front, least = [*front, some], took
    own = [ends(given, msgspec.structs.replace(layout, recompute=policy))[1:] for policy in given.space.recompute]
    assert len(front) > 8
    for high, step in map(estimated, front):
        assert min(quick for size, quick in own if size <= high * (1 + 1e-9)) <= step * 1.003
