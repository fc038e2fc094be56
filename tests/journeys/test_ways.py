"""Five users on their way: what each types on a terminal, and what must stand on the first screen."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from loadgauge.core.command_line.main import run

LINES = 12
"""Lines of a first screen."""
OOM = """step 3
Traceback (most recent call last):
  File "/home/me/train.py", line 40, in <module>
    trainer.train()
  File "/site-packages/transformers/models/qwen3/modeling_qwen3.py", line 500, in forward
    logits = logits.float()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has a total capacity of 23.52 GiB of which 1.15 \
GiB is free. Including non-PyTorch memory, this process has 22.36 GiB memory in use. Of the allocated memory 20.00 GiB is \
allocated by PyTorch, and 1.50 GiB is reserved by PyTorch but unallocated.
"""
FILES = {
    "qlora.yaml": "base_model: Qwen/Qwen3-8B\nadapter: qlora\nload_in_4bit: true\nbf16: true\nsequence_len: 2048\n"
    "micro_batch_size: 2\ngradient_accumulation_steps: 4\nlora_r: 16\nlora_target_linear: true\ngradient_checkpointing: true\n"
    "plugins:\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n",
    "sft.py": "from trl import SFTConfig, SFTTrainer\nfrom peft import LoraConfig\n"
    "trainer = SFTTrainer(model='Qwen/Qwen3-8B', args=SFTConfig(output_dir='o', per_device_train_batch_size=1, max_length=1024,\n"
    "    bf16=True), train_dataset=rows, peft_config=LoraConfig(r=16))\n",
    "oom.txt": OOM,
    "net.py": "import torch\nfrom torch import nn\n\ndef model():\n    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(),"
    " nn.Linear(2048, 512))\n\ndef batch(b):\n    return torch.randn(b, 256, 512)\n",
    "grpo.sh": "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 \\\n"
    "  data.max_prompt_length=512 data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen3-8B \\\n"
    "  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \\\n"
    "  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\\n"
    "  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=8 \\\n"
    "  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 trainer.n_gpus_per_node=8 trainer.nnodes=1\n",
}


class Step(NamedTuple):
    """A line that is typed, what must be seen, the exit codes that are an answer, and the most lines (0: any)."""

    line: str
    seen: str
    codes: tuple[int, ...] = (0, 1)
    lines: int = LINES


WAYS = {
    "hobbyist": (
        Step("qwen3-8b --gpu 4090 --qlora", r"TIGHT .* GiB of 23\.5 GiB"),
        Step("qwen3-8b --gpu 4090 --load-in-4bit --framework unsloth", r"FITS .* GiB of 23\.5 GiB", (0,)),
        Step("qwen3-8b --gpu 24GB --load-in-4bit --batch-size 2 --max-seq-length 2k --gradient-checkpointing", r"2 x 2,048 tokens"),
        Step("qlora.yaml --gpu 4090", r"FITS .*QLoRA 16, 1 x rtx4090, 2 x 2,048 tokens", (0,)),
        Step("sft.py --gpu 4090", r"LoRA 16, 1 x rtx4090, 1 x 1,024 tokens"),
        Step("oom.txt", r"WHERE  loss", lines=0),
        Step("why < oom.txt", r"AT +models/qwen3/modeling_qwen3\.py:500", lines=0),
        Step("plan qwen3-8b --gpu 4090 --qlora --find micro-batch", r"is TIGHT: 1, .*; with --loss chunked \d, which\s+fits"),
        Step("qwen3-8b --gpu 4090 --qlora --recompute none", r"Try --.* GiB, FITS.*In trl: gradient_checkpointing: true"),
    ),
    "64 H100": (
        Step(
            "llama-3.1-70b --gpu 64xh100 --tp 8 --pp 2 --zero 1 --global-batch 512 --tokens 100B --price '$2.50'",
            r"The run: [\d.]+ days, [\d,]+ GPU-hours, [\d,]+ at 2\.5 per GPU-hour",
        ),
        Step("llama-3.1-8b --gpu 8xh100 --fsdp --bf16", r"8 x h100-sxm5-80gb.*A step: .*tokens/s a GPU, MFU \d+%"),
        Step(
            "plan llama-3.1-8b --gpu 8xh100 --find days --tokens 100B --price 2.5",
            r"days on 8 GPUs: [\d,]+ GPU-hours, [\d,]+ at 2\.5",
        ),
        Step("plan --help", r"--gpus .*--global-batch .*--export .*--help-all", (0,), 24),
    ),
    "GRPO with verl": (
        Step("grpo.sh --gpu h100 --gpus 8", r"GiB of 79\.2 GiB"),
        Step(
            "qwen3-8b --grpo --gpu 8xh100 --fsdp --recompute full --prompts 64 --samples 8 --prompt-len 512 --answers 1024"
            " --rollout vllm:tp=2,utilization=0.6,sleep=1",
            r"FITS .*fullest in",
            (0,),
        ),
        Step("qwen3-8b --gpu h100 --gpus 8 --framework verl", r"GiB of 79\.2 GiB"),
        Step("qwen3-8b --gpu 8xh100 --framework verl --grpo", r"FITS .*fullest in generate"),  # its engine sleeps
        Step(
            "qwen3-8b --gpu h100 --framework verl --recompute none --micro-batch 2",
            r"Try .*FITS.*In verl: .*actor_rollout_ref\.",
        ),
        Step("qwen3-8b --gpu 8x4090 --framework verl --grpo", r"Next, in verl: actor_rollout_ref\."),
    ),
    "own module": (
        Step("net.py --gpu 4090", r"net\.py:FUNCTION", (2,), 0),
        Step("net.py:model --gpu 4090", r"FITS .*1 x rtx4090, 1 sample", (0,)),
        Step("net.py:model --inputs net.py:batch --gpu 24GB --batch-size 64", r"64 samples.*activations", (0,)),
        Step("plan net.py:model --inputs net.py:batch --gpu 4090 --find micro-batch", r"largest micro-batch that fits: \d", (0,)),
    ),
    "student": (
        Step("gpt2", r"NEEDS .*weights", (0,)),
        Step("equation states", r"16\*|ZeRO", (0,), 0),
        Step("explain", r"states", (0,), 0),
        Step("estimate --help", r"--gpu .*--qlora .*--micro-batch .*--help-all", (0,), 24),
        Step("llama-3.1-8b --gpu h100 --lr 1e-4 --dp 4", r"4 x h100-sxm5-80gb"),
        Step("llama-3.1-8b --gpu h100 --gpus 8 --dp 3", r"--gpus 3", (2,), 0),
    ),
}  # fmt: skip
"""The ways; that of a module of one's own runs PyTorch."""


