"""Explanations: every printed total is the estimate's own number."""

from __future__ import annotations

from typing import get_args

import pytest

import loadgauge
from command_line import FITS, PIPELINE, document, typed
from loadgauge.core.base.errors import ConfigError
from loadgauge.core.command_line.estimate import command
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.estimate.memory.ledger import NOT_ITEMISED
from loadgauge.core.estimate.memory.phases import PARTS
from loadgauge.core.estimate.result import Estimate, When
from loadgauge.core.resolve.resolve import resolve_job

EXPLAINED = [
    FITS,
    PIPELINE,
    "estimate gpt2 --optimizer adafactor --precision bf16-mixed-20",
    "estimate llama-3.1-8b --qlora --optimizer adamw-8bit",
    "estimate gemma-2-9b --gpus 4 --zero 2 --recompute full:every=2 --global-batch 16",
    "estimate gpt-neox-20b --gpus 16 --tp 2 --pp 2 --vpp 2 --schedule interleaved --global-batch 64"
    " --recompute selective",
    "estimate llama-3.1-8b --framework deepspeed --gpus 8 --zero 3 --offload all",
    "estimate qwen3-8b --gpus 8 --framework torchtitan --zero 3 --recompute full --loss chunked",
    "estimate bert-base --attention eager --recompute full:group=3",
    "estimate qwen3-8b --gpus 4 --pp 4 --schedule zb-h1 --global-batch 16 --recompute full",
    "estimate deepseek-v2-lite --gpus 2 --pp 2 --schedule dualpipe --global-batch 8 --recompute mlp.gate,mlp.dispatch"
    " --stage-layers 13,14",
]


def estimated(line: str) -> Estimate:
    """The estimate of a command line."""
    with command.make_context("estimate", line.split()[1:]) as context:
        flags = {name: value for name, value in context.params.items() if name in Job.__struct_fields__}
    return resolve_job(Job(**flags)).estimate()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("line", EXPLAINED)
