"""`loadgauge fleet`: the limits against the planner, sites, queues, sweeps, and what it prints and refuses."""

import json
import math

import msgspec
import pytest

from loadgauge.core.base.errors import ConfigError, LayoutError
from loadgauge.core.command_line.main import run as command
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.fleets.fleet import Options, fleet, hosts_of, replica, slowest, state_bytes, steady
from loadgauge.fleets.load import loads, together
from loadgauge.fleets.queue import Want, pack
from loadgauge.fleets.simulate import closed_form
from loadgauge.fleets.sites import Sites, across, local, most, on_one_site
from loadgauge.fleets.what_if import best_interval, best_spares, changed, most_oversubscription

JOB = Job(
    model="llama-3.1-70b", gpu="h100-sxm5-80gb", gpus=4096, tp=8, pp=4, zero=1, sequence_parallel=True, global_batch=1024,
    seq_len=8192,
)  # fmt: skip
STEP = resolve_job(JOB).estimate()
WORDS = ["llama-3.1-70b", *JOB.words(), "--tokens", "1T", "--runs", "40"]


@pytest.fixture(scope="module")
def base():
    return fleet(STEP, "1T", Options(runs=60, failures="llama3"), price=2.0)


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = command(["fleet", *words])
    found = capsys.readouterr()
    return code, found.out + found.err


# -- limits ------------------------------------------------------------------------------------------------------------


def test_without_failures_it_is_the_planners_step() -> None:
    found = fleet(STEP, 1e12, Options(failures="none", checkpoint="none", spares="0", runs=3))
    alone = 1e12 / STEP.time.tokens * STEP.time.step
    assert found.outcome.seconds == pytest.approx(alone, rel=1e-12)
    assert found.tokens_per_second == pytest.approx(STEP.time.tokens / STEP.time.step, rel=1e-12)
    assert found.goodput[1] == pytest.approx(1, rel=1e-12)
    # On a topology whose tiers are all at full speed the step is that of the flat network.
    on_rails = resolve_job(JOB.replace(topology="rail")).estimate()
    assert on_rails.time.step == pytest.approx(STEP.time.step, rel=1e-12)


def test_simulation_and_closed_form_agree(base) -> None:
    for changes in ({}, {"spares": "0"}, {"checkpoint": "sync:1h"}, {"recover": "elastic"}, {"machines": "1%"}):
        found = fleet(STEP, "15T", msgspec.structs.replace(base.options, runs=60, **changes))
        assert float(found.outcome.goodput.mean()) == pytest.approx(closed_form(found.run), abs=0.008)


def test_bytes_of_a_checkpoint() -> None:
    """Megatron's mixed precision: 2 of the weight, 4 of the master, 4 and 4 of the moments."""
    assert state_bytes(STEP) == pytest.approx(14 * STEP.params, rel=1e-12)


