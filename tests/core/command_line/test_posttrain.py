"""`loadgauge estimate --task` of what comes after pre-training, as typed."""

from __future__ import annotations

from typing import Any

import pytest

from command_line import document, typed

GRPO = (
    "estimate llama-3.1-8b --task grpo --gpus 8 --gpu h100-sxm5-80gb --zero 3 --recompute full --prompts 64 --samples 16"
    " --prompt-len 1024 --answers exp:2000,8192 --rollout vllm:tp=2,utilization=0.6,sleep=2"
)


def test_the_answer_in_words() -> None:
    found = typed(GRPO)
    assert found.code == 0
    first = found.out.splitlines()[0]
    assert first.startswith("FITS")
    assert "generate" in first
    for word in ("old log-probs", "weight sync", "object store", "of 256 sequences of a replica run at once"):
        assert word in found.out


def test_the_document_adds_up() -> None:
    found = document(GRPO)
    assert [phase["phase"] for phase in found["memory"]["phases"]] == [
        "generate", "old log-probs", "reference", "update", "weight sync",
    ]  # fmt: skip
    for phase in found["memory"]["phases"]:
        assert phase["total"] == pytest.approx(sum(part["bytes"] for part in phase["parts"]))
        assert phase["low"] <= phase["total"] <= phase["high"]
    assert found["verdict"] == "fits"
    assert found["worst"] == max(found["memory"]["phases"], key=lambda phase: phase["total"])["phase"]


def test_what_does_not_fit_has_a_next_step_that_fits() -> None:
    line = "estimate llama-3.1-8b --task dpo --gpu h100-sxm5-80gb --gpus 8 --zero 3 --seq-len 8192 --micro-batch 4"
    found = typed(line)
    assert found.code == 1
    assert "DOES NOT FIT" in found.out
    flags = next(item for item in document_of(line)["remedies"] if item["memory"]["verdict"] == "fits")["flags"]
    kept = line.replace("--micro-batch 4", "") if "--micro-batch" in flags else line
    assert typed(f"{kept} {flags}").code == 0


RESTED = "qwen3-8b --gpus 8 --zero 3 --recompute full --rollout vllm:utilization=0.5,sleep=1"


@pytest.mark.parametrize(
    ("line", "needed"),
    [
        ("qwen3-30b-a3b --gpus 16", ("sleep=1", "--zero 3", "--recompute full")),
        ("qwen3-8b --gpus 8 --zero 3 --rollout vllm:utilization=0.5", ("sleep=1",)),
        ("qwen3-8b --gpus 8 --zero 3 --rollout vllm:utilization=0.9,sleep=1 --recompute full", ("utilization=",)),
        (f"{RESTED} --micro-batch 64", ("--micro-batch",)),
        (f"{RESTED} --framework fsdp --micro-batch 1 --logprob-batch 64", ("--logprob-batch 1",)),
    ],
)
@pytest.mark.slow
def test_the_whole_model_is_trained_where_that_can_fit(line: str, needed: tuple[str, ...]) -> None:
    """No adapters, no more GPUs: the next step fits as typed, and without any one of its flags it does not."""
    line = f"estimate {line} --task grpo --gpu h100-sxm5-80gb"
    first = document_of(line)["remedies"][0]
    assert first["memory"]["verdict"] == "fits"
    flags = dict(zip(*[iter(first["flags"].split())] * 2, strict=True))
    assert not {"--lora-rank", "--gpus"} & flags.keys()
    assert all(word in first["flags"] for word in needed)
    words = line.split()
    kept = {flag: words[words.index(flag) + 1] for flag in words if flag.startswith("--")}

    def code(more: dict[str, str]) -> int:
        return typed([*words[:2], *(word for pair in (kept | more).items() for word in pair)]).code

    assert code(flags) == 0
    assert all(code({flag: value for flag, value in flags.items() if flag != left_out}) for left_out in flags)


def document_of(line: str) -> dict[str, Any]:
    """The document of a command line that says no."""
    import json

    found: dict[str, Any] = json.loads(typed(f"{line} --json").out)
    return found


def test_an_engine_whose_share_holds_no_sequence_does_not_fit() -> None:
    """The verdict says so whatever the rest of the card has free, and there is no time; a share that holds one is a remedy."""
    found = document_of(f"{GRPO} --rollout vllm:utilization=0.2,sleep=1")
    assert (found["verdict"], found["worst"], found["time"]) == ("does not fit", "generate", None)
    assert "it does not start" in found["untimed"]
    assert found["memory"]["parts"]["engine beside its share"] > 0
    assert "utilization=0.3" in " ".join(remedy["flags"] for remedy in found["remedies"])
    # On a card with what it needs it starts, and on one with a little less it does not.
    for share, starts in ((0.998, False), (1.002, True)):
        memory = f"--memory {share * found['memory']['total'] / 2**30:.4f}GiB"
        there = document_of(f"{GRPO} --rollout vllm:utilization=0.2,sleep=1 {memory}")
        assert (there["time"] is not None) is starts


