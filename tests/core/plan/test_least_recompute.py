"""`plan --recompute least`: of all that may run again, the fastest that fits, as a loop over all of it finds."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from loadgauge import cluster, gpu, model, training
from loadgauge.core.definitions.hardware.hardware import with_memory
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.plan.request import PlanRequest, cases
from loadgauge.core.plan.search import Case, search
from loadgauge.core.plan.space.axis_values import space_for
from loadgauge.core.resolve.recompute_words import recompute_policy
from spaces import ends

LOCKS: dict[str, tuple[Any, ...]] = {
    "tp": (1,), "cp": (1,), "ep": (1,), "etp": (1,), "micro_batch": (1,), "replicas": (1,), "vpp": (1,),
    "schedule": ("1f1b",), "recompute": ("least",),
}  # fmt: skip
WHOLE = ("none", "full", *(f"full:layers={n}" for n in (1, 2, 3)), *(f"full:every={n}" for n in (2, 3)))


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
    policies = [policy for policy in given.space.recompute if policy.ops and "layernorm" not in policy.word]
    sizes = [len(policy.ops) for policy in policies if not policy.word]
    assert sorted(set(sizes))[:3] == [1, 2, 3]


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