def test_a_checkpoint_of_adapters() -> None:
    """r (in + out) of each product of Llama 3.1 8B, 32 layers, however they are split; the base is on disk already."""
    wide, narrow, inner = 4096, 1024, 14336
    count = 32 * 16 * (2 * (wide + wide) + 2 * (wide + narrow) + 3 * (wide + inner))
    # PEFT wholly in bf16, moments too; Megatron's weights, masters and moments
    for layout, states in (({"zero": 3}, 2 + 2 + 2), ({"tp": 2, "pp": 2}, 2 + 4 + 4 + 4)):
        tuned = Job(model="llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=64, lora_rank=16, lora_targets="all", **layout)
        found = resolve_job(tuned).estimate()
        assert state_bytes(found) == pytest.approx(states * count, rel=1e-12)


def test_replicas() -> None:
    assert replica(STEP) == 32
    alone = JOB.replace(pp=None, tp=None, sequence_parallel=None, zero=3, global_batch=4096, framework="torchtitan")
    shared = resolve_job(alone).estimate()
    assert replica(shared) == 4096
    options = Options(recover="elastic", spares="0", repair="10d", failures="llama3")
    assert steady(STEP, options) < steady(STEP, Options(recover="elastic", spares="3%", failures="llama3"))


def test_the_slowest_machine() -> None:
    """The largest of n normal values, by drawing them."""
    import numpy as np

    drawn = np.random.default_rng(0).normal(0, 0.01, (4000, 512)).max(axis=1)
    low, high = slowest(0.01, 512)
    assert low == pytest.approx(np.quantile(drawn / (1 - drawn), 0.1), rel=0.02)
    assert high == pytest.approx(np.quantile(drawn / (1 - drawn), 0.9), rel=0.02)


def test_loads_are_the_bytes_that_the_step_sends() -> None:
    """On the first tier beyond the node, what the adapters carry by the estimate itself."""
    found = resolve_job(JOB.replace(topology="fat-tree-4to1")).estimate()
    first, *_ = listed = loads(found)
    sent = {}
    for row in found.network:
        if row.adapter:
            sent[row.axis] = sent.get(row.axis, 0) + row.adapter * row.calls_per_step
    assert first.axes == pytest.approx(sent, rel=1e-9)
    assert [load.tier for load in listed] == ["leaf", "spine"]
    ends = together(listed)
    assert max(ends.values()) >= first.carried / first.bandwidth * 0.999


# -- sites -------------------------------------------------------------------------------------------------------------


def test_local_steps_send_once_a_round() -> None:
    sites = Sites(sites=4, inner_steps=100, between=50e9)
    found = local(STEP, sites)
    part = on_one_site(STEP, 4)
    assert found.sent == pytest.approx(STEP.params * 4 * 2 * 3 / 4)
    assert found.compute == pytest.approx(100 * part.time.step)
    assert found.tokens_per_second == pytest.approx(
        4 * 100 * part.time.tokens / (found.compute + found.sent / 50e9), rel=1e-12
    )
    late = local(STEP, msgspec.structs.replace(sites, stale=True))
    assert late.shown == 0
    assert local(STEP, msgspec.structs.replace(sites, stale=True, between=late.needed)).shown == pytest.approx(
        0, abs=1e-6
    )
    slower = local(STEP, msgspec.structs.replace(sites, stale=True, between=late.needed / 2))
    assert slower.shown == pytest.approx(slower.compute)
    alone = local(STEP, Sites(sites=1, between=1.0))
    assert alone.ratio == pytest.approx(1, rel=1e-12)


def test_sites_of_unequal_speed() -> None:
    found = local(STEP, Sites(sites=2, inner_steps=100, between=1e15, speeds=(1.0, 0.5)))
    assert found.steps == (100, 50)
    assert found.waiting == pytest.approx(0, abs=1e-9)
    assert found.ratio == pytest.approx(0.75, rel=0.01)
    with pytest.raises(LayoutError, match="3 sites"):
        local(STEP, Sites(sites=3, between=1.0))


def test_one_job_over_sites_needs_far_more() -> None:
    sites = Sites(sites=2, between=100e9)
    hsdp, pipeline = across(STEP, sites)
    assert hsdp.sent == pytest.approx(STEP.params * 4)
    assert hsdp.needed > 100 * local(STEP, sites).needed
    # Two bytes of each activation, there and back.
    assert pipeline.sent == pytest.approx(2 * 2 * 1024 * 8192 * 8192)
    assert most(STEP, Sites(sites=2, between=100e9, inner_steps=500), 0.01)[0] >= 4
    assert most(STEP, Sites(sites=2, between=1e6, inner_steps=1), 0.01)[0] == 1


# -- questions ---------------------------------------------------------------------------------------------------------


def test_inverse_questions(base) -> None:
    every, tried = best_interval(base)
    assert dict(tried)[every] == max(share for _, share in tried)
    spares, rows = best_spares(base.again(runs=20))
    assert min(hours for _, _, hours in rows) == {row[0]: row[2] for row in rows}[spares]
    assert 0 < spares < 50
    names = {change.what for change in changed(base.again(runs=20))}
    assert {"no spares", "checkpoints in the memory of peers"} <= names
    with pytest.raises(ConfigError, match="topology"):
        most_oversubscription(base, 0.01)
    tree = fleet(resolve_job(JOB.replace(topology="rail")).estimate(), "1T", Options(runs=2, failures="none"))
    factor, steps = most_oversubscription(tree, 0.01)
    assert [step for _, step in steps] == sorted(step for _, step in steps)
    assert factor >= 1


def test_a_queue_keeps_its_policy() -> None:
    """No more GPUs than there are at any time; priority first; backfilling delays nobody."""
    import random

    draw = random.Random(3)
    wants = [
        Want(
            name=str(n),
            gpus=draw.randint(1, 60),
            days=draw.uniform(1, 9),
            priority=draw.randint(0, 2),
            comes=draw.uniform(0, 20),
        )
        for n in range(40)
    ]
    found = pack(wants, 64)
    assert len(found.slots) == 40
    for slot in found.slots:
        assert sum(one.gpus for one in found.slots if one.start <= slot.start < one.end) <= 64
        want = wants[int(slot.name)]
        assert slot.start >= want.comes
        assert slot.end == pytest.approx(slot.start + want.days)
    assert found.used == pytest.approx(sum(w.gpus * w.days for w in wants) / 64 / found.days)
    first = pack(
        [Want(name="a", gpus=60, days=5), Want(name="big", gpus=64, days=1), Want(name="long", gpus=4, days=9)], 64
    )
    assert {slot.name: slot.start for slot in first.slots} == {"a": 0, "big": 5, "long": 6}
    assert pack(wants, 128).days <= found.days
    with pytest.raises(ConfigError, match="asks for"):
        pack(wants, 8)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_answer(capsys) -> None:
    code, text = ask(capsys, *WORDS, "--topology", "rail", "--price", "2", "--what-if")
    assert code == 0
    for words in (
        "DAYS",
        "80 % of runs",
        "interruptions",
        "GPU-hours",
        "Next:",
        "Where the time goes",
        "leaf",
        "What if",
    ):
        assert words in text
    code, text = ask(capsys, *WORDS, "--json", "--seed", "3")
    plain = json.loads(text)
    assert sum(plain["shares"].values()) == pytest.approx(1)
    assert plain["days"]["p10"] <= plain["days"]["p50"] <= plain["days"]["p90"]
    assert plain == json.loads(ask(capsys, *WORDS, "--json", "--seed", "3")[1])
    for topic in (
        "days",
        "goodput",
        "failures",
        "checkpoint",
        "tokens-per-second",
        "energy",
        "restarting",
        "idle-spares",
    ):
        code, text = ask(capsys, *WORDS, "--explain", topic)
        assert code == 0, text
        assert "Rule:" in text


WHOLE = ("--tp", "1", "--pp", "1")  # stated, as an open layout is filled in until it fits


def test_a_step_that_does_not_fit_is_no_run(capsys) -> None:
    words = ("llama-3.1-70b", "--gpu", "h100", "--gpus", "64", "--zero", "1", "--tokens", "1T", "--runs", "3", *WHOLE)
    code, text = ask(capsys, *words)
    assert code == 1
    assert "DOES NOT FIT" in text
    code, text = ask(capsys, *words, "--json")
    assert code == 1
    assert json.loads(text)["memory"]["verdict"] == "does not fit"


def test_circuit_switches_replace_a_block(capsys) -> None:
    """A spare block is in the place of a broken one as fast as the switches turn."""
    tpu = Job(
        model="llama-3.1-8b", gpu="tpu-v4", gpus=512, zero=3, global_batch=512, seq_len=4096, topology="tpu-v4-ocs"
    )
    found = fleet(resolve_job(tpu).estimate(), "1T", Options(runs=2))
    assert found.run.recovery.swap.middle == 10.0
    assert found.again(swap="5min").run.recovery.swap.middle == 300.0


def test_other_answers(capsys, tmp_path) -> None:
    assert "OF ONE SITE" in ask(capsys, *WORDS, "--sites", "2", "--between", "100Gbit/s")[1]
    assert "SITE" in ask(capsys, *WORDS, "--find", "sites", "--between", "100Gbit/s")[1]
    assert "SPARE HOSTS" in ask(capsys, *WORDS, "--find", "spares")[1]
    assert "EVERY" in ask(capsys, *WORDS, "--find", "checkpoint-interval")[1]
    assert "tiers" in ask(capsys, *WORDS, "--topology", "rail", "--explain", "tiers")[1]
    kept = tmp_path / "cells.jsonl"
    sweep = (*WORDS, "--sweep", "spares=0,1%", "--output", str(kept))
    assert "2 simulated now" in ask(capsys, *sweep)[1]
    assert "0 simulated now" in ask(capsys, *sweep)[1]
    jobs = tmp_path / "jobs.toml"
    jobs.write_text('gpus = 64\n[[jobs]]\nname = "a"\ngpus = 64\ndays = 2\n[[jobs]]\ngpus = 16\ndays = 1\n')
    code, text = ask(capsys, "--jobs", str(jobs))
    assert code == 0
    assert "3.0 DAYS" in text
    assert "tenth more" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--spares", "-1"), "not below 0"),
        (("--spares", "-2%"), "not below 0"),
        (("--checkpoint", "async:400d"), "longer than the run"),
        (("--failures", "lama3"), "llama3"),
        (("--topology", "raill"), "rail"),
        (("--topology", "rail", "--nic-bandwidth", "50GB/s"), "by --topology"),
        (("--storage", "2TB"), "bandwidth"),
        (("--sites", "3", "--between", "1GB/s"), "3 sites"),
        (("--between", "1GB/s"), "needs --sites"),
        (("--find", "oversubscription"), "needs --topology"),
        (("--explain", "luck"), "luck"),
        (("--output", "x"), "needs --sweep"),
        (("--failures", "1h"), "no progress"),
        (("--storage", "2"), "storage: cannot read '2'"),
        (("--detect", "soon"), "(units: s, ms, us, min, h, d)"),
        (("--checkpoint", "none:5min"), "none has no interval"),
        (("--machines", "90%"), "does not move"),
        (("--find", "checkpoint-interval", "--failures", "none"), "nothing fails"),
        (("--find", "checkpoint-interval", "--checkpoint", "async:5min"), "searches"),
        (("--find", "spares", "--spares", "2%"), "searches"),
        (("--find", "spares", "--slack", "0.1"), "slack: needs"),
        (("--find", "spares", "--price", "2"), "price: does not affect"),
        (("--sites", "2", "--between", "1GB/s", "--what-if"), "combined with --sites"),
        (("--sites", "2", "--between", "1GB/s", "--find", "spares"), "combined with --sites"),
        (("--sites", "2", "--between", "1GB/s", "--spares", "2%"), "spares: does not affect --sites"),
        (("--find", "sites", "--between", "1GB/s", "--failures", "llama3"), "failures: does not affect --find sites"),
        (("--explain", "money"), "--price"),
    ],
)
def test_bad_input_is_one_line(capsys, words: tuple[str, ...], said: str) -> None:
    code, text = ask(capsys, *WORDS, *words)
    assert code == 2
    assert said in text
    assert text.count("\n") == 1


