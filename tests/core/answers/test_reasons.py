"""Reasons: every formula shown gives its value with the numbers in it, and every value is the estimate's own."""

from __future__ import annotations

from typing import Any

import pytest

from command_line import document, typed
from loadgauge.core.answers.why.of_estimate import TOPICS
from loadgauge.core.answers.why.reason import arithmetic, line
from theory import CASES

RUN = (
    "estimate llama-3.1-70b --gpu h100-sxm5-80gb --gpus 64 --tp 8 --pp 4 --sequence-parallel --global-batch 128 --tokens 1T"
    " --price 2 --days 30 --recompute selective"
)
OTHERS = {
    "zero": "estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 16 --zero 3 --seq-len 2048",
    "cp": "estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --cp 4 --seq-len 32768",
    "ep": "estimate mixtral-8x7b --gpu h100-sxm5-80gb --gpus 16 --ep 8 --global-batch 32",
    "host": "estimate gpt2 --gpu h100-sxm5-80gb --seq-len 128",
    "recompute": "estimate gpt2-xl --gpu a100-sxm4-80gb --recompute full --seq-len 1024",
}


def explained(command: str, topic: str) -> dict[str, Any]:
    found: dict[str, Any] = document(f"{command} --explain {topic}")
    return found


@pytest.mark.parametrize("topic", TOPICS)
def test_formulas_give_their_values(topic: str) -> None:
    found = explained(OTHERS.get(topic, RUN), topic)
    reason = found["explain"]
    for one in reason["lines"]:
        assert one["letters"], one["what"]
        assert arithmetic(one["numbers"]) == pytest.approx(one["value"], rel=1e-6), one["what"]
        assert all(name in one["letters"] for name in one["legend"])
    time = found["time"]
    whole = {
        "flops": found["flops"]["hardware_per_step"], "time": time["step"], "mfu": time["mfu"],
        "money": time["cost"], "energy": time.get("energy_kwh"), "verdict": found["memory"]["total"],
    }  # fmt: skip
    lane = topic.removesuffix("-time")
    if topic in whole:
        assert reason["value"] == whole[topic]
    elif lane in time["parts"]:
        assert reason["value"] == time["parts"][lane]
    elif topic != "network":
        assert 0 < reason["value"] < time["step"]


def test_kinds_of_operations_make_up_the_compute() -> None:
    found = [explained(RUN, kind)["explain"]["value"] for kind in ("matmul", "attention", "memory-bound")]
    parts = document(RUN)["time"]["parts"]
    assert sum(found) == pytest.approx(sum(parts[lane] for lane in ("forward", "backward", "recompute", "loss")))


def test_a_formula_that_does_not_hold_is_not_shown() -> None:
    legend = {"a": ("", 2.0), "b": ("", 3.0)}
    assert line("", "a*b", 6.0, "", legend).letters == "a*b"
    assert line("", "a*b", 6.06, "", legend).letters == ""
    with pytest.raises(ValueError, match="no arithmetic"):
        arithmetic("__import__('os')")


@pytest.mark.parametrize("size", ["13B", "65B", "175B"])
def test_data_parallel_demand_is_that_of_the_worked_cases(size: str) -> None:
    """Article 3's: 16-bit gradients over one adapter a GPU, 5 % of 6 P FLOPs at 150 TFLOP/s."""
    i = CASES[f"A3-TRAF-{size}-TPCALLS"]["inputs"]
    name = {"13B": "llama-13b", "65B": "llama-65b", "175B": "megatron-gpt-175b"}[size]
    gpus = i["t"] * i["p"] * i["d"]
    line = (
        f"network {name} --gpu a100-sxm4-80gb --gpus {gpus} --tp {i['t']} --pp {i['p']} --seq-len {i['s']}"
        f" --global-batch {i['B']} --achieved 150TFLOP/s --overlap none"
    )
    found = document(f"{line} --explain dp")
    closed = next(one for one in found["lines"] if one["what"].startswith("closed form"))
    assert 8 * closed["value"] / 1e9 == pytest.approx(CASES[f"A3-BW-S3-{size}-DP"]["computed"])


@pytest.mark.parametrize(
    ("axis", "command"),
    [
        ("tp", f"network {RUN.partition(' ')[2].partition(' --tokens')[0]}"),
        ("pp", f"network {RUN.partition(' ')[2].partition(' --tokens')[0]}"),
        ("cp", OTHERS["cp"].replace("estimate", "network")),
        ("ep", OTHERS["ep"].replace("estimate", "network")),
    ],
)
def test_what_an_axis_needs(axis: str, command: str) -> None:
    reason, whole = document(f"{command} --explain {axis}"), document(command)
    needs = [need for need in whole["needs"] if need["axis"] == axis]
    assert reason["value"] in [pytest.approx(need["needed"]) for need in needs]
    for one in reason["lines"]:
        assert arithmetic(one["numbers"]) == pytest.approx(one["value"], rel=1e-6), one["what"]


def test_what_cannot_be_explained_is_said() -> None:
    for command, said in (
        ("estimate gpt2 --explain time", "--gpu"),
        (f"{OTHERS['zero']} --explain bubble", "no bubble"),
        (f"{OTHERS['zero']} --explain money", "--tokens"),
        (f"{RUN} --explain tp --at peak", "--at"),
        ("network llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --explain tp", "tp sends nothing"),
    ):
        found = typed(command)
        assert found.code == 2
        assert said in found.err


@pytest.mark.parametrize(
    ("job", "part", "named", "peak"),
    [
        # NVIDIA's data sheets, dense [FLOP/s]
        ("llama-2-7b --gpu a100-sxm4-80gb --precision fp32", "mfu", "float32 peak of a GPU", 19.5e12),
        ("llama-2-7b --gpu a100-sxm4-80gb --precision fp32", "matmul", "float32 peak", 19.5e12),
        ("llama-2-7b --gpu a100-sxm4-80gb", "mfu", "16-bit peak of a GPU", 312e12),
        (
            "llama-3.1-8b --gpu h100-sxm5-80gb --framework megatron --precision fp8",
            "mfu",
            "16-bit peak of a GPU",
            989e12,
        ),
        ("llama-3.1-8b --gpu h100-sxm5-80gb --framework megatron --precision fp8", "matmul", "fp8 peak", 1979e12),
        ("llama-3.1-8b --gpu h100-sxm5-80gb --framework megatron", "matmul", "16-bit peak", 989e12),
    ],
)
def test_a_peak_is_named_by_its_format(job: str, part: str, named: str, peak: float) -> None:
    found = typed(f"estimate {job} --explain {part}").out
    (line,) = {" ".join(line.split()) for line in found.splitlines() if line.strip().startswith("X = ")}
    assert line.startswith(f"X = {peak:,.0f}: {named}")
