"""Tokens of prompts and answers where nothing says them: what the model's context, the engine's and `--seq-len` leave room for."""

from __future__ import annotations

import pytest

from loadgauge.core.base.errors import ConfigError
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.posttrain import resolve_posttrain


def lengths(name: str, task: str = "grpo", **given: object) -> tuple[int, int]:
    sequences = resolve_posttrain(Job(model=name, task=task, gpus=8, zero=3, **given))[0].sequences  # type: ignore[arg-type]
    return sequences.prompt, int(sequences.answers.longest)


@pytest.mark.parametrize("task", ["grpo", "ppo", "rloo"])
def test_a_model_of_a_short_context_has_shorter_answers(task: str) -> None:
    """Pythia has 2,048 positions, Llama 2 4,096."""
    assert lengths("pythia-2.8b", task) == (512, 1536)
    assert lengths("llama-2-13b", task) == (1024, 3072)
    assert sum(lengths("tinyllama-1.1b", task, prompt_len=300)) == 300 + 2048 - 300


def test_a_sequence_is_a_prompt_and_its_answer() -> None:
    assert lengths("qwen3-4b", seq_len=2048) == (512, 1536)
    assert lengths("qwen3-4b", seq_len=8192, prompt_len=500) == (500, 7692)
    assert lengths("qwen3-4b", rollout="vllm:context=3000") == (750, 2250)
    assert lengths("qwen3-4b") == (1024, 3072)
    with pytest.raises(ConfigError, match="already"):
        lengths("qwen3-4b", seq_len=2048, prompt_len=512, answers="512")