def test_a_fleet_searches_a_layout_where_some_structures_have_none(capsys) -> None:
    """A structure without a layout has an empty batch, whose places are indices too."""
    assert command(["fleet", "llama-3.1-8b", "--gpu", "h100", "--gpus", "64", "--tokens", "1T", "--brief"]) == 0
    assert "DAYS  llama-3.1-8b" in capsys.readouterr().out


@pytest.mark.slow
def test_the_planner_weighs_what_a_failing_host_takes_with_it(capsys) -> None:
    """With every host long away and no spares, a smaller replica wins over a faster step; with spares the fastest step does."""
    words = ["plan", "llama-3.1-8b", "--gpu", "h100", "--gpus", "512", "--global-batch", "512", "--seq-len", "8192"]
    words += ["--vpp", "1", "--recompute", "none", "--micro-batch", "1", "--cp", "1,2", "--zero", "1", "--json"]
    chosen = []
    for how in ("spares=0,repair=60d,failures=llama3", "spares=5%,failures=none"):
        assert command([*words, "--objective", "goodput", "--fleet", how]) == 0
        chosen.append(json.loads(capsys.readouterr().out)["layouts"][0])
    assert command(words) == 0
    fastest = json.loads(capsys.readouterr().out)["layouts"][0]
    assert chosen[1]["time"]["step"] == pytest.approx(fastest["time"]["step"], rel=1e-9)

    def size(one: dict) -> int:
        return math.prod(one["layout"][name] for name in ("tp", "pp", "cp"))

    assert size(chosen[0]) <= size(chosen[1])
    assert command([*words, "--fleet", "spares=0"]) == 2