@pytest.mark.parametrize("part", ["kv", "logprobs", "sync"])
def test_explanations(part: str) -> None:
    found = typed(f"{GRPO} --explain {part}")
    assert found.code == 0
    assert "Sources" in found.out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--rollout vlm", "did you mean vllm"),
        ("--rollout vllm:utilisation=0.5", "did you mean utilization"),
        ("--rollout sglang:utilization=0.5", "no option of SGLang"),
        ("--rollout vllm:utilization=1.5", "at most 1"),
        ("--rollout vllm:tp=3", "not whole replicas of 3"),
        ("--rollout vllm:dp=9", "dp=9"),
        ("--placement split:4+3", "not the 8 of --gpus"),
        ("--placement both", "colocated or like split"),
        ("--answers exp:2000", "exp:2000,8192"),
        ("--answers 200000", "context"),
        ("--global-batch 1000", "not whole batches"),
        ("--seq-len 4096 --prompt-len 512 --answers 512", "already"),
        ("--teacher gpt2", "has none"),
        ("--reference adapter", "needs adapters"),
        ("--context 4096", "--task generate"),
        ("--sweep micro-batch=1,2 --table weights", "--task train"),
        ("--explain gradients", "known: kv"),
        ("--at loss", "--task train"),
        ("--mfu 40%", "--task train"),
        ("--eval-batch 2", "--task train"),
        ("--rollout vllm:tp", "tp needs a value"),
        ("--vpp 2", "interleaved"),
        ("--stage-layers 16,16", "stage"),
        ("--logprob-tokens 16", "longest sequence"),
        ("--answers none.txt", "exp:MEAN,MAX"),
        ("--answers 0", "answers: "),
    ],
)
def test_what_does_not_add_up_is_refused(more: str, words: str) -> None:
    found = typed(f"estimate llama-3.1-8b --task grpo --gpus 8 --gpu h100-sxm5-80gb --zero 3 {more}")
    assert (found.code, found.out) == (2, "")
    assert found.err.count("\n") == 1
    assert words in found.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("estimate gpt2 --task dpo --rollout vllm", "generates its answers"),
        ("estimate gpt2 --task gkd", "needs the model that is distilled"),
        ("estimate gpt2 --task orpo --reference model", "no reference"),
        ("estimate gpt2 --prompts 8", "--task"),
        ("estimate gpt2 --task orpo --frozen-offload", "no frozen model"),
        ("estimate gpt2 --task dpo --reference precomputed --frozen-weights float32", "no frozen model"),
        ("estimate gpt2 --task sft --logprob-batch 4", "--micro-batch"),
        ("fleet gpt2 --tokens 1B", "gpu: is missing"),
        ("estimate none.py:model --inputs none.py:inputs", "none.py: no such file"),
        ("estimate none.py:model", "none.py: no such file"),
        ("plan llama-3.1-8b --gpu h100 --gpus 64 --tokens 1T --find oversubscription", "--topology"),
        ("plan llama-3.1-8b --gpu h100 --gpus 64 --tokens 1T --find sites", "between=100Gbit/s"),
        ("estimate gpt2 --explain kv", "--task grpo"),
    ],
)
def test_flags_of_other_tasks_are_refused(line: str, words: str) -> None:
    found = typed(line)
    assert (found.code, found.out) == (2, "")
    assert words in found.err


def test_what_a_rollout_on_gpus_of_its_own_does_not_need_is_said() -> None:
    found = typed(f"{GRPO} --placement split:4+4")
    assert found.code in (0, 1)
    assert "sleep= and --rollout-offload change nothing" in " ".join(found.out.split())


def test_a_sweep_of_a_task_is_its_single_estimates_and_a_host_that_does_not_hold_its_part_fits_none() -> None:
    job = "qwen2.5-0.5b --gpu h100 --task grpo --zero 3 --recompute full --offload all --prompts 16 --answers 512"
    job += " --rollout vllm:utilization=0.5,sleep=1"
    swept = document(f"estimate {job} --sweep gpus=4,8")["cells"]
    for cell in swept:
        alone = document(f"estimate {job} --gpus {cell['gpus']}")
        assert cell["memory_total"] == alone["memory"]["total"]
        assert cell["step"] == alone["time"]["step"]
        assert cell["on_host"] == sum(alone["host"].values())
    least, most = sorted(cell["on_host"] for cell in swept)
    limit = (least + most) / 2
    judged = document(f"estimate {job} --sweep gpus=4,8 --host-memory {limit:.0f}B")["cells"]
    assert {cell["on_host"]: cell["outcome"] for cell in judged} == {least: "fits", most: "does not fit"}
    refused = typed("estimate gpt2 --task generate --sweep tp=1,2")
    assert (refused.code, "plan --task generate" in refused.err) == (2, True)
