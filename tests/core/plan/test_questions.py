"""Questions the other way round have the answers that a plain loop over single estimates gives; users' questions have answers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import msgspec
import pytest

from command_line import document, typed
from loadgauge import Layout, Lora, NothingFits, cluster, estimate, gpu, model, training
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.hardware.hardware import gpu as kind_of_gpu
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.plan import inverse as questions
from loadgauge.core.plan.advise.replan import what_would_fit
from loadgauge.core.plan.reopen import reopen
from loadgauge.core.plan.search import Case, search
from loadgauge.core.plan.space.axis_values import space_for
from spaces import case, ends, every_layout

ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location("docs_asked", ROOT / "docs" / "asked.py")
assert SPEC is not None
assert SPEC.loader is not None
ASKED = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ASKED)

FEW: dict[str, Any] = {"pp": (1,), "cp": (1,), "schedule": ("1f1b",), "vpp": (1,), "replicas": (1,)}
TWO_NODES = case("llama-3.1-8b", 16, 16, tp=(1, 8), zero=(1, 3), **FEW)
ONE = case("qwen3-0.6b", 1, 16, 2048, schedule=("1f1b",), zero=(0,), card="rtx4090")


def by_hand(given: Case, *, tight: bool = False) -> list[tuple[float, float, Any]]:
    """Time, memory and layout of all that fit (or may), the fastest first, by a plain loop."""
    rows = [(*ends(given, layout), layout) for layout in every_layout(given)]
    room = given.cluster.gpu.capacity
    fits = [(step, memory, layout) for memory, high, step, layout in rows if (memory if tight else high) <= room]
    return sorted(fits, key=lambda row: row[:2])


PIPELINE = case(
    "qwen3-0.6b", 4, 4, 4096, pp=(2,), vpp=(1,), cp=(1,), tp=(1,), zero=(0, 2), replicas=(1,), schedule=("1f1b",),
    card="rtx4090", kind=training("torchtitan"),
)  # fmt: skip
SHARDED = case("qwen3-1.7b", 4, 4, 2048, pp=(1,), cp=(1,), tp=(1,), zero=(3,), replicas=(1,), vpp=(1,), schedule=("1f1b",),
               card="rtx4090", kind=training("huggingface"))  # fmt: skip


@pytest.mark.parametrize("given", [ONE, PIPELINE, SHARDED])
@pytest.mark.parametrize("batch", [None, 12, 1024])
def test_the_largest_micro_batch_is_the_last_of_all_whole_numbers(given: Case, batch: int | None) -> None:
    def fits(n: int, whole: int, tight: bool = False) -> bool:
        return bool(by_hand(questions.with_space(given, micro_batch=(n,), global_batch=whole), tight=tight))

    def needed(n: int) -> int:
        """The least global batch, of at least what is wanted, that suits every layout."""
        unit = n * given.space.gpus
        return unit * max(1, -(-(batch or 1) // unit))

    found = questions.largest_micro_batch(given, batch=batch)
    assert found.tight is not None
    most = 2 * found.tight + 3
    dividing = [n for n in range(1, most) if batch is not None and batch % n == 0 and fits(n, batch)]
    assert found.value == max([n for n in range(1, most) if fits(n, needed(n))] + dividing)
    assert found.dividing == (max(dividing) if dividing else None)
    sizes = [point.layout.micro_batch for point in found.curve]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert found.value == found.best.layout.micro_batch
    assert found.best.memory.verdict == "fits"
    dividing_tight = [n for n in range(1, most) if batch is not None and batch % n == 0 and fits(n, batch, tight=True)]
    assert (
        found.tight == sizes[-1] == max([n for n in range(1, most) if fits(n, needed(n), tight=True)] + dividing_tight)
    )
    for point in found.curve:
        n, whole = point.layout.micro_batch, point.layout.global_batch
        assert whole == (batch if n in dividing_tight else needed(n))
        there = questions.with_space(given, micro_batch=(n,), global_batch=whole)
        rows = by_hand(there) or by_hand(there, tight=True)
        assert point.time is not None
        assert point.time.step == pytest.approx(rows[0][0], rel=1e-9)


def test_the_margin_narrows_the_micro_batch() -> None:
    free = 4 * 2**30
    found = questions.largest_micro_batch(ONE, margin=free)
    assert found.value < questions.largest_micro_batch(ONE).value
    assert found.best.memory.total <= ONE.cluster.gpu.capacity - free


def test_the_longest_sequence_is_the_last_of_all_that_fit() -> None:
    given = case(
        "qwen3-1.7b", 1, 1, schedule=("1f1b",), zero=(0,), card="rtx4090", kind=training("huggingface", "bf16-pure")
    )
    found = questions.largest_sequence(given)
    longest = 0
    for steps in range(1, found.value // 1024 + 3):
        if by_hand(questions.with_space(given, seq_len=1024 * steps)):
            longest = 1024 * steps
    assert found.value == longest
    assert found.best.layout.seq_len == longest


@pytest.mark.slow
def test_the_smallest_adapter() -> None:
    share = 0.25
    found = questions.smallest_nic(TWO_NODES, share)
    for gigabits in questions.NICS:
        link = msgspec.structs.replace(TWO_NODES.cluster.links[-1], bandwidth=gigabits * 1e9 / 8)
        machines = msgspec.structs.replace(TWO_NODES.cluster, links=(TWO_NODES.cluster.links[0], link))
        slower = msgspec.structs.replace(TWO_NODES, cluster=machines)
        best = slower.estimate(by_hand(slower)[0][2])
        assert best.time is not None
        busy = sum(
            best.time.parts[lane] for lane in ("forward", "backward", "recompute", "loss", "optimizer", "bubble")
        )
        if (best.time.step - busy - best.time.parts.get("fixed", 0)) / best.time.step <= share:
            break
    assert found.value == gigabits * 1e9 / 8
    assert gigabits > questions.NICS[0]


@pytest.mark.parametrize(
    ("axes", "lane", "where"),
    [
        ({"tp": (8,), "zero": (0,)}, "tp", "inside a node, where no adapter changes it"),
        ({"tp": (1,), "zero": (3,), "micro_batch": (1,)}, "zero", "over the network, latency included"),
    ],
)
def test_what_no_adapter_changes_is_named(axes: dict[str, Any], lane: str, where: str) -> None:
    given = case("llama-3.1-8b", 16, 16, **{**FEW, **axes})
    with pytest.raises(NothingFits) as caught:
        questions.smallest_nic(given, 0.0005)
    link = msgspec.structs.replace(given.cluster.links[-1], bandwidth=400e9)
    machines = msgspec.structs.replace(given.cluster, links=(given.cluster.links[0], link))
    fastest = msgspec.structs.replace(given, cluster=machines)
    time = fastest.estimate(by_hand(fastest)[0][2]).time
    assert time is not None
    share = f"{time.parts[lane] / time.step:.1%}"
    assert str(caught.value).endswith(f"most of it is {lane}, {share} of the step, {where}")
    assert "under 0.05% of the step" in str(caught.value)


def test_no_adapter_makes_room() -> None:
    with pytest.raises(NothingFits, match="fits 16 x H100 SXM5 80GB, whatever the adapter"):
        questions.smallest_nic(case("llama-3.1-405b", 16, 16, tp=(8,), zero=(0,), **FEW), 0.1)


def test_no_adapter_where_there_is_no_network() -> None:
    with pytest.raises(ConfigError, match="one domain"):
        questions.smallest_nic(ONE, 0.1)


def test_the_largest_model() -> None:
    names = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "qwen3-1.7b", "llama-3.2-3b")
    models = [model(name) for name in names]
    found = questions.largest_model(msgspec.structs.replace(ONE, locks={}), models)
    fits = []
    for one in models:
        space = space_for(one, ONE.training, 1, ONE.space.global_batch, ONE.space.seq_len)
        if by_hand(msgspec.structs.replace(ONE, space=space)):
            fits.append(one)
    assert 0 < len(fits) < len(models)
    assert found.value == max(fits, key=lambda one: parameters(one).total).name


@pytest.mark.parametrize(("name", "kind"), [
    ("llama-3.1-8b", training("megatron")), ("llama-3.1-8b", training("torchtitan")),
    ("llama-3.1-8b", training("huggingface", "bf16-pure", "adafactor")),
    ("llama-3.1-8b", training("deepspeed", offload="optimizer")), ("deepseek-v3.2", training("megatron")),
    ("llama-3.1-8b", training("huggingface", lora=Lora(rank=16, targets=frozenset({"q", "v"}), quantised=True))),
])  # fmt: skip
def test_what_is_held_at_least_is_what_one_rank_holds_of_all(name: str, kind: Any) -> None:
    """The states of an estimate on one card, where frozen weights have no gradients and no moments."""
    own = model(name)
    held = questions.held_bytes(own, kind)
    parts = estimate(own, Layout(seq_len=512), kind).memory.parts
    counted = ["weights"] if kind.offload != "none" or kind.optimizer.by_tensor else ["weights", "optimizer"]
    assert held == pytest.approx(sum(parts[part] for part in counted), rel=5e-3)
    if name == "deepseek-v3.2":  # whose indexers nothing trains
        assert held < 13.99 * parameters(own).total


OPEN = {"zero": (0, 1, 3), "replicas": (1,), "schedule": ("1f1b", "interleaved")}


@pytest.mark.parametrize(("name", "gpus", "narrowed", "kind", "locks"), [
    ("llama-3.1-8b", 8, False, training("megatron"), FEW), ("llama-3.1-8b", 16, False, training("torchtitan"), FEW),
    ("llama-3.1-70b", 96, True, training("megatron"), OPEN),
])  # fmt: skip
def test_there_is_room_where_the_leanest_layout_has_it(
    name: str, gpus: int, narrowed: bool, kind: Any, locks: dict[str, Any]
) -> None:
    """To the byte: a bound that is 1 % too high rules out the only layout that fits."""
    given = case(name, gpus, gpus, kind=kind, **locks)
    assert given.space.narrowed == narrowed
    high, total = (questions.leanest(given, end)[0] for end in ("high", "total"))
    assert high > total
    found = {room: questions.room(given, room) for room in (high, high - 1, total, total - 1)}
    assert found == {high: (True, True), high - 1: (False, True), total: (False, True), total - 1: (False, False)}


@pytest.mark.parametrize(
    ("name", "card", "any_batch"), [("qwen3-14b", "a100-sxm4-40gb", True), ("llama-3.1-8b", "a100-sxm4-40gb", False)]
)
def test_the_fewest_gpus_are_the_first_of_all_sizes(name: str, card: str, any_batch: bool) -> None:
    given = case(name, 16, 32, card=card, pp=(1,), cp=(1,), vpp=(1,), schedule=("1f1b",), replicas=(1,), tp=(1, 2, 4))
    given = msgspec.structs.replace(given, locks={"pp": (1,), "cp": (1,), "vpp": (1,), "tp": (1, 2, 4)})
    sizes = list(questions.sizes(16, 8))
    batches = {size: max(1, round(32 / size)) * size if any_batch else None for size in sizes}
    cases_of = {size: reopen(given, gpus=size, global_batch=batches[size]) for size in sizes}
    fits = {
        end: [size for size, one in cases_of.items() if questions.leanest(one, end)[0] <= one.cluster.gpu.capacity]
        for end in ("high", "total")
    }
    assert len(sizes) > len(fits["high"]) > 0
    found = questions.fewest_gpus(given, any_batch=any_batch)
    assert found.value == found.best.layout.gpus == fits["high"][0]
    assert (f"on {fits['total'][0]:,} it is TIGHT" in found.text) == (fits["total"][0] < fits["high"][0])


@pytest.mark.slow
def test_the_cheapest_kind_of_gpu() -> None:
    prices = {"h100-sxm5-80gb": 3.0, "a100-sxm4-80gb": 1.0, "b200-sxm-180gb": 6.0, "rtx4090": 0.1, "rtx3060-12gb": 0.05}
    given = case("llama-3.1-8b", 8, 8, tp=(1, 2, 8), zero=(1, 3), **FEW)

    def on(name: str) -> list[Case]:
        return [msgspec.structs.replace(given, cluster=cluster(kind_of_gpu(name), 8))]

    found, rest = questions.cheapest_gpu(on, prices)
    costs = {}
    for name, price in prices.items():
        rows = by_hand(on(name)[0])
        tight = rows or by_hand(on(name)[0], tight=True)
        if tight:
            costs[name] = (not rows, price * 8 * tight[0][0] / 3600 / (8 * 4096) * 1e9)
    names = [answer.best.cluster.gpu.id for answer in found if answer.best.cluster is not None]
    assert names == sorted(costs, key=costs.__getitem__)
    assert [answer.value for answer in found] == pytest.approx([cost for _, cost in sorted(costs.values())])
    assert len(rest) == len(prices) - len(costs)


@pytest.mark.slow
def test_a_lock_outlives_a_change() -> None:
    locks: dict[str, tuple[Any, ...]] = {"tp": (2,), "pp": (1,), "cp": (1,), "micro_batch": (1,), "zero": (1,)}
    kind = training("megatron")
    space = space_for(model("llama-3.1-8b"), kind, 8, 8, 4096, locks=locks)
    given = Case(space=space, training=kind, cluster=cluster(gpu("h100-sxm5-80gb"), 8), locks=locks)
    assert questions.fewest_gpus(given).best.layout.tp == 2
    assert questions.largest_sequence(given).best.layout.tp == 2
    assert reopen(given, gpus=16, global_batch=16).space.tp == (2,)
    eight = msgspec.structs.replace(given, cluster=cluster(gpu("rtx4090"), 8))
    assert all(change.best.layout.tp == 2 for change in what_would_fit([eight], 0.0, "time"))


def test_a_job_with_lengths_fits_only_with_its_longest() -> None:
    lengths = Lengths.of([100] * 99 + [4096])
    given = case("llama-3.1-8b", 1, 8, schedule=("1f1b",), zero=(0,), card="h100-sxm5-80gb", lengths=lengths,
                 kind=training("huggingface", optimizer="sgd"))  # fmt: skip
    found = search([given], top=100)
    fits = 0
    without = msgspec.structs.replace(given, space=msgspec.structs.replace(given.space, lengths=None))
    for layout in every_layout(given):
        memory, high, _ = ends(given, layout)
        alike = msgspec.structs.replace(layout, tokens=None, pairs=None, fullest=None)
        assert high == pytest.approx(max(high, ends(without, alike)[1]), abs=0.5)
        if high <= given.cluster.gpu.capacity:
            fits += 1
            result = next(one for one in found.layouts if one.layout == layout)
            assert result.memory.total == pytest.approx(memory, abs=0.5)
    assert found.fitting == fits == len(found.layouts)
    # As they come, more would seem to fit.
    mean = (msgspec.structs.replace(layout, fullest=None) for layout in every_layout(given))
    assert fits < sum(ends(without, layout)[1] <= given.cluster.gpu.capacity for layout in mean)


def test_what_does_not_fit_says_so() -> None:
    given = case("llama-3.1-70b", 1, 1, card="rtx4090")
    for question in (questions.largest_sequence, questions.largest_micro_batch, questions.fewest_gpus):
        with pytest.raises(NothingFits):
            question(given)


# -- questions that users asked ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", ASKED.questions(), ids=lambda one: f"{one.source} {one.text}"[:60])
def test_a_users_question_is_answered(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer has what a right answer has; one that is still open has not, or is marked no longer."""
    if one.command.startswith(("saved ", "trace ", "capture ")):
        pytest.importorskip("torch", reason="is answered with PyTorch")
    monkeypatch.chdir(ROOT)
    found = typed(one.command)
    if "needs diffusers" in found.err:
        pytest.skip("is answered with diffusers")
    lacks = one.lacks(" ".join(found.out.split()) if found.code in (0, 1) else "")
    assert bool(lacks) == one.open, (lacks, found.err)
    assert "this is a defect" not in found.err


