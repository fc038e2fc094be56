"""The document, the plain text and the page say the same numbers, for random jobs."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from command_line import typed
from loadgauge.core.answers.figures.lanes import COMPUTE, REST
from loadgauge.core.base.units import GIB, days_words
from loadgauge.page.inputs.uploads import Uploads
from loadgauge.page.server.handlers import Question, estimate as page_answer
from verdicts import violations

few = st.sampled_from([1, 1, 2, 4])


@st.composite
def jobs(draw: Any) -> dict[str, str]:
    """The flags of a run, as the page has them; nearly all of these runs exist."""
    tp, pp, dp, model = draw(few), draw(few), draw(few), draw(st.sampled_from(["llama-3.1-8b", "gpt2", "mixtral-8x7b"]))
    micro, many = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    flags: dict[str, Any] = {
        "model": model, "gpus": tp * pp * dp, "tp": tp, "pp": pp, "micro-batch": micro, "global-batch": micro * dp * pp * many,
        "seq-len": draw(st.sampled_from([512, 1024])), "zero": draw(st.sampled_from([0, 1] if pp > 1 else [0, 1, 2, 3])),
        "gpu": draw(st.sampled_from([None, "h100-sxm5-80gb", "a100-sxm4-80gb", "rtx4090"])),
        "recompute": draw(st.sampled_from([None, "selective", "full"])), "loss": draw(st.sampled_from([None, "chunked"])),
        "optimizer": draw(st.sampled_from([None, "sgd", "adamw-8bit"])), "offload": draw(st.sampled_from([None, "optimizer"])),
        "lora-rank": draw(st.sampled_from([None, None, 8])),
    }  # fmt: skip
    if tp > 1 and draw(st.booleans()):
        flags["sequence-parallel"] = "true"
    if model.startswith("mixtral") and dp > 1:
        flags["ep"] = dp
    if pp == 1 and tp == 1:
        flags["framework"] = draw(st.sampled_from([None, "huggingface", "torchtitan", "deepspeed", "megatron"]))
    if flags["gpu"] is not None and draw(st.booleans()):
        flags |= {"tokens": "1T", "price": "2.5"}
    return {name: str(value) for name, value in flags.items() if value is not None}


SCALES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15, "EFLOP": 1e18}


def quantity(text: str) -> float:
    """A number with its unit, in the base unit."""
    number, _, unit = text.partition(" ")
    return float(number.replace(",", "")) * SCALES[unit]


def rows_of(text: str, title: str) -> dict[str, list[str]]:
    """The rows of a table by their first cell."""
    lines = text.partition(f"\n{title}")[2].partition("\n\n")[0].splitlines()[3:]
    return {cells[0]: cells[1:] for cells in (re.split(r" {2,}", line.strip()) for line in lines)}


def gib(value: float, digits: int = 2) -> str:
    return f"{value / GIB:,.{digits}f}"


def agrees(text: str, found: dict[str, Any]) -> None:
    """Every figure of the plain text is the document's, to the digits that are printed."""
    memory, layout = found["memory"], found["layout"]
    first = text.splitlines()[0]
    figures = [gib(memory["total"], 1), *([] if memory["capacity"] is None else [gib(memory["capacity"], 1)])]
    assert re.findall(r"([\d,]+\.\d) GiB", first)[: len(figures)] == figures
    assert f"(stage {memory['rank']['stage']} of {layout['pp']})" in first
    assert first.endswith(f"range {gib(memory['low'], 1)}-{gib(memory['high'], 1)} GiB")
    _parts(rows_of(text, "Where every byte goes"), memory)
    moments = rows_of(text, "Through one step, in GiB")
    head = text.partition("\nThrough one step, in GiB")[2].splitlines()[1].split()[2:]
    assert len(moments) == len(memory["moments"])
    for moment, (name, cells) in zip(memory["moments"], moments.items(), strict=True):
        cells = [cell for cell in cells if cell != "<- peak"]
        assert name.removesuffix(" <- peak") == moment["name"]
        assert cells == [gib(sum(moment["parts"].values())), *(gib(moment["parts"][part]) for part in head)]
    if layout["pp"] > 1:
        (line,) = re.findall(r"\nPeak of each pipeline stage, in GiB\n(.*)\n", text)
        assert line.split() == [gib(nbytes, 1) for nbytes in memory["stages"]]
    if memory["host"]:
        assert f"Host memory: {gib(memory['host'])} GiB" in text
    (model_flops,) = re.findall(r"- model FLOPs: ([\d.,]+ \w+) ", text)
    (hardware,) = re.findall(r"- hardware FLOPs: ([\d.,]+ \w+),", text)
    assert quantity(model_flops) == pytest.approx(found["flops"]["model_per_step"], rel=6e-3)
    assert quantity(hardware) == pytest.approx(found["flops"]["hardware_per_step"], rel=6e-3)
    assert f" = {found['model']['params']:,} (" in text
    for flag, value in found["assumed"].items():
        assert f"{flag} {value}" in " ".join(text.split())
    for note in found["not_counted"]:
        assert f"{note[:1].lower()}{note[1:]}" in " ".join(text.split())
    _time(text, found)