def test_a_run_that_says_no_layout_has_the_best_of_all(capsys) -> None:
    """Bounds rule whole groups of layouts out, so that some batches of the search are empty."""
    words = ["llama-3.2-1b", "--gpu", "h100", "--gpus", "64", "--tokens", "1B", "--runs", "5", "--json"]
    assert command(["fleet", *words]) == 0
    assert json.loads(capsys.readouterr().out)["goodput"]["p50"] > 0.5


def test_a_plan_asks_the_same_about_its_best_layout(capsys) -> None:
    words = [
        "llama-3.1-8b",
        "--gpu",
        "h100",
        "--gpus",
        "512",
        "--global-batch",
        "512",
        "--seq-len",
        "8192",
        "--framework",
        "megatron",
        "--tokens",
        "5T",
    ]
    narrow = ["--tp", "1", "--pp", "1", "--cp", "1", "--zero", "2", "--micro-batch", "1", "--recompute", "none"]
    for question, more in (("spares", "failures=llama3"), ("checkpoint-interval", "failures=llama3,checkpoint=sync"),
                           ("sites", "between=100Gbit/s,inner_steps=200")):  # fmt: skip
        assert command(["plan", *words, *narrow, "--find", question, "--fleet", more, "--json"]) == 0
        planned = json.loads(capsys.readouterr().out)
        own = [word for pair in more.split(",") for word in ("--" + pair.replace("_", "-").replace("=", " ")).split()]
        recover = [] if question == "sites" else ["--recover", "elastic"]
        layout = ["--zero", "2", "--micro-batch", "1", "--recompute", "none"]
        assert command(["fleet", *words, *layout, *own, *recover, "--find", question, "--json"]) == 0
        alone = json.loads(capsys.readouterr().out)
        key = {"checkpoint-interval": "every"}.get(question, question)
        assert planned[key] == pytest.approx(alone[key], rel=0.1)
    for wrong in (["--find", "spares"], ["--find", "spares", "--tokens", "1T", "--fleet", "between=1GB/s"]):
        assert command(["plan", *words[:-2], *narrow, *wrong]) == 2


