"""`loadgauge plan`: documents, exit codes, and what it says of nonsense."""

from __future__ import annotations

import pytest

from command_line import document, typed

SMALL = "plan llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --global-batch 8 --pp 1,2 --cp 1 --replicas 1"
TOO_BIG = "plan llama-3.1-8b --gpu rtx4090 --global-batch 4 --seq-len 2048"


def test_the_document_has_the_promised_keys() -> None:
    found = document(SMALL)
    assert {"layouts", "pareto", "evaluated", "valid", "seconds"} <= set(found)
    steps = [layout["time"]["step"] for layout in found["layouts"]]
    assert steps == sorted(steps)
    assert found["evaluated"] > found["valid"] >= found["fitting"] > 0
    assert all(layout["memory"]["fits"] for layout in (*found["layouts"], *found["pareto"]))


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
    assert "Why others lost" in found.out
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
        ("plan gpt2 --gpu h100-sxm5-80gb --seq-len 4096", 2),
    ],
)
def test_nonsense_is_one_clear_line(line: str, code: int) -> None:
    found = typed(line)
    assert found.code == code
    assert len(found.err.strip().splitlines()) == 1
    assert "defect" not in found.err
    assert not found.out


def test_numbers_of_gpus_are_compared() -> None:
    found = document(f"{SMALL} --gpus 4,8 --objective money")
    assert {layout["layout"]["gpus"] for layout in found["layouts"]} <= {4, 8}
    cost = [layout["time"]["step"] * layout["layout"]["gpus"] for layout in found["layouts"]]
    assert cost == sorted(cost)