def test_explanations_add_up_to_the_table(line: str, part: str) -> None:
    found = document(f"{line} --explain {part} --at peak")
    told = found["explain"]
    assert told["total"] == told["at_peak"] == found["memory"]["parts"][part]
    assert told["moment"] == told["peak"] == found["memory"]["moment"]
    assert sum(step["nbytes"] for step in told["steps"]) == pytest.approx(told["total"], rel=1e-12)
    assert NOT_ITEMISED not in [step["what"] for step in told["steps"]]
    for formula in told["formulas"]:
        assert formula["letters"], "sizes that divide evenly have a formula"
        value = eval(formula["numbers"], {"Min": min, "Max": max, "ceiling": lambda x: -int(-x // 1)})
        assert value == formula["nbytes"]
    text = typed(f"{line} --explain {part} --at peak").out
    assert text.startswith(f"{part}: {told['total']:,.0f} byte")


@pytest.mark.parametrize("line", [*EXPLAINED, "estimate deepseek-v3 --gpus 8 --ep 8 --mtp"])
def test_every_part_is_explained_at_every_moment(line: str) -> None:
    memory = document(line)["memory"]
    result = estimated(line)
    for part in PARTS:
        highest = max(moment["parts"][part] for moment in memory["moments"])
        assert memory["largest"][part]["bytes"] == highest
        assert result.explain(part, "largest").moment == memory["largest"][part]["moment"]
        for at in get_args(When):
            rest = ("forward", "loss", "step")
            there = [
                moment["parts"][part]
                for moment in memory["moments"]
                if moment["phase"] == at or (at == "backward" and moment["phase"] not in rest)
            ]
            wanted = {"peak": memory["parts"][part], "largest": highest}.get(at, max(there, default=None))
            if wanted is None:
                with pytest.raises(ConfigError, match=f"no moment in the phase '{at}'"):
                    result.explain(part, at)
                continue
            told = result.explain(part, at)
            assert told.total == wanted
            assert sum(step.nbytes for step in told.steps) == pytest.approx(told.total, rel=1e-12)
            assert NOT_ITEMISED not in [step.what for step in told.steps]
            assert (told.at_peak, told.at_largest) == (memory["parts"][part], highest)


LATE = "estimate llama-3.1-8b --gpu h100-sxm5-80gb --gpus 8 --zero 3 --recompute full --loss chunked --seq-len 2048"
"""Its peak is at the end of backward, when nearly all activations are gone."""


def test_a_part_that_is_gone_at_the_peak_is_explained_where_it_is_largest() -> None:
    memory, told = (document(f"{LATE} --explain activations")[key] for key in ("memory", "explain"))
    assert told["total"] == told["at_largest"] == memory["largest"]["activations"]["bytes"]
    assert told["total"] > 10 * told["at_peak"] == 10 * memory["parts"]["activations"]
    text = " ".join(typed(f"{LATE} --explain activations").out.split())
    assert text.startswith(f"activations: {told['total']:,.0f} byte ({told['total'] / 2**30:,.2f} GiB)")
    assert f"(where this part is largest). At the peak of the rank, during {memory['moment']}, it is" in text
    assert f"it is {told['at_peak'] / 2**30:,.2f} GiB (--at peak)" in text
    at_peak = " ".join(typed(f"{LATE} --explain activations --at peak").out.split())
    assert f"during {memory['moment']} (the peak of the rank). It is largest during {told['moment']}:" in at_peak
    assert "optimizer step" in typed(f"{LATE} --explain activations --at step").out
    assert "is of the whole step" in typed(f"{LATE} --at step --explain loss-time").err


@pytest.mark.parametrize("when", ["setup", "forward", "loss", "backward", "step", "peak"])
def test_a_moment_alone_is_all_that_is_held_then(when: str) -> None:
    """The parts are those of a moment of the document, and their sum is what it holds."""
    told = document(f"{LATE} --at {when}")
    rows = {what: nbytes for what, nbytes, _ in told["explain"]["rows"]}
    assert rows.pop("total") == pytest.approx(sum(rows.values()), rel=1e-12)
    if when == "peak":
        assert rows == {part: nbytes for part, nbytes in told["memory"]["parts"].items() if nbytes}
    held = [moment for moment in told["memory"]["moments"] if sum(moment["parts"].values()) == sum(rows.values())]
    assert {part: nbytes for part, nbytes in held[0]["parts"].items() if nbytes} == rows if held else when == "setup"


def test_the_table_shows_each_part_at_the_peak_and_where_it_is_largest() -> None:
    memory = document(LATE)["memory"]
    rows = [
        line.split() for line in typed(LATE).out.partition("Where every byte goes")[2].partition("\n\n")[0].splitlines()
    ]
    cells = {row[0]: row for row in rows if row}
    for part, most in memory["largest"].items():
        values = {moment["parts"][part] for moment in memory["moments"]}
        if not most["bytes"]:
            assert part not in cells
            continue
        when = (
            "always"
            if len(values) == 1
            else most["phase"]
            if most["phase"] in ("forward", "loss", "step")
            else "backward"
        )
        figures = cells[part][1:]
        assert figures[0] == f"{memory['parts'][part] / 2**30:,.2f}"
        assert figures[figures.index(when) - 1] == f"{most['bytes'] / 2**30:,.2f}"


def test_tensors_add_up_to_the_formula() -> None:
    model = loadgauge.model("llama-3.1-8b")
    for recompute in ("none", "selective", "full", "mlp"):
        layout = loadgauge.Layout(seq_len=2048, recompute=loadgauge.RecomputePolicy.parse(recompute))
        told = loadgauge.estimate(model, layout).explain("activations")
        assert told.formulas
        for formula in told.formulas:
            names = {
                tensor.layer
                for tensor in told.tensors
                if formula.what.startswith(f"bytes that one {tensor.layer} keeps")
            }
            assert len(names) == 1
            mine = [tensor for tensor in told.tensors if tensor.layer in names]
            assert sum(tensor.nbytes for tensor in mine) == formula.nbytes
            assert all(tensor.by for tensor in mine)
