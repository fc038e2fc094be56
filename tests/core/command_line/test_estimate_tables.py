"""`estimate --table`: operations, weights, FLOPs and kept tensors, whose sums are the estimate's own figures."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from command_line import document, typed

MEGATRON = "--framework megatron --attention eager"
ONE_GPU = (  # Megatron-LM would pad the vocabulary
    "estimate gpt2 --attention eager",
    "estimate gpt2 --micro-batch 2 --global-batch 8 --recompute full",
    "estimate llama-3.2-1b --recompute full --seq-len 512",
    "estimate mixtral-8x7b --seq-len 512",
    "estimate deepseek-v3 --seq-len 512 --mtp",
)


def total(line: str, table: str) -> dict[str, float]:
    found: dict[str, float] = document(f"{line} --table {table}")["total"]
    return found


@pytest.mark.parametrize("line", ONE_GPU)
def test_sums_are_the_figures_of_the_estimate(line: str) -> None:
    whole = document(line)
    assert total(line, "weights")["elements"] == whole["model"]["params"]
    batches = whole["layout"]["num_microbatches"]
    flops = {name: batches * value for name, value in total(line, "flops").items()}
    assert flops["forward"] == whole["flops"]["forward_per_step"]
    assert flops["forward"] + flops["input_gradient"] + flops["weight_gradient"] == whole["flops"]["model_per_step"]
    assert sum(flops.values()) == whole["flops"]["hardware_per_step"]
    rows = total(line, "operations")
    assert rows["kept"] == total(line, "activations")["kept"]
    assert rows["weights"] == whole["model"]["params"]
    assert batches * (rows["forward"] + rows["backward"] + rows["recomputed"]) == whole["flops"]["hardware_per_step"]


def test_ranks_share_the_work() -> None:
    alone = f"estimate gpt2-xl {MEGATRON}"
    shared = f"{alone} --tp 5 --gpus 5"
    names = {"forward", "input_gradient", "weight_gradient"}
    one, five = (total(line, "flops") for line in (alone, shared))
    # All products of a layer are shared out, and the head's over the vocabulary, which Megatron-LM pads.
    assert all(one[name] / 5 <= five[name] < 1.02 * one[name] / 5 for name in names)
    assert total(shared, "operations")["sent"] > 0 == total(alone, "operations")["sent"]


def test_a_layer_of_the_paper_operation_by_operation() -> None:
    """6bsh^2, 2bs^2h, 2bs^2h, 2bsh^2 and twice 8bsh^2 (Narayanan et al.); 11bsh + 5abs^2, 19bsh and 4bsh kept (Korthikanti)."""
    b, s, h, a = 1, 1024, 768, 12
    rows = {row["operation"]: row for row in document(f"estimate gpt2 {MEGATRON} --table operations")["rows"]}
    forward = {name: row["forward"] for name, row in rows.items() if row["layer"] == "layer" and row["forward"]}
    assert forward == {
        "attention.qkv": 6 * b * s * h * h, "attention.scores": 2 * b * s * s * h, "attention.context": 2 * b * s * s * h,
        "attention.output": 2 * b * s * h * h, "mlp.up": 8 * b * s * h * h, "mlp.down": 8 * b * s * h * h,
    }  # fmt: skip
    kept = {
        part: sum(row["kept"] for name, row in rows.items() if row["layer"] == "layer" and name.startswith(part))
        for part in ("attention.", "mlp.")
    }
    statistics = 2 * 4 * b * s  # of each norm, mean and deviation, which the paper neglects
    # Each half with the norm before it.
    assert kept == {
        "attention.": 13 * b * s * h + 5 * a * b * s * s + statistics, "mlp.": 21 * b * s * h + statistics,
    }  # fmt: skip


@pytest.mark.parametrize("table", ["operations", "weights", "flops", "activations"])
def test_csv_and_json_say_the_same(table: str) -> None:
    line = f"estimate gpt2 --table {table}"
    rows = list(csv.DictReader(io.StringIO(typed(f"{line} --csv").out)))
    plain: list[dict[str, Any]] = document(line)["rows"]
    assert rows == [{name: str(value) for name, value in row.items()} for row in plain]
    out = typed(line).out
    assert out.count("\n") > len(rows)
    assert "all, each times its number" in out


def test_products_multiply_to_the_flops() -> None:
    for row in document(f"estimate gpt2 {MEGATRON} --table flops")["rows"]:
        flops = 0
        for product in row["products"].split("; "):
            text = product.replace(",", "").replace("(", " ").replace(")", " ").replace("x", " ")
            *batch, m, k, again, n = (int(word) for word in text.split())
            assert k == again
            flops += 2 * m * k * n * (batch[0] if batch else 1)
        assert flops == row["forward"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--table flops --explain weights", "explain"),
        ("--table flops --csv --json", "exclude"),
        ("--table flops --plot x.svg", "plot"),
        ("--table bytes", "table"),
    ],
)
def test_two_answers_at_once_are_refused(flags: str, said: str) -> None:
    found = typed(f"estimate gpt2 {flags}")
    assert found.code == 2
    assert said in found.err


def test_the_exit_code_is_the_verdict() -> None:
    line = "estimate llama-3.1-8b --gpu rtx4090 --table weights"
    assert typed(line).code == typed(f"{line} --json").code == 1
    assert json.loads(typed(f"{line} --json").out)["name"] == "weights"