def test_spares() -> None:
    assert hosts_of("1%", 100_000, 8) == 125


def test_power_caps_and_machines_slow_the_steps(base) -> None:
    """The cube of the frequency: at 72.9 % of the power, compute runs at 90 %."""
    capped = base.again(runs=2, power_cap="72.9%", failures="none", checkpoint="none", spares="0")
    compute = sum(STEP.time.parts[name] for name in ("forward", "backward", "recompute", "loss"))
    expected = (STEP.time.step + compute * (1 / 0.9 - 1)) / STEP.time.step
    assert capped.outcome.seconds / capped.run.work == pytest.approx(expected, rel=1e-9)
    assert capped.watts == pytest.approx(0.729 * STEP.time.tdp)


def test_the_page_simulates_the_same_run() -> None:
    pytest.importorskip("starlette", reason="the page needs the extra `web`")
    from loadgauge.page.inputs.uploads import Uploads
    from loadgauge.page.panels.fleet import OfFleet, answer

    flags = {
        name.replace("_", "-"): str(value)
        for name in JOB.__struct_fields__
        if (value := getattr(JOB, name)) is not None
    }
    uploads = Uploads()
    try:
        found = answer(OfFleet(flags=flags | {"sequence-parallel": "true", "tokens": "2T"}, failures="llama3"), uploads)
        with pytest.raises(ConfigError, match="alone"):
            answer(OfFleet(flags=flags, failures="mine.toml"), uploads)
    finally:
        uploads.close()
    assert sum(found["bins"]["counts"]) == 300
    own = fleet(STEP, "2T", Options(failures="llama3", runs=300))
    assert found["days"]["p50"] == own.days[1]
    json.dumps(found)


def test_a_step_that_may_run_out_is_tight_and_not_said_to_be_too_large(capsys) -> None:
    words = [
        "llama-3.1-8b",
        "--gpu",
        "h100",
        "--gpus",
        "8",
        "--tokens",
        "1B",
        "--runs",
        "5",
        "--zero",
        "3",
        "--recompute",
        "full",
    ]
    found = resolve_job(Job("llama-3.1-8b", gpu="h100", gpus=8, zero=3, recompute="full")).estimate().memory
    assert found.verdict == "fits"
    for words_of, said in ((f"{found.total * 1.02:.0f}B", "IS TIGHT"), (f"{found.total * 0.5:.0f}B", "DOES NOT FIT")):
        code, text = ask(capsys, *words, "--memory", words_of)
        assert (code, f"THE STEP {said}" in text) == (1, True)


def test_a_run_over_sites_takes_its_tokens_at_their_rate_and_costs_its_gpu_hours(capsys) -> None:
    words = [*WORDS[:-2], "--sites", "2", "--between", "1GB/s", "--price", "2", "--json"]
    code, text = ask(capsys, *words)
    plain = json.loads(text)
    assert code == 0
    assert plain["days_without_failures"] == pytest.approx(1e12 / plain["tokens_per_second"] / 86_400)
    assert plain["cost"] == pytest.approx(2 * 4096 * 24 * plain["days_without_failures"])


def test_a_run_shorter_than_a_step_is_refused(capsys) -> None:
    code, text = ask(capsys, *WORDS[:-4], "--tokens", "1000")
    assert (code, "of one step" in text) == (2, True)
