"""The figures add up to the numbers of the estimate, for layouts of every kind."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from command_line import document
from loadgauge.core.answers.figure import figures
from loadgauge.core.answers.figures.lanes import COMPUTE, KINDS
from loadgauge.core.answers.figures.memory_phases import ROWS
from loadgauge.core.answers.figures.schedule import STAGES, flights, playable
from loadgauge.core.answers.figures.treemap import Node
from loadgauge.core.base.errors import Error
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.memory.ledger import NOT_ITEMISED
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.families.catalogue import models
from loadgauge.core.resolve.resolve import resolve_job
from loadgauge.page.inputs.flags import job_of
from loadgauge.page.inputs.uploads import Uploads
from loadgauge.page.panels.reasons import find, reason
from serving import LARGE, LLAMA, SMALL

PANELS = {each.name: each.data for each in figures()}
MODELS = ("llama-3.1-8b", "mixtral-8x7b", "deepseek-v3", "gpt2", "gemma-2-9b", "nemotron-h-8b", "bert-base")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-2p", "zb-v", "dualpipe", "dualpipev")


def runs(count: int, seed: int) -> Iterator[Job]:
    """Random runs that exist."""
    draw, found = random.Random(seed), 0
    assert set(MODELS) <= set(models())
    while found < count:
        pp, tp = draw.choice((1, 2, 4, 8)), draw.choice((1, 2, 4))
        flags: dict[str, Any] = {
            "model": draw.choice(MODELS), "gpus": tp * pp * draw.choice((1, 2, 4)), "tp": tp, "pp": pp,
            "seq_len": draw.choice((512, 1024)), "micro_batch": draw.choice((1, 2)), "zero": draw.choice((0, 1, 2, 3)),
            "global_batch": draw.choice((16, 32, 64)), "sequence_parallel": tp > 1 and draw.random() < 0.6,
            "recompute": draw.choice(("none", "selective", "full", "full:every=2", "full:group=2", "attention")),
            "gpu": draw.choice(("h100-sxm5-80gb", "a100-sxm4-80gb", None)), "mtp": draw.random() < 0.1,
            "framework": draw.choice((None, "huggingface", "megatron", "torchtitan", "deepspeed")),
            "precision": draw.choice((None, None, "fp8", "fp32")), "offload": draw.choice((None, None, "optimizer", "all")),
            "loss": draw.choice((None, "chunked")), "attention": draw.choice((None, "eager")),
            "lora_rank": draw.choice((None, None, 8)), "ep": draw.choice((None, 2)), "cp": draw.choice((None, None, None, 2)),
        }  # fmt: skip
        if flags["cp"]:
            flags["gpus"] *= 2
        if pp > 1:
            flags["schedule"] = draw.choice(SCHEDULES)
            flags["vpp"] = 2 if flags["schedule"] == "interleaved" else None
        job = Job(**flags)
        try:
            resolve_job(job).estimate()
        except Error:
            continue
        found += 1
        yield job


def estimated(job: Job) -> Estimate:
    return resolve_job(job).estimate()


CASES = [*runs(40, 7)]


@pytest.fixture(params=CASES, ids=lambda job: f"{job.model} {job.flags()}"[:90])
def result(request: pytest.FixtureRequest) -> Estimate:
    return estimated(request.param)


def leaves(node: Node) -> Iterator[Node]:
    if not node["children"]:
        yield node
    for child in node["children"]:
        yield from leaves(child)


def test_every_byte_is_on_the_treemap_once(result: Estimate) -> None:
    parts = result.memory.parts
    found = PANELS["treemap"](result)
    assert {node["part"]: node["bytes"] for node in found} == {part: parts[part] for part in PARTS if parts[part]}
    ids = Counter[str]()

    def check(node: Node) -> None:
        ids[node["id"]] += 1
        assert node["bytes"] > 0, node
        assert node["label"] != NOT_ITEMISED, node
        if node["children"]:
            assert sum(child["bytes"] for child in node["children"]) == pytest.approx(node["bytes"], rel=1e-12), node[
                "id"
            ]
        for child in node["children"]:
            assert child["id"].startswith(f"{node['id']}/")
            check(child)

    for node in found:
        check(node)
    assert max(ids.values()) == 1


def test_tensors_on_the_treemap_are_those_of_the_explanation(result: Estimate) -> None:
    """A block of a layer is so many times what the explanation says one layer keeps."""
    told: dict[tuple[str, str], float] = {(one.layer, one.name): one.nbytes
                                          for one in result.explain("activations").tensors}  # fmt: skip
    found = next((node for node in PANELS["treemap"](result) if node["part"] == "activations"), None)
    for layer in () if found is None else found["children"]:
        name = layer["id"].removeprefix("activations/")
        times = {leaf["bytes"] / told[name, leaf["label"]] for leaf in leaves(layer) if leaf["id"].count("/") == 3}
        if times:
            assert max(times) == pytest.approx(min(times))
            assert layer["bytes"] == pytest.approx(
                max(times) * sum(size for key, size in told.items() if key[0] == name)
            )


def test_the_curve_of_memory_has_its_peak_at_the_peak(result: Estimate) -> None:
    memory = result.memory
    found = PANELS["moments"](result)
    totals = [sum(row[1:]) for row in found["curve"]["rows"]]
    assert max(totals) <= memory.total * (1 + 1e-9)
    if result.layout.schedule != "gpipe" or result.layout.num_microbatches <= found["curve"]["microbatches_shown"]:
        assert max(totals) == pytest.approx(memory.total, rel=1e-9)
        assert found["curve"]["reaches_peak"]
    assert [point["parts"] for point in found["points"]] == [moment.parts for moment in memory.moments]
    times = [row[0] for row in found["curve"]["rows"]]
    assert times == sorted(times)
    # Whatever is in flight at the highest point is gone at the end.
    assert found["curve"]["rows"][-1][1 + PARTS.index("activations")] == 0


def test_lanes_add_up_to_the_step(result: Estimate) -> None:
    time, found = result.time, PANELS["lanes"](result)
    if time is None:
        assert found is None
        return
    assert sum(lane["seconds"] for lane in found) == pytest.approx(time.step, rel=1e-12)
    exposed = [span for lane in found for span in lane["spans"] if not span["hidden"]]
    assert exposed[0]["start"] == 0
    for before, after in itertools.pairwise(exposed):
        assert after["start"] == before["end"]
    assert exposed[-1]["end"] == pytest.approx(time.step)
    for lane in found:
        if lane["lane"] not in KINDS:
            assert lane["seconds"] == time.parts[lane["lane"]]
    # The operations' own seconds come to the compute of the step, without being made to.
    own = sum(one.each for one in result.workings.operations) * result.workings.passes
    assert own == pytest.approx(sum(time.parts[lane] for lane in COMPUTE), rel=1e-9)


def test_the_schedule_is_played_as_the_estimate_plays_it(result: Estimate) -> None:
    found, layout = PANELS["schedule"](result), result.layout
    done: dict[int, list[Any]] = defaultdict(list)
    for stage, start, end, kind, microbatch, chunk, live in found["cells"]:
        done[stage].append((start, end, kind, microbatch, chunk, live))
    assert sorted(done) == found["stages_shown"]
    assert len(found["stages_shown"]) == min(layout.pp, STAGES)
    for cells in done.values():
        ordered = sorted(cells)
        assert all(after[0] >= before[1] - 1e-12 for before, after in itertools.pairwise(ordered))
        # What is done forward is done backward, once.
        once = Counter((microbatch, chunk) for _, _, kind, microbatch, chunk, _ in cells if kind == "F")
        back = Counter((microbatch, chunk) for _, _, kind, microbatch, chunk, _ in cells if kind in ("B", "BW"))
        assert once == back
        assert set(once.values()) == {1}
        assert len({microbatch for microbatch, _ in once}) * layout.copies >= found["microbatches_shown"]
    assert found["seconds"] == pytest.approx(max(cell[2] for cell in found["cells"]))
    if result.time is not None:
        few = msgspec.structs.replace(layout, global_batch=found["microbatches_shown"] * layout.dp * layout.micro_batch)
        clock = result.workings.step
        before, clock.layout = clock.layout, few
        total, _ = clock.pipeline_seconds(clock.by_stage, clock.send_seconds())
        clock.layout = before
        # The step model goes on from three rounds by the slowest stage, which is exact within 2 %.
        assert found["seconds"] == pytest.approx(total, rel=0.02)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1"])
def test_stages_hold_as_many_micro_batches_as_the_papers_say(schedule: str) -> None:
    """In the middle of the pipeline: min(m, p - r), m, and with v chunks 2 (p - r - 1) + (v - 1) p + 1 of them."""
    flags = {"vpp": 2} if schedule == "interleaved" else {}
    job = Job(model="llama-3.1-8b", gpus=4, pp=4, schedule=schedule, global_batch=12, seq_len=512, **flags)
    result = estimated(job)
    found = PANELS["schedule"](result)
    for stage in (1, 2):
        layers = 32 // 4 // (2 if flags else 1)
        one = result.workings.memory.of_layers({(0, False): layers}).kept + result.workings.memory.shared
        wanted = {"1f1b": 4 - stage, "gpipe": 12, "interleaved": 2 * (4 - stage - 1) + 4 + 1, "zb-h1": 4}[schedule]
        most = max(cell[6] for cell in found["cells"] if cell[0] == stage)
        if schedule == "zb-h1":
            # What W still needs is less than what B freed with the rest.
            assert one * (4 - stage) <= most <= one * wanted
        else:
            assert most == one * wanted


def test_the_roof_is_not_broken_through(result: Estimate) -> None:
    found, time = PANELS["roofline"](result), result.time
    if time is None:
        assert found is None
        return
    roof = max(found["peak"], found["low_peak"] or 0)
    for point in found["points"]:
        assert point["achieved"] <= roof * (1 + 1e-9), point
        assert point["bytes"] == 0 or point["intensity"] == point["flops"] / point["bytes"]
    steps = sum(point["step_seconds"] for point in found["points"])
    assert steps <= sum(time.parts[lane] for lane in COMPUTE) * (1 + 1e-9)
    if result.workings.memory.prediction is None:
        assert steps == pytest.approx(sum(time.parts[lane] for lane in COMPUTE))


@pytest.mark.parametrize("state", [LLAMA, SMALL, {**LLAMA, "zero": "3", "framework": "torchtitan"}])
def test_the_network_is_that_of_the_command(state: dict[str, Any]) -> None:
    kept = Uploads()
    given = job_of(state, kept)
    kept.close()
    found = PANELS["network"](given.estimate())
    told = document(f"network {state['model']} {given.job.flags()}")["needs"]
    assert len(found) == len(told)
    for row, need in zip(found, told, strict=True):
        assert (row["axis"], row["what"], row["link"], row["ok"]) == (
            need["axis"],
            need["what"],
            need["link"],
            need["enough"],
        )
        assert (row["need"], row["have"], row["bytes_per_step"]) == (need["needed"], need["bandwidth"], need["carried"])


def test_a_schedule_too_long_to_draw_says_so() -> None:
    kept = Uploads()
    given = job_of(LARGE, kept)
    kept.close()
    found = PANELS["schedule"](given.estimate())
    assert found["shown"] == "16 of 64 micro-batches"
    assert len(found["cells"]) == 16 * 16 * 2


def test_many_chunks_are_drawn_in_fewer_micro_batches() -> None:
    job = Job(model="llama-3.1-405b", gpus=4, pp=2, vpp=63, schedule="interleaved", global_batch=128, seq_len=512)
    result = estimated(job)
    found = PANELS["schedule"](result)
    assert found["microbatches_shown"] == 10
    assert len(found["cells"]) == 10 * 63 * 2 * 2
    curve = PANELS["moments"](result)["curve"]
    assert len(curve["rows"]) <= ROWS + 2
    assert max(sum(row[1:]) for row in curve["rows"]) == pytest.approx(result.memory.total, rel=1e-9)


def test_flights_end_with_nothing_in_the_air(result: Estimate) -> None:
    played = result.workings.play(playable(result.layout, 8), timed=result.time is not None)
    for stage in range(result.layout.pp):
        events = [event for event in played.timeline if event.stage == stage]
        held, work = flights(played.order, stage)
        assert [piece[:3] for piece in work] == [event[1:4] for event in events]
        last, (whole, waiting) = events[-1], held[work[-1][-1]]
        left = [*whole, *waiting]
        assert sum(left) == (last.kind in ("B", "BW")) + (last.kind == "W")
        assert min(value for flight in held for part in flight for value in part) >= 0


@pytest.mark.parametrize("part", PARTS)
def test_an_explanation_has_the_numbers_of_the_command(part: str) -> None:
    kept = Uploads()
    given = job_of(LLAMA, kept)
    kept.close()
    result = given.estimate()
    found = reason(given, result, part)
    told = document(f"estimate {given.job.model} {given.job.flags()} --explain {part} --at peak")["explain"]
    assert found["value"] == told["total"]
    assert [(step["what"], step["value"]) for step in found["steps"]] == [
        (step["what"], step["nbytes"]) for step in told["steps"]
    ]
    assert [one["name"] for one in found["tensors"]] == [one["name"] for one in told["tensors"]]
    assert [one["text"] for one in found["sources"]] == told["sources"]
    assert [one["letters"] for one in found["formulas"]] == [
        one["letters"] for one in told["formulas"] if one["letters"]
    ]
    for formula in found["formulas"]:
        # The formula with the numbers put in is the number.
        assert eval(formula["letters"], {"__builtins__": {}}, formula["numbers"]) == pytest.approx(formula["value"])


def test_every_block_can_be_asked_for() -> None:
    kept = Uploads()
    given = job_of({**LLAMA, "recompute": "selective"}, kept)
    kept.close()
    result = given.estimate()
    blocks = [leaf for node in PANELS["treemap"](result) for leaf in (node, *leaves(node))]
    for block in blocks[:: max(1, len(blocks) // 12)]:
        found = reason(given, result, block["id"])
        assert found["value"] == block["bytes"]
        assert find(PANELS["treemap"](result), block["id"]) == block
    tensor = reason(given, result, "activations/layer run again in backward/mlp.down")
    assert [one["name"] for one in tensor["tensors"]] == ["mlp.multiply"]