def test_a_figure_that_is_one_percent_off_is_no_right_answer() -> None:
    asked = ASKED.Question("", "", "", ("weights = 1000*2", "host"), False)
    assert asked.lacks("weights 2,000 5.0% on the host") == []
    assert asked.lacks("weights 2,020 5.0% on the host; 2,000") == ["weights = 1000*2"]


def test_most_questions_are_answered_and_the_page_says_how_many() -> None:
    listed = ASKED.questions()
    assert len({(one.source, one.text) for one in listed}) == len(listed) > 90
    assert sum(not one.open for one in listed) >= 0.8 * len(listed)
    assert (ROOT / "docs" / "asked.md").read_text(encoding="utf-8") == ASKED.page(), "run python docs/asked.py"


def test_padded_micro_batches_are_planned_as_they_are_estimated() -> None:
    """Of one sequence there is nothing to pad; of several PyTorch's attention is given a mask."""
    line = "llama-3.2-1b --gpu a100-sxm4-80gb --gpus 2 --framework huggingface --global-batch 8 --padding dynamic"
    line += " --lengths uniform:2048 --recompute none --zero 2"
    layouts = document(f"plan {line} --no-cache")["layouts"]
    found = {layout["layout"]["micro_batch"]: layout["time"]["step"] for layout in layouts}
    assert {1, 2} <= set(found)
    for size, seconds in found.items():
        alone = document(f"estimate {line} --micro-batch {size}")["time"]["step"]
        assert seconds == pytest.approx(alone, rel=1e-9), size


