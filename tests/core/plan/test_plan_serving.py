"""`plan --task generate`: the best of all layouts and batches, as a loop of single estimates finds it."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import msgspec
import pytest

from command_line import document, typed
from loadgauge.core.base.errors import ConfigError, Error
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.plan.serving import Limits, plan_apart, plan_serving
from loadgauge.core.resolve.inference import resolve_inference
from loadgauge.core.serving.result import Answer

GIVEN = {"context": 2048, "answer": 256, "server": "vllm", "prefill_tokens": 8192}


def loop(job: Job, gpus: int, given: dict[str, Any], experts: bool) -> list[Answer]:
    """Every layout of whole replicas with every batch of a list, each estimated by itself, that fits."""
    answers = []
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    for tp, pp, ep in itertools.product([size for size in sizes if size <= 8], sizes, sizes if experts else [1]):
        try:
            answer, _ = resolve_inference(job.replace(gpus=gpus, tp=tp, pp=pp, ep=ep), "generate", given)
        except Error:
            continue
        if answer.memory.fits:
            answers.append(answer)
    return answers


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "token"),
    [
        ("qwen3-8b", "l4", 4, 0.2), ("qwen3-8b", "h100-sxm5-80gb", 2, 0.012), ("qwen3-8b", "rtx4090", 3, 0.06),
        ("olmoe-1b-7b", "h100-sxm5-80gb", 2, 0.02), ("olmoe-1b-7b", "l40s", 2, 0.03),
        ("qwen3-4b", "h100-sxm5-80gb", 2, 0.05),  # two replicas, whose batches one card alone holds
    ],
)  # fmt: skip
def test_the_best_is_that_of_a_loop_of_estimates(model: str, gpu: str, gpus: int, token: float) -> None:
    job, limits = Job(model, gpu=gpu), Limits(token=token)
    experts = model.startswith("olmoe")
    plan = plan_serving(job.replace(gpus=gpus), GIVEN, {}, limits)
    best = plan.choices[0]
    batches = (
        {row.answer.asked.batch for row in plan.choices} | {2**power for power in range(9)} | set(range(5, 300, 11))
    )
    most = max(
        (answer.tokens_per_second or 0.0) / gpus
        for batch in batches
        for answer in loop(job, gpus, GIVEN | {"batch": batch}, experts)
        if (answer.token or 0.0) <= token
    )
    assert best.per_gpu == pytest.approx(most, rel=1e-9)
    assert best.answer.token <= token
    front = [(row.per_gpu, row.answer.token) for row in plan.front]
    assert not [
        (mine, other) for mine in front for other in front if other[0] >= mine[0] and other[1] < mine[1] and mine != other
    ]  # fmt: skip


def test_scores_and_several_formats_are_planned_too() -> None:
    """Most sequences a second of a loop over batches and layouts; each format as a plan of it alone."""
    given = {"context": 512}
    plan = plan_serving(Job("qwen3-0.6b", gpu="l4", gpus=2), given, {}, Limits(first=1.0), task="forward")
    rates = []
    for tp, batch in itertools.product((1, 2), range(1, 200, 3)):
        answer, _ = resolve_inference(Job("qwen3-0.6b", gpu="l4", gpus=2, tp=tp), "forward", given | {"batch": batch})
        took = answer.first.seconds * answer.software
        rates += [2 / tp * batch / took] if took <= 1.0 and answer.memory.fits else []
    best = plan.choices[0]
    assert best.first <= 1.0
    assert best.requests >= max(rates)
    assert best.requests == pytest.approx(best.batch / best.first)
    asked = "plan qwen3-0.6b --gpu l4 --gpus 1 --task generate --context 512 --answer 64 --batch 8 --weight-format"
    told = document(f"{asked} bf16,fp8")
    rows = {row["command"].partition("--weight-format ")[2].split()[0]: row for row in told["choices"]}
    for name, row in rows.items():
        alone = document(f"{asked} {name}")
        assert alone["choices"][0]["token_seconds"] == row["token_seconds"]
    assert set(rows) == {"bf16", "fp8"}


@pytest.mark.parametrize("requests", [None, 40.0])
def test_servers_apart_are_the_best_of_all_pairs(requests: float | None) -> None:
    """Every replica and batch for prompts beside every one for answers, each estimated by itself, in every share of the GPUs."""
    job, given, limits = (
        Job("qwen3-4b", gpu="h100-sxm5-80gb"),
        {"context": 2048, "answer": 64},
        Limits(token=0.01, first=1.0),
    )
    plan = plan_apart(job.replace(gpus=4), given, {"pp": (1,)}, msgspec.structs.replace(limits, requests=requests))
    split = plan.apart
    assert split is not None
    assert split.generating.request["server"] == "vllm:handed=true"
    assert split.first <= 1.0
    assert split.generating.answer.token <= 0.01
    # Keys and values of 36 layers of 8 heads of 128, in 16 bits, over NVLink.
    nbytes = (2048 - 64) * 36 * 2 * 8 * 128 * 2
    assert split.reading.answer.gpus == split.generating.answer.gpus == 1
    assert split.handing == pytest.approx(nbytes / 450e9)
    sides: list[list[tuple[int, float, float]]] = [[], []]
    for side, request in enumerate(
        ({"context": 1985, "answer": 1, "server": "vllm"}, given | {"server": "vllm:handed=true"})
    ):
        for tp, batch in itertools.product((1, 2), (*range(1, 9), 16, 32, 64, 100, 128)):
            answer, _ = resolve_inference(job.replace(gpus=tp, tp=tp), "generate", request | {"batch": batch})
            late = answer.served.first > 1.0 or (side and answer.token > 0.01)
            rate = (answer.tokens_per_second or 0.0) / request["answer"]
            sides[side] += [] if late or not answer.memory.fits else [(tp, rate, answer.served.first)]
    pairs = [(a, b) for a, b in itertools.product(*sides) if a[2] + b[2] <= 1.0 - split.handing]
    if requests is None:
        most = max(
            min(many * a[1], (4 - many * a[0]) // b[0] * b[1]) for a, b in pairs for many in range(1, 4 // a[0] + 1)
        )
        assert split.gpus <= 4
        assert split.requests >= most * (1 - 1e-9)
    else:
        least = min(math.ceil(40 / a[1]) * a[0] + math.ceil(40 / b[1]) * b[0] for a, b in pairs)
        assert split.gpus <= least
        assert split.requests >= 40


def test_a_server_that_prompts_are_handed_to_reads_none() -> None:
    """Its tokens take as long as its steps, and a first token waits for no prompt; the cache is a whole request's."""
    asked = {"context": 4096, "answer": 256, "batch": 32}
    job = Job("llama-3.1-8b", gpu="h100-sxm5-80gb")
    handed, both = (
        resolve_inference(job, "generate", asked | {"server": server})[0] for server in ("vllm:handed=true", "vllm")
    )
    assert handed.served.token == pytest.approx(handed.served.step, rel=0.02)
    assert handed.served.prompt == 0
    assert handed.served.first < both.served.first
    assert handed.memory.cache == both.memory.cache


