"""Explanations: every printed total is the estimate's own number."""

from __future__ import annotations

import pytest

import loadgauge
from command_line import FITS, PIPELINE, document, typed
from loadgauge.estimate.apart import NOT_ITEMISED
from loadgauge.estimate.explain import explain
from loadgauge.estimate.memory import PARTS

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


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("line", EXPLAINED)
def test_explanations_add_up_to_the_table(line: str, part: str) -> None:
    found = document(f"{line} --explain {part}")
    told = found["explain"]
    assert told["total"] == found["memory"]["parts"][part]
    assert sum(step["nbytes"] for step in told["steps"]) == pytest.approx(told["total"], rel=1e-12)
    assert NOT_ITEMISED not in [step["what"] for step in told["steps"]]
    for formula in told["formulas"]:
        assert formula["letters"], "sizes that divide evenly have a formula"
        value = eval(formula["numbers"], {"Min": min, "Max": max, "ceiling": lambda x: -int(-x // 1)})
        assert value == formula["nbytes"]
    text = typed(f"{line} --explain {part}").out
    assert text.startswith(f"{part}: {told['total'] / 2**30:,.2f} GiB")


def test_tensors_add_up_to_the_formula() -> None:
    model = loadgauge.model("llama-3.1-8b")
    for recompute in ("none", "selective", "full", "mlp"):
        layout = loadgauge.Layout(seq_len=2048, recompute=loadgauge.RecomputePolicy.parse(recompute))
        told = explain(loadgauge.estimate(model, layout), "activations")
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
