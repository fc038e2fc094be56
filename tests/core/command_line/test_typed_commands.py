"""Commands of other tools typed after `loadgauge`: read as a file that holds them is, and as the flags that they stand for."""

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import typed
from loadgauge.core.base.files import is_command

RUNS = (
    "torchrun --nproc_per_node 4 sft.py --model_name_or_path Qwen/Qwen3-0.6B --per_device_train_batch_size 2 --max_length 2048",
    "trl sft --model_name_or_path Qwen/Qwen3-0.6B --use_peft --max_length 2048",
    "CUDA_VISIBLE_DEVICES=0,1 swift sft --model Qwen/Qwen3-0.6B --train_type lora --max_length 4096",
    "python3 -m trl.scripts.dpo --model_name_or_path Qwen/Qwen3-0.6B --bf16 true",
)


def answer(text: str) -> dict[str, Any]:
    found = typed(f"{text} --json")
    assert found.code in (0, 1), found.err
    whole = json.loads(found.out)
    return {name: whole[name] for name in ("layout", "memory", "time", "task", "served") if name in whole}


@pytest.mark.parametrize("command", RUNS)
def test_a_command_is_the_file_that_holds_it(command: str, tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(command)
    whole = answer(f"{file} --gpu l40s")
    assert answer(f"{command} --gpu l40s") == whole
    assert answer(f'estimate "{command}" --gpu l40s') == whole


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("vllm serve Qwen/Qwen3-0.6B -tp 2 --max-num-seqs 8", "Qwen/Qwen3-0.6B --server vllm --tp 2 --batch 8"),
        (
            "python -m vllm.entrypoints.openai.api_server --gpu-memory-utilization 0.8 --model Qwen/Qwen3-0.6B",
            "Qwen/Qwen3-0.6B --server vllm:utilization=0.8",
        ),
        (
            "python3 -m sglang.launch_server --model-path Qwen/Qwen3-0.6B --tp 2",
            "Qwen/Qwen3-0.6B --server sglang --tp 2",
        ),
        ("trtllm-serve Qwen/Qwen3-0.6B --max_batch_size 4", "Qwen/Qwen3-0.6B --server trtllm --batch 4"),
    ],
)
def test_a_command_of_a_server_is_its_flags(command: str, flags: str) -> None:
    assert answer(f"{command} --gpu l40s") == answer(f"estimate {flags} --task generate --gpu l40s")


@pytest.mark.parametrize("text", ["qwen3-8b", "deepspeed", "swift.yaml", "./train.py --bf16", "axolotl-7b --gpu", ""])
def test_what_is_no_command(text: str) -> None:
    assert not is_command(text)