@pytest.mark.parametrize(
    "line",
    [
        "deepseek-v2-lite --gpu h100-sxm5-80gb --gpus 8 --seq-len 2048 --schedule 1f1b,dualpipe --pp 2 --ep 4 --recompute none",
        "jamba-v0.1 --gpu b200-sxm-180gb --gpus 8 --framework nemo --seq-len 2048 --ep 8 --pp 1 --recompute none",
        "qwen2.5-7b --gpu h100-sxm5-80gb --gpus 8 --framework deepspeed --lengths uniform:4096 --lora-rank 16 --recompute full",
    ],
)
def test_what_a_plan_prints_is_what_its_command_estimates(line: str) -> None:
    """Schedules of two directions exchange beside compute, Blackwell sends each token once, packed sequences fill up."""
    layouts = document(f"plan {line} --global-batch 32 --no-cache")["layouts"]
    for layout in layouts:
        alone = document(layout["command"].removeprefix("loadgauge "))
        assert alone["memory"]["total"] == layout["memory"]["total"], layout["command"]
        assert alone["time"]["step"] == layout["time"]["step"], layout["command"]


@pytest.mark.parametrize(
    ("name", "stages"), [("gemma-3n-e2b", (1,)), ("gemma-4-e2b", (1,)), ("qwen3-0.6b", (1, 2, 4, 8))]
)
def test_a_search_has_the_stages_that_a_layout_may_have(name: str, stages: tuple[int, ...]) -> None:
    """Layers that borrow from the first ones are in one stage; each layout of the front is estimated, whatever its stages."""
    space = space_for(model(name), training("torchtitan"), 8, 8, 512, locks={"cp": (1,), "tp": (1,)})
    assert space.pp == stages
    found = search([Case(space=space, training=training("torchtitan"), cluster=cluster(gpu("h100-sxm5-80gb"), 8))])
    assert {one.layout.pp for one in found.pareto} <= set(stages)