@pytest.mark.parametrize("seed", range(200))
def test_no_layout_and_no_batch_of_a_small_space_is_better(seed: int) -> None:
    """Brute force: each layout of a drawn space with batches up to what fits, under drawn limits of both times."""
    draw = random.Random(seed)
    name = draw.choice(("qwen3-0.6b", "qwen3-4b", "qwen3-8b", "llama-3.1-8b", "olmoe-1b-7b"))
    card, gpus = draw.choice(("l4", "l40s", "rtx4090", "a100-sxm4-40gb", "h100-sxm5-80gb")), draw.choice((1, 2, 3, 4))
    answer, context = draw.choice((64, 256, 1024)), draw.choice((1536, 2048, 4096))
    given = {"context": context, "answer": answer, "server": draw.choice(("vllm", "sglang", "trtllm"))}
    limits = Limits(token=draw.choice((None, 0.01, 0.02, 0.05)), first=draw.choice((None, 0.5, 2.0, 10.0)))
    job = Job(name, gpu=card)
    most = 0.0
    for batch in (*range(1, 9), 11, 13, *range(16, 96, 9), *range(100, 500, 61)):
        for one in loop(job, gpus, given | {"batch": batch}, name.startswith("olmoe")):
            slow = limits.token is not None and (one.token or 0.0) > limits.token
            late = limits.first is not None and one.served is not None and one.served.first > limits.first
            most = most if slow or late else max(most, (one.tokens_per_second or 0.0) / gpus)
    plan = plan_serving(job.replace(gpus=gpus), given, {}, limits)
    kept = [
        row.per_gpu
        for row in plan.choices
        if (limits.token is None or row.answer.token <= limits.token)
        and (limits.first is None or row.first <= limits.first)
    ]
    assert max(kept, default=0.0) >= most * (1 - 1e-9)
    if kept:
        again, _ = resolve_inference(
            plan.choices[0].job, "generate", given | {"batch": plan.choices[0].answer.asked.batch}
        )
        assert again.tokens_per_second == pytest.approx(plan.choices[0].per_gpu * gpus, rel=1e-9)


@pytest.mark.parametrize(("sought", "name"), [("seq-len", "context"), ("batch", "batch")])
def test_the_largest_fits_and_one_more_does_not(sought: Any, name: str) -> None:
    job = Job("qwen3-8b", gpu="rtx4090", gpus=2)
    given = {key: value for key, value in GIVEN.items() if key != name}
    plan = plan_serving(job, given, {"pp": (1,)}, Limits(), sought)
    best = plan.choices[0]
    value = getattr(best.answer.asked, name)

    def fits(more: int) -> bool:
        return (
            resolve_inference(best.job, "generate", given | {name: value + more}, whole=False)[0].memory.verdict
            == "fits"
        )

    assert fits(0)
    assert not fits(1) or value == plan.longest
    everywhere = [
        getattr(row.answer.asked, name) * (row.answer.asked.replicas if name == "batch" else 1) for row in plan.choices
    ]
    assert max(everywhere) == everywhere[0]


