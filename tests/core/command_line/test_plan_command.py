"""`loadgauge plan`: documents, exit codes, and what it says of nonsense."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import document, typed

SMALL = "plan llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --global-batch 8 --pp 1,2 --vpp 1,2 --cp 1 --replicas 1"
TOO_BIG = "plan llama-3.1-8b --gpu rtx4090 --global-batch 4 --seq-len 2048"


def test_the_document_has_the_promised_keys() -> None:
    found = document(SMALL)
    assert {"layouts", "pareto", "evaluated", "valid", "seconds"} <= set(found)
    steps = [layout["time"]["step"] for layout in found["layouts"]]
    assert steps == sorted(steps)
    assert found["evaluated"] > found["valid"] >= found["fitting"] > 0
    assert all(layout["memory"]["verdict"] != "does not fit" for layout in (*found["layouts"], *found["pareto"]))


def test_the_best_layout_is_an_estimate_that_can_be_typed() -> None:
    best = document(SMALL)["layouts"][0]
    layout = best["layout"]
    flags = [f"--{name} {layout[name]}" for name in ("tp", "pp", "zero")]
    flags += ["--sequence-parallel"] if layout["sequence_parallel"] else []
    line = (
        f"estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --global-batch 8 --framework megatron {' '.join(flags)}"
    )
    again = document(f"{line} --micro-batch {layout['micro_batch']} --recompute {layout['recompute']}")
    assert again["memory"]["total"] == best["memory"]["total"]
    assert again["time"]["step"] == best["time"]["step"]


def test_the_best_comes_first_and_the_second_is_explained() -> None:
    found = typed(SMALL)
    assert found.code == 0
    assert found.out.startswith("BEST  ")
    assert "Why the others are slower" in found.out
    assert not found.err


def test_nothing_that_fits_is_a_no_with_changes_that_hold() -> None:
    found = typed(TOO_BIG)
    assert found.code == 1
    assert found.out.startswith("NOTHING FITS")
    changes = typed(f"{TOO_BIG} --json")
    assert changes.code == 1
    import json

    told = json.loads(changes.out)
    assert told["missing"] > 0
    assert told["changes"]
    for change in told["changes"]:
        assert typed(f"{TOO_BIG} {change['flags']}").code == 0, change


@pytest.mark.parametrize("gpus", [8, 16])
def test_where_none_is_sure_to_fit_the_word_is_the_verdict_of_the_nearest(gpus: int) -> None:
    out = typed(f"plan llama-3.1-70b --gpu h100 --gpus {gpus} --pp 1 --tp {gpus} --recompute full").out
    line = next(line for line in out.splitlines() if line.strip().startswith("loadgauge estimate"))
    word = typed(line.strip().removeprefix("loadgauge ")).out.split("  ")[0]
    assert out.split("  ")[0] == {"DOES NOT FIT": "NOTHING FITS"}.get(word, word)
    assert typed(f"plan gpt2 --gpu h100 --gpus {gpus} --margin 78").out.startswith(
        "NOTHING FITS  no layout of gpt2 fits"
    )


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("plan llama-3.1-8b --gpu h100-sxm5-80gb --gpus 0", 2),
        ("plan llama-3.1-8b --gpus 8", 2),
        (f"{SMALL} --tp 3", 2),
        (f"{SMALL} --tp 16", 2),
        (f"{SMALL} --tp 8 --pp 4", 2),
        (f"{SMALL} --zero 4", 2),
        (f"{SMALL} --micro-batch 7", 2),
        (f"{SMALL} --schedule zigzag", 2),
        (f"{SMALL} --tp eight", 2),
        (f"{SMALL} --exposed 0.1", 2),
        (f"{SMALL} --prices h100-sxm5-80gb", 2),
        (f"{SMALL} --ep 2", 2),
        (f"{SMALL} --vpp 4 --schedule 1f1b", 2),
        (f"{SMALL} --stage-layers 1,2,3", 2),
        (f"{SMALL} --stage-layers 8,8,8,8", 2),
        (f"{SMALL} --cp-comm ring", 2),
        (f"{SMALL} --why-not tp=x", 2),
        (f"{SMALL} --why-not speed=3", 2),
        (f"{SMALL} --find seq-len --seq-len 4096", 2),
        (f"{SMALL} --find nic", 2),
        (f"{SMALL} --find seq-len --gpus 4,8", 2),
        (f"{SMALL} --find gpus --export trl", 2),
        ("plan foo --gpu h100-sxm5-80gb --find model", 2),
        ("plan gpt2 --gpu h100-sxm5-80gb --seq-len 4096", 2),
    ],
)
def test_nonsense_is_one_clear_line(line: str, code: int) -> None:
    found = typed(line)
    assert found.code == code
    assert len(found.err.strip().splitlines()) == 1
    assert "defect" not in found.err
    assert not found.out


FIND = "plan llama-3.1-8b --gpu h100-sxm5-80gb --global-batch 8 --pp 1 --cp 1 --tp 1,8 --replicas 1 --schedule 1f1b"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (f"{FIND} --gpus 8 --find seq-len --recompute full", "longest sequence that fits"),
        (
            "plan llama-3.2-1b --gpu h100-sxm5-80gb --seq-len 2048 --find micro-batch",
            "it is TIGHT",
        ),
        (f"{FIND} --gpus 8 --find gpus", "fewest GPUs on which it fits: "),
        (f"{FIND} --gpus 16 --global-batch 64 --find nic --exposed 0.9", "smallest adapter: "),
        (f"{FIND} --gpus 8 --find gpu --prices h100-sxm5-80gb=2,a100-sxm4-80gb=1", "for a billion tokens"),
        (f"{FIND} --gpus 8 --find gpu --prices h100-sxm5-80gb=2 --tokens 1B --days 30", "for all, in"),
        (
            f"{FIND.replace(' --gpu h100-sxm5-80gb', '')} --gpus 8 --prices h100=2,a100=1",
            "A100 SXM4 80GB at 1 a GPU-hour: ",
        ),
        (
            "plan qwen3 --gpu rtx4090 --qlora --global-batch 1 --micro-batch 1 --find model",
            "largest model that fits: qwen3-",
        ),
    ],
)
def test_questions_the_other_way_round_are_answered(line: str, text: str) -> None:
    found = typed(line)
    assert found.code == 0
    assert text in found.out
    answers = document(line)["answers"]
    assert all(one["best"]["memory"]["verdict"] != "does not fit" for one in answers)
    assert "value" in answers[0]


def test_why_a_layout_is_not_the_best() -> None:
    cannot = document(f"{SMALL} --why-not tp=3")["why_not"]
    assert "the GPUs divide over tp x cp x pp" in cannot[0]
    slower = document(f"{SMALL} --why-not tp=8")
    locked = document(f"{SMALL} --tp 8")["layouts"][0]
    more = locked["time"]["step"] / slower["layouts"][0]["time"]["step"] - 1
    assert f"({more:.1%}) slower" in slower["why_not"][0]
    full = document(f"{TOO_BIG} --qlora --why-not recompute=none --seq-len 4096")["why_not"]
    assert "fits" in full[0]


@pytest.mark.slow
def test_what_to_change_next_is_what_the_flags_give() -> None:
    job = f"{FIND} --gpus 8 --micro-batch 1"
    told = document(f"{job} --what-next")
    assert len(told["changes"]) > 5
    for change in told["changes"]:
        if "overlap" in change["flags"] or "--nic" in change["flags"]:
            continue
        again = document(f"{job} {change['flags']}")["layouts"][0]
        assert again["time"]["step"] == pytest.approx(change["step"], rel=1e-12), change["flags"]
        assert again["memory"]["total"] == change["memory"]["total"], change["flags"]


def test_one_consumer_gpu_is_enough_for_qlora(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(["200"] * 99 + ["2048"]))
    line = "plan qwen3-8b --gpu rtx4090 --qlora --global-batch 16"
    packed, ragged = document(f"{line} --seq-len 2048"), document(f"{line} --lengths {lengths}")
    for found in (packed, ragged):
        assert found["layouts"][0]["memory"]["verdict"] != "does not fit"
    # The longest batch decides what fits, the mean one how long it takes.
    assert ragged["fitting"] == packed["fitting"]
    assert ragged["layouts"][0]["time"]["step"] < 0.3 * packed["layouts"][0]["time"]["step"]
    eight = document(f"{line} --seq-len 2048 --optimizer adamw-8bit")
    assert eight["pareto"][-1]["memory"]["total"] < packed["pareto"][-1]["memory"]["total"]


def test_numbers_of_gpus_are_compared() -> None:
    found = document(f"{SMALL} --gpus 4,8 --objective money")
    assert {layout["layout"]["gpus"] for layout in found["layouts"]} <= {4, 8}
    cost = [layout["time"]["step"] * layout["layout"]["gpus"] for layout in found["layouts"]]
    assert cost == sorted(cost)


def test_the_short_answer_is_the_beginning_of_the_whole_one() -> None:
    line = "plan llama-3.2-1b --gpu h100-sxm5-80gb --gpus 2 --seq-len 2048 --global-batch 8"
    short, whole = (typed(f"{line} {flag}").out.splitlines() for flag in ("--brief", "--full"))
    assert len(short) <= 12
    assert short[:2] == whole[:2]
    assert "Assumptions" in "".join(whole)
    assert "Assumptions" not in "".join(short)


def test_a_deadline_is_in_days() -> None:
    late, days = (typed(f"{FIND} --tokens 1B {flag}") for flag in ("--deadline 9d", "--days 9"))
    assert (late.code, late.out) == (days.code, days.out)
    assert "taken: --deadline 9d as --days 9" in late.err


@pytest.mark.parametrize("find", ["batch-size", "context"])
def test_what_no_size_fits_says_what_would(find: str) -> None:
    """In words that people type for what is looked for; each change makes a layout of the smallest size fit."""
    line = "plan llama-3.1-8b --gpu rtx4090"
    said = typed(f"{line} --find {find}")
    assert said.code == 1
    ways = said.err.strip().rpartition("; fits with ")[2].split(" or ")
    assert len(ways) == 2
    for way in ways:
        assert typed(f"{line} --find {find} {way}").code == 0