def _parts(rows: dict[str, list[str]], memory: dict[str, Any]) -> None:
    assert rows["total"][0] == gib(memory["total"])
    if memory["capacity"] is not None:
        left = memory["capacity"] - memory["total"]
        assert rows["capacity"] == [
            gib(memory["capacity"]),
            f"{gib(abs(left))} GiB {'left' if left >= 0 else 'missing'}",
        ]
    for part, nbytes in memory["parts"].items():
        most = memory["largest"][part]["bytes"]
        assert (part in rows) == bool(most)
        if most:
            assert rows[part][:2] == [gib(nbytes), f"{nbytes / memory['total']:.1%}"]
            assert gib(most) in rows[part][2:4]


def _time(text: str, found: dict[str, Any]) -> None:
    time = found.get("time")
    assert ("Where the time of a step goes" in text) == (time is not None)
    if time is None:
        return
    told = " ".join(text.split())
    step, low, high, tokens, tflops, mfu, hfu = re.findall(
        r"A step takes ([\d.,]+ \w+) \(range ([\d.,]+ \w+) to ([\d.,]+ \w+)\): ([\d,]+) tokens/s/GPU, ([\d,]+) model"
        r" TFLOP/s/GPU, MFU ([\d.]+)%, HFU ([\d.]+)%",
        told,
    )[0]
    for text_, key in ((step, "step"), (low, "low"), (high, "high")):
        assert quantity(text_) == pytest.approx(time[key], rel=6e-3)
    assert tokens == f"{time['tokens_per_second_per_gpu']:,.0f}"
    assert tflops == f"{time['model_tflops_per_gpu']:,.0f}"
    assert (mfu, hfu) == (f"{time['mfu'] * 100:.1f}", f"{time['hfu'] * 100:.1f}")
    rows = rows_of(text, "Where the time of a step goes")
    lanes = {lane: value for lane, value in time["parts"].items() if value > 0}
    assert set(rows) - {"step"} >= set(lanes)
    for lane, value in {**lanes, "step": time["step"]}.items():
        assert float(rows[lane][0].replace(",", "")) == pytest.approx(value, rel=6e-4)
        assert rows[lane][1] == f"{value / time['step']:.1%}"
    if time.get("days") is not None:
        assert f"- {days_words(time['days'])}: " in text
        assert f"{time['gpu_hours']:,.0f} GPU-hours" in told
        assert f"cost: {time['cost']:,.0f} at" in told


def drawn_agrees(answer: dict[str, Any], found: dict[str, Any]) -> None:
    """Every figure of the page shows the document's numbers."""
    assert json.loads(json.dumps(answer["estimate"])) == found
    memory, panels = found["memory"], answer["panels"]
    blocks = {node["part"]: node["bytes"] for node in panels["treemap"]}
    assert blocks == {part: nbytes for part, nbytes in memory["parts"].items() if nbytes}
    assert panels["moments"]["capacity"] == memory["capacity"]
    points = [{"name": point["name"], "parts": point["parts"]} for point in panels["moments"]["points"]]
    assert points == [{"name": moment["name"], "parts": moment["parts"]} for moment in memory["moments"]]
    assert max(point["total"] for point in panels["moments"]["points"]) == pytest.approx(memory["total"])
    time = found.get("time")
    if time is None:
        assert not panels["lanes"]
        return
    lanes = {row["lane"]: row["seconds"] for row in panels["lanes"]}
    for lane in REST:
        assert lanes.get(lane, 0) == time["parts"].get(lane, 0)
    computing = sum(value for lane, value in lanes.items() if lane not in REST)
    assert computing == pytest.approx(sum(time["parts"][lane] for lane in COMPUTE))
    assert answer["ranges"]["step"] == [time["low"], time["high"]]


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(jobs())
def test_document_text_and_page_say_the_same(flags: dict[str, str]) -> None:
    words = [
        f"--{name}" if value == "true" else f"--{name}={value}" for name, value in flags.items() if name != "model"
    ]
    line = ["estimate", flags["model"], *words]
    printed = typed([*line, "--json"])
    assume(printed.code != 2)
    found = json.loads(printed.out)
    del found["schema"], found["outcomes"]  # of the command alone
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        text = typed(line)
    assert text.code == printed.code
    agrees(text.out, found)
    brief, allowed = typed([*line, "--brief"]), typed([*line, "--allow-tight", "--json"])
    for one in (text, brief):
        assert not violations(found["memory"], one.code, one.out.splitlines()[0])
    assert not violations(found["memory"], allowed.code, text.out.splitlines()[0], allow_tight=True)
    uploads = Uploads()
    answer = page_answer(Question(flags=dict(flags)), uploads)
    uploads.close()
    drawn_agrees(answer, found)
    assert answer["verdict"] == found["memory"]["verdict"]
    again = shlex.split(answer["command"])
    assert again[0] == "loadgauge"
    assert json.loads(typed([*again[1:], "--json"]).out)["memory"] == found["memory"]