def test_the_fewest_gpus_answer_the_requests_and_one_replica_less_does_not() -> None:
    job, limits = Job("qwen3-8b", gpu="l40s"), Limits(requests=12.0, first=4.0)
    plan = plan_serving(job, GIVEN, {"tp": (1, 2), "pp": (1,)}, limits)
    best = plan.choices[0]
    assert best.requests >= 12
    for row in plan.choices:
        replicas = row.answer.asked.replicas
        assert row.answer.gpus >= best.answer.gpus
        assert row.requests * (replicas - 1) / replicas < 12
        assert row.first <= 4


def test_the_command_says_it_and_its_command_reproduces_it() -> None:
    line = "plan qwen3-8b --gpu l40s --gpus 2 --task generate --context 2048 --answer 256 --pp 1"
    assert typed(line).out.startswith("ANSWERS MOST")
    best = document(f"{line} --json")["choices"][0]
    again = document(f"{best['command'].removeprefix('loadgauge ')} --json")
    assert again["memory"]["total"] == best["memory"]["total"]
    assert again["mean_token"] == best["token_seconds"]
    assert typed(f"{line} --max-tpot 1us").code == 1


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("--find seq-len --context 4096", "asks for what --context states"),
        ("--find link", "seq-len (the longest context), batch, gpus or gpu"),
        ("--zero 3", "cannot be searched with --task generate; leave it out"),
        ("--max-ttft 3GiB", "--max-ttft"),
    ],
)
def test_what_does_not_go_together_is_refused(line: str, word: str) -> None:
    said = typed(f"plan qwen3-8b --gpu l40s --gpus 2 --task generate {line}")
    assert said.code == 2
    assert word in said.err


def test_without_a_number_of_gpus_it_finds_the_fewest_or_asks_for_one() -> None:
    job = Job("qwen3-8b", gpu="l40s")
    plan = plan_serving(job, {"context": 2048}, {}, Limits())
    assert "--find" in plan.assumed
    assert plan.choices[0].job == plan_serving(job, {"context": 2048}, {}, Limits(), "gpus").choices[0].job
    with pytest.raises(ConfigError, match="--find gpus"):
        plan_serving(job, {}, {}, Limits(), "batch")
    assert "as of --task generate" in typed("plan qwen3-8b --gpu l40s --gpus 2 --max-ttft 2s").err


def test_the_cheapest_kind_of_gpu_is_that_of_a_plan_of_each() -> None:
    """Money of an hour with requests, of a request without; one that does not do it is named with the reason."""
    prices = {"h100-sxm5-80gb": 2.5, "l4": 0.7, "l40s": 0.9, "gtx1080ti": 0.1}
    listed = ",".join(f"{name}={price}" for name, price in prices.items())
    for line, limits, gpus in (
        ("--requests 8 --max-tpot 40ms", Limits(token=0.04, requests=8.0), None),
        ("--gpus 2 --max-tpot 40ms", Limits(token=0.04), 2),
    ):
        told = document(f"plan qwen3-8b --task generate --context 2048 --answer 256 {line} --prices {listed} --json")
        costs = {}
        for name, price in prices.items():
            try:
                plan = plan_serving(Job("qwen3-8b", gpu=name, gpus=gpus), GIVEN, {}, limits)
            except Error:
                continue
            if plan.choices:
                hourly = price * plan.choices[0].answer.gpus
                costs[name] = hourly if gpus is None else hourly / plan.choices[0].requests
        best = told["choices"][0]
        assert len(costs) > 1
        assert best["gpu"] == min(costs, key=costs.__getitem__)
        each = best["money_per_hour"] / (1 if gpus is None else best["requests_per_second"])
        assert each == pytest.approx(costs[best["gpu"]], rel=1e-9)
        assert {line.partition(":")[0] for line in told["left_out"]} == {*prices} - {*costs}
    said = typed(f"plan qwen3-8b --task generate --requests 8 --prices {listed} --gpu l4")
    assert "asks for what --gpu states" in said.err
    assert "--prices" in typed("plan qwen3-8b --task generate --requests 8 --find gpu --price 2").err


def test_without_times_no_limit_is_kept() -> None:
    """A card whose links over nodes nobody states has no times there, and answers no requests."""
    plan = plan_serving(Job("llama-3.1-70b", gpu="l4"), {"context": 2048}, {}, Limits(requests=1.0))
    assert all(row.answer.token for row in plan.choices)
