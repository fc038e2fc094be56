"""An evaluation of transformers' Llama on the simulated device, and what the estimate says of it, to 1 %."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadgauge import estimate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from loadgauge.pytorch.trace.programs.script import FunctionJob  # noqa: E402
from loadgauge.pytorch.trace.trace import record  # noqa: E402

SEQUENCES, TOKENS, KEPT = 4, 256, 3


def config(**sizes: int) -> Any:
    """A small Llama."""
    return transformers.LlamaConfig(
        num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False, **sizes
    )  # fmt: skip


WIDE_HEAD = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 16384}
WIDE_LAYER = {"hidden_size": 512, "intermediate_size": 8192, "vocab_size": 64}


def traced(sizes: dict[str, int], run: Any) -> int:
    """Bytes beside the weights at the peak of what a model does without gradients."""

    def job() -> None:
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM._from_config(config(**sizes), dtype=torch.bfloat16).eval()
        tokens = torch.zeros(SEQUENCES, TOKENS, dtype=torch.long, device="cuda")
        with torch.no_grad():
            run(model, tokens)

    peak = record(FunctionJob(job), "cuda", steps=0).stream.peak()
    return peak.total - peak.categories["weights"]


def told(tmp_path: Path, sizes: dict[str, int], name: str, **flags: Any) -> float:
    """What the estimate holds beside the model states at a moment around the step [bytes]."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config(**sizes).to_dict()), encoding="utf-8")
    memory = estimate(str(file), seq_len=TOKENS, eval_batch=SEQUENCES, precision="bf16-pure", **flags).memory
    return float(next(moment.parts["evaluation"] for moment in memory.moments if moment.name == name))


def test_the_loss_of_an_evaluation(tmp_path: Path) -> None:
    measured = traced(WIDE_HEAD, lambda model, tokens: model(input_ids=tokens, labels=tokens, use_cache=False))
    assert told(tmp_path, WIDE_HEAD, "evaluation: loss") == pytest.approx(measured, rel=0.01)


def test_a_layer_of_an_evaluation(tmp_path: Path) -> None:
    measured = traced(WIDE_LAYER, lambda model, tokens: model(input_ids=tokens, use_cache=False))
    assert told(tmp_path, WIDE_LAYER, "evaluation: forward of a layer") == pytest.approx(measured, rel=0.01)


def test_logits_that_the_trainer_keeps(tmp_path: Path) -> None:
    from transformers.trainer_pt_utils import EvalLoopContainer

    def run(model: Any, tokens: Any) -> None:
        kept = EvalLoopContainer(do_nested_concat=True)
        for _ in range(KEPT):
            kept.add(model(input_ids=tokens, use_cache=False).logits)

    measured = traced(WIDE_HEAD, run)
    assert told(tmp_path, WIDE_HEAD, "evaluation: logits joined", eval_batches=KEPT) == pytest.approx(
        measured, rel=0.01
    )


def test_the_cache_of_generation(tmp_path: Path) -> None:
    from transformers import DynamicCache

    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}

    def run(model: Any, tokens: Any) -> None:
        cache = DynamicCache(config=model.config)
        model(input_ids=tokens, past_key_values=cache, use_cache=True)
        for _ in range(2):
            model(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)

    layers, heads, width = 3, 4, 8
    measured = traced(sizes, run)
    cache = told(tmp_path, sizes, "generation: the last token", generate=2)
    # The cache, and the keys of one layer once more.
    one = 2 * SEQUENCES * (TOKENS + 2) * heads * width
    assert cache == 2 * layers * one + one
    assert measured >= 2 * layers * one