class Terminal(io.StringIO):
    """A stream that is one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, id=f"{user}: {step.line}", marks=pytest.mark.slow if "net.py" in step.line else ())
        for user, steps in WAYS.items()
        for step in steps
    ],
)
def test_a_step_is_answered_on_the_first_screen(step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    line, _, piped = step.line.partition(" < ")
    monkeypatch.setattr("sys.stdin", io.StringIO(FILES.get(piped, "")))
    with contextlib.redirect_stdout(Terminal()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = run(shlex.split(line))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()) or err.getvalue()
    assert code in step.codes, (code, err.getvalue())
    assert re.search(step.seen, shown, re.DOTALL), shown
    assert not step.lines or len(shown.splitlines()) <= step.lines, shown
    assert "Traceback" not in err.getvalue()


@pytest.mark.parametrize(
    "line",
    [
        "gemma-3-12b --gpu 4090 --qlora",
        "ministral-3-8b --gpu h100",
        "qwen3-8b --gpu 8xh100 --zero3 --max-seq-len 8k",
        "qwen3.5-9b --gpu h100",
        "qwen3-8b --gpu 4090 --framework verl",
        "llama-3.1-70b --gpu h100 --gpus 64 --tp 8 --pp 2 --zero 1 --global-batch 512 --tokens 100B --price 2.50",
    ],
)
def test_a_first_screen_is_twelve_lines_on_a_small_terminal(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(map(len, _screen(line, monkeypatch, (0, 1)))) <= 80


@pytest.mark.parametrize(
    "line",
    [
        "qwen3-8b --task ppo --gpu 8xh100 --framework openrlhf",
        "qwen3-32b --task grpo --gpu 16xh100 --framework verl",
        "qwen3-32b --task grpo --gpu 8xh100 --framework trl",
        "qwen3.5-9b --task grpo --gpu 8xh100 --framework verl",
        "qwen3-8b --task dpo --gpu 8xh100 --framework llamafactory",
        "qwen3-8b --task rm --gpu 8xh100",
        "qwen3-8b --task grpo --gpu 8xh100 --host-memory 200GB",
        "qwen3-32b --task generate --server sglang --gpu h100 --batch 64",
        "qwen3-32b --task generate --server vllm --gpu 2xh100 --tp 2 --batch 64 --context 8192 --answer 512",
        "network llama-3.1-70b --gpu 64xh100 --tp 8",
        "network deepseek-v3 --gpu 64xh100 --tp 8 --pp 8 --ep 8",
        "plan llama-3.1-8b --gpu 8xh100 --global-batch 64",
        "plan llama-3.1-405b --gpu 8xh100 --global-batch 64",
        "plan llama-3.1-8b --gpu 8xh100 --find days --tokens 1T --price 2.5",
        f"why {shlex.quote(OOM)} --model qwen3-8b --gpu 4090 --micro-batch 2",
        f"why {shlex.quote(OOM)}",
        "plan qwen3-8b --task grpo --gpu 8xh100",
        "plan llama-3.1-8b --task generate --gpu h100 --gpus 2 --requests 5",
        "equation",
        "equation activations --layer gpt --tp --sequence-parallel",
        "equation params llama-3.1-8b",
        "article 1",
        "gpus",
        "gpus h100",
        "models",
        "models qwen",
        "runs",
        "validate --source KOR",
    ],
)
def test_each_task_has_its_first_screen(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _screen(line, monkeypatch, (0, 1))


def test_what_is_left_of_a_long_answer_is_one_word_away(monkeypatch: pytest.MonkeyPatch) -> None:
    short = _screen("gpus", monkeypatch, (0,))
    left = re.fullmatch(r"(\d+) more lines: --full", short[-1])
    assert left is not None
    with contextlib.redirect_stdout(Terminal()) as out:
        assert run(["gpus", "--full"]) == 0
    whole = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines() if line.strip()]
    assert len(short) - 1 + int(left[1]) == len(whole)
    assert short[:-1] == whole[: len(short) - 1]


@pytest.mark.parametrize(
    "line",
    ["network llama-3.1-70b --gpu h100 --gpus 64 --tp 8 --pp 2", "plan llama-3.1-405b --gpu 8xh100 --global-batch 64"],
)
def test_no_line_ends_within_a_word_or_before_a_unit(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command alone is longer than the terminal, for it is copied whole."""
    shown = [each for each in _screen(line, monkeypatch, (0, 1)) if not each.startswith("  loadgauge ")]
    assert max(map(len, shown)) <= 80
    assert not [each for each in shown[1:] if re.match(r"\s*(GiB|GB/s|ms|s)\b", each)], shown


def _screen(line: str, monkeypatch: pytest.MonkeyPatch, codes: tuple[int, ...]) -> list[str]:
    """Return what a terminal of 80 columns shows for a command, notes before the answer too, after counting its lines."""
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.redirect_stdout(Terminal()) as out, contextlib.redirect_stderr(io.StringIO()) as notes:
        assert run(shlex.split(line)) in codes
    shown = re.sub(r"\x1b\[[0-9;]*m", "", notes.getvalue() + out.getvalue())
    assert sum(max(1, -(-len(each) // 80)) for each in shown.splitlines()) <= LINES, shown
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()
