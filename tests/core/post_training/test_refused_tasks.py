"""Flags of a task that contradict one another: one line, and nothing printed."""

from __future__ import annotations

import pytest

from command_line import document, typed

RUN = "estimate qwen2.5-7b --gpu h100-sxm5-80gb --gpus 8 --zero 3 --recompute full"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("grpo --rollout vllm:utilisation=0.5", "no option 'utilisation"), ("grpo --rollout vllm:utilization=1.5", "at most 1"),
        ("grpo --rollout vllm:tp=3", "not whole replicas of 3"), ("grpo --rollout hf --placement split:4+4", "in the trainer"),
        ("grpo --placement split:4+8", "4 + 8 GPUs are not the 8"), ("grpo --staleness -1", "--staleness"),
        ("grpo --answers exp:2000,1000000", "1,000,000 of an answer are more than the 131,072"),
        ("grpo --rollout vllm:max_model_len=3000 --answers 3000", "more than the 3,000 of the engine's context"),
        ("grpo --answers exp:1e9,1e12", "answers: must be at most 10,000,000 tokens, got 1e12"),
        ("grpo --answers 20_000_000", "answers: must be at most 10,000,000 tokens, got 20_000_000"),
        (f"grpo --answers {'9' * 5000}", "answers: must be at most 10,000,000 tokens, got 999"),
        ("grpo --answers -5", "must be a whole number of tokens above 0"),
        ("grpo --prompts 63 --samples 5 --micro-batch 3", "315 over 24 leaves 3"),
        ("dpo --loss-terms no-kl", "dpo has one form of its loss"), ("kto --loss-terms jsd", "kto has kl, no-kl, not jsd"),
        ("gkd --teacher gpt2 --on-policy 0.5", "needs --task opd"), ("opd --teacher gpt2 --on-policy 2", "1 at the most"),
        ("ppo --critic shared --critic-batch 2", "critic_batch"),
        ("grpo --rollout hf --explain sync", "no weights are handed over"),
    ],
)  # fmt: skip
def test_refused_in_one_line(flags: str, words: str) -> None:
    found = typed(f"{RUN} --task {flags}")
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert words in found.err


def test_what_is_only_trained_on_may_be_longer_than_the_context() -> None:
    """As without --task: rotary positions have no table, which gpt2 has; what an engine generates may not."""
    base = "estimate llama-2-7b --task dpo --qlora --gpu a6000"
    short, long = (document(f"{base} --seq-len {length}")["memory"]["total"] for length in (4096, 8192))
    assert long > short
    assert "table of 1024 positions" in typed("estimate gpt2 --task dpo --gpu a6000 --seq-len 8192").err


def test_a_rank_s_share_decides_the_largest_micro_batch() -> None:
    """512 sequences over 8 ranks are 64 each, which micro-batches of 3 do not make up."""
    found = typed(f"{RUN} --task grpo --micro-batch 3")
    assert found.code < 2
    assert "2 (a rank has 64 of the 512 sequences)" in " ".join(found.out.split())


def test_a_prompt_has_what_the_engine_s_context_leaves() -> None:
    found = typed(f"{RUN} --task grpo --answers 2048 --rollout vllm:max_model_len=2560,sleep=1")
    assert "512 + 2,048 tokens in the mean" in " ".join(found.out.split())


def test_a_form_of_a_loss_takes_away_what_it_does_not_run() -> None:
    """KTO's KL estimate is a pass of the policy, and one of the reference."""
    usual, without = (
        document(f"{RUN} --task kto --seq-len 1024 {flags}")["time"]["phases"] for flags in ("", "--loss-terms no-kl")
    )
    seconds = [{one["name"]: one["seconds"] for one in found} for found in (usual, without)]
    assert seconds[0].keys() - seconds[1].keys() == {"KL log-probs"}
    assert seconds[0]["reference"] == pytest.approx(2 * seconds[1]["reference"])
    assert seconds[0]["update"] == seconds[1]["update"]


def test_a_share_of_steps_generates() -> None:
    """A quarter of the steps has a quarter of the seconds of their answers, and the same memory."""
    run = f"{RUN} --task opd --loss-terms jsd --teacher qwen2.5-14b --answers 512 --rollout hf:batch=8"
    every, some = (document(f"{run} {flags}") for flags in ("", "--on-policy 0.25"))
    generated = [
        next(one["seconds"] for one in found["time"]["phases"] if one["name"] == "generate") for found in (every, some)
    ]
    assert generated[1] == pytest.approx(generated[0] / 4)
    assert every["memory"] == some["memory"]
