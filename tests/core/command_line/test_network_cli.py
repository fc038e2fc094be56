"""The command `loadgauge network`: what it prints, its JSON document, its exit codes and what it refuses."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from command_line import document, typed

LINE = "network llama-3.1-70b --gpu h100-sxm5-80gb --gpus 64 --tp 8 --pp 2 --sequence-parallel --global-batch 256"
MIXTRAL = "network mixtral-8x7b --gpu h100-sxm5-80gb --gpus 64 --tp 2 --ep 8 --zero 1 --sequence-parallel"


@functools.cache
def answered(line: str) -> dict[str, Any]:
    return document(line)


def test_json() -> None:
    found = answered(LINE)
    for row in found["network"]:
        assert row.keys() >= {
            "axis", "collective", "calls_per_step", "payload", "wire", "link", "seconds", "exposed_seconds"
        }  # fmt: skip
        assert row["calls_per_microbatch"] * 64 in (row["calls_per_step"], 0)
    assert found["layout"]["num_microbatches"] == 64
    assert found["enough"] == all(each["enough"] for each in found["needs"])
    assert found["efficiency"] == pytest.approx(1 / (1 + found["exposed"] / found["compute"]["total"]))
    assert found["basis"]["bytes"] == "derived"
    assert found["basis"]["outer_bandwidth"] == "datasheet"
    assert {each["name"] for each in found["what_if"]} >= {"network x 2", "oversubscription 4"}
    assert set(found["limits"]) == {"largest_tp", "smallest_batch"}
    assert found["share"] == 0.05


def test_the_verdict_is_the_exit_code() -> None:
    generous, strict = typed(f"{LINE} --share 0.9"), typed(f"{LINE} --share 0.001")
    assert (generous.code, generous.out.split()[0]) == (0, "ENOUGH")
    assert (strict.code, strict.out[:10]) == (1, "NOT ENOUGH")
    assert " GB/s of the network's links and reaches " in strict.out.splitlines()[0]


def test_the_users_own_links() -> None:
    own = answered(f"{LINE} --nic-bandwidth 25GB/s --link-bandwidth 900GB/s")
    assert (own["fabric"]["outer_bandwidth"], own["fabric"]["inner_bandwidth"]) == (25e9, 900e9)
    assert own["basis"]["outer_bandwidth"] == own["basis"]["inner_bandwidth"] == "given"
    usual = answered(LINE)
    for mine, theirs in zip(own["needs"], usual["needs"], strict=True):
        assert (mine["link"] == "inner") == (mine["reached"] > theirs["reached"])
    assert "(yours)" in typed(f"{LINE} --nic-bandwidth 25GB/s").out


@pytest.mark.parametrize(
    "line",
    [
        LINE,
        MIXTRAL,
        "network llama-3.1-8b --gpu a100-sxm4-80gb --gpus 64 --zero 3 --oversubscription 4 --rails --pod 32",
    ],
)
def test_the_page_fits_the_terminal(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (80, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = typed(line).out.splitlines()
        assert max(len(each) for each in lines[1:]) <= width
        for title in ("What a GPU's links carry", "Every collective", "What if", "What these links allow"):
            assert any(each.startswith(title) for each in lines)


def test_one_gpu_has_nobody_to_talk_to() -> None:
    found = typed("network llama-3.1-8b --gpu a100-sxm4-80gb")
    assert (found.code, found.out.splitlines()[0]) == (0, "NOTHING TO CARRY  a single GPU does not communicate")
    assert answered("network llama-3.1-8b --gpu a100-sxm4-80gb")["network"] == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("network llama-3.1-8b", "gpu: is missing"),
        (f"{LINE} --share 1.5", "share: must be between 0 and 1"),
        (f"{LINE} --share 0", "must be a number above 0"),
        (f"{LINE} --achieved 150", "cannot read '150'"),
        (f"{LINE} --achieved 150GB/s", "achieved: must be a rate such as 150TFLOP/s"),
        (f"{LINE} --rails", "rails: needs --oversubscription"),
        (f"{LINE} --pod 32", "pod: needs --oversubscription"),
        (f"{LINE} --oversubscription 0.5", "oversubscription: must be at least 1"),
        (f"{LINE} --measured step=3s", "measured: rescales whole steps"),
        (f"{LINE} --price 2", "no such option"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(line: str, said: str) -> None:
    found = typed(line)
    assert (found.code, found.out) == (2, "")
    assert said in found.err
    assert found.err.count("\n") == 1


def test_the_order_of_the_axes_moves_traffic_between_links() -> None:
    line = "network llama-3.1-8b --gpu h100-sxm5-80gb --gpus 32 --tp 2 --pp 4 --global-batch 64"
    usual, pipelined = answered(line), answered(f"{line} --order tp,cp,pp,dp")
    links = [{row["axis"]: row["link"] for row in each["network"]} for each in (usual, pipelined)]
    assert links == [{"tp": "inner", "pp": "outer", "dp": "inner"}, {"tp": "inner", "pp": "inner", "dp": "outer"}]
    assert "in the order tp, cp, pp, ep, dp" in typed(f"{line} --order tp,cp,pp,dp").out
    for wrong in ("tp,cp", "tp,tp,cp,pp,dp", "x"):
        found = typed(f"{line} --order {wrong}")
        assert (found.code, "order: must name each of tp, cp, ep, dp, pp once" in found.err) == (2, True)


def test_replicas_keep_gathering_inside_the_node() -> None:
    line = "network llama-3.1-8b --gpu h100-sxm5-80gb --gpus 32 --zero 3 --framework torchtitan"
    found = answered(f"{line} --replicas 4")
    links = {(row["collective"], row["link"], row["ranks"]) for row in found["network"]}
    assert links == {("all_gather", "inner", 8), ("reduce_scatter", "inner", 8), ("all_reduce", "outer", 4)}
    refused = typed("network llama-3.1-8b --gpu h100-sxm5-80gb --gpus 32 --replicas 4")
    assert (refused.code, "replicas = 4: without ZeRO" in refused.err) == (2, True)
    uneven = typed(f"{line} --replicas 5")
    assert (uneven.code, "dp over replicas: 32 over 5 leaves 2" in uneven.err) == (2, True)


def test_gpus_without_a_fast_link_have_the_network_alone() -> None:
    line = "network llama-3.1-8b --gpu h100-sxm5-80gb --gpus 16 --gpus-per-node 1 --zero 3"
    found = answered(line)
    assert {row["link"] for row in found["network"]} == {"outer"}
    assert {each["name"] for each in found["what_if"]} == {
        "network x 2", "network x 0.5", "oversubscription 2", "oversubscription 4"
    }  # fmt: skip
    assert "connects" not in typed(line).out.splitlines()[2]


def test_no_tp_is_offered_where_there_is_none() -> None:
    allowed = typed("network llama-3.1-8b --gpu h100-sxm5-80gb --gpus 2 --pp 2").out.split("What these links allow")[1]
    assert "tp" not in allowed.split("Assumptions")[0]


def test_runs_side_by_side_are_each_what_it_is_alone() -> None:
    """Tensor parallelism of 3 over 64 GPUs is no run: it is named and the others are answered."""
    line = "network llama-3.1-8b --gpu h100-sxm5-80gb --gpus 64"
    wrong, *runs = document(f"{line} --sweep tp=3,4 --sweep zero=1,3")["cells"][1:]
    assert "tp 3" in wrong["error"]
    for cell in runs:
        alone = answered(cell["command"].removeprefix("loadgauge "))
        assert {name: alone[name] for name in ("step", "exposed", "enough", "needs")} == {
            name: cell[name] for name in ("step", "exposed", "enough", "needs")
        }
    table = typed(f"{line} --sweep tp=4,8")
    assert table.code == 1
    assert table.out.count("NOT ENOUGH") == 2
    assert typed(f"{line} --sweep tp=4 --explain dp").code == 2


PAIR = "network llama-3.1-8b --gpu h100 --gpus 16"


@pytest.mark.parametrize(
    "text",
    [
        "200Gbps",
        "200 Gb/s",
        "200gbit/s",
        "200gbps",
        "25GBps",
        "25GB/s",
        "25000MB/s",
        "HDR",
        "hdr",
        "200G",
        "200GbE",
        "0.2Tbps",
    ],
)
def test_an_adapter_is_as_fast_whatever_its_unit(text: str) -> None:
    assert "the network provides 25 GB/s" in " ".join(typed([*PAIR.split(), "--nic-bandwidth", text]).out.split())


def test_small_letters_are_no_bits_and_no_bytes() -> None:
    assert "cannot read '25gb/s'" in typed(f"{PAIR} --nic-bandwidth 25gb/s").err


def test_what_nccl_tests_print_is_read_as_people_type_it(tmp_path: Path) -> None:
    whole = typed(f"{PAIR} --busbw all_reduce=340GB/s:1GiB").out
    for text in ("all_reduce=340GB/s", "allreduce=340", "All-Reduce=340GBps:1GiB"):
        assert typed(f"{PAIR} --busbw {text}").out == whole, text
    rows = "#  Rank  0 on a\n#  Rank  1 on a\n 1073741824 268435456 float sum -1 4000.0 268.44 268.44 0 4000.0 268.44 268.44 0\n"
    file = tmp_path / "run.txt"
    file.write_text(rows)
    said = typed(f"{PAIR} --busbw all_reduce={file}").out
    assert typed(f"{PAIR} --busbw {file}").out == said  # a sum to all whose two bandwidths are equal: all-reduce of two
    file.write_text(f"# Collective test starting: all_reduce_perf\n{rows}")
    assert typed(f"{PAIR} --busbw {file}").out == said != whole


def test_dp_is_swept_by_its_gpus() -> None:
    assert "sweep gpus" in typed(f"{PAIR} --sweep dp=1,2").err


@pytest.mark.parametrize(
    ("word", "quantity"),
    [
        ("utilization", "utilisation"),
        ("zero_3", "states"),
        ("parameter-server", "parameter-servers"),
        ("speedup", "amdahl"),
    ],
)
def test_equations_by_the_words_that_people_type(word: str, quantity: str) -> None:
    assert typed(f"equation {word}").out == typed(f"equation {quantity}").out != ""


def test_a_parameter_server_sends_what_each_worker_fetches() -> None:
    """Two of m servers and eight workers: a server has half of the weights, and each worker fetches them."""
    assert document("equation collectives --numbers n=8,m=2")["equations"][-1]["with_numbers"] == "4"


@pytest.mark.parametrize(
    ("typed_so", "here"),
    [
        ("--find nic --exposed 5%", "--exposed 5% as --exposed 0.05"), ("--find nic --exposed 12%", "--exposed 0.12"),
        ("--margin 2GiB", "--margin 2GiB as --margin 2"), ("--show network", "--show network as --full"),
        ("--tokens 1T --mfu 45", "--mfu 45 as --mfu 45%"), ("--spot", "plan --find gpu --prices spot"),
    ],
)  # fmt: skip
def test_a_plan_takes_words_and_units_that_people_type(typed_so: str, here: str) -> None:
    assert here in " ".join(typed(f"plan gpt2 --gpu h100 --gpus 16 --global-batch 64 --tp 1 {typed_so}").err.split())


def test_what_is_enough_reaches_what_it_needs() -> None:
    for cell in document("network llama-3.1-8b --gpu h100 --gpus 64 --sweep tp=1,2,4 --sweep zero=1,3")["cells"]:
        for need in cell["needs"]:
            assert need["enough"] == (need["reached"] >= need["needed"] * (1 - 1e-9))


def test_a_layout_that_is_not_said_is_that_of_the_estimate() -> None:
    line = "deepseek-v3 --gpu h800-sxm5-80gb --gpus 2048"
    network, whole = answered(f"network {line}"), answered(f"estimate {line}")
    shared = ("dp", "tp", "pp", "ep", "zero")
    assert {name: network["layout"][name] for name in shared} == {name: whole["layout"][name] for name in shared}
    assert network["step"] == pytest.approx(whole["time"]["step"])
