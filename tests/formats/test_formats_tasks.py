"""Job files of preference tuning and reward models: answered as tasks, and written."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import document, typed

FACTORY = """model_name_or_path: meta-llama/Llama-3.1-8B
stage: dpo
finetuning_type: lora
cutoff_len: 1024
per_device_train_batch_size: 2
bf16: true
template: llama3
"""
AXOLOTL = """base_model: meta-llama/Llama-3.1-8B
adapter: lora
lora_r: 16
lora_target_linear: true
sequence_len: 1024
micro_batch_size: 2
bf16: true
datasets: []
"""


@pytest.mark.parametrize(
    ("text", "task"),
    [
        (FACTORY, "dpo"), (FACTORY + "pref_loss: orpo\n", "orpo"), (FACTORY + "pref_loss: simpo\n", "simpo"),
        (FACTORY.replace("dpo", "kto"), "kto"), (FACTORY.replace("dpo", "rm"), "rm"),
        (AXOLOTL + "rl: ipo\n", "ipo"), (AXOLOTL + "rl: kto\n", "kto"),
    ],
)  # fmt: skip
def test_a_file_s_task_is_estimated(text: str, task: str, tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(text)
    found = document(f"estimate {place} --gpu h100-sxm5-80gb")
    assert found["task"] == task
    flags = typed(f"convert {place} --to flags").out.removeprefix("loadgauge ")
    assert f"--task {task}" in flags
    again = document(f"{flags.strip()} --gpu h100-sxm5-80gb")
    assert again["task"] == task
    assert found["memory"][0]["total"] == pytest.approx(again["memory"][0]["total"], rel=0.35)  # another trainer's loss


def test_a_task_goes_from_one_tool_to_another(tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(FACTORY)
    assert "rl: dpo" in typed(f"convert {place} --to axolotl").out
    place.write_text(AXOLOTL + "rl: orpo\n")
    made = typed(f"convert {place} --to llamafactory").out
    assert "stage: dpo" in made
    assert "pref_loss: orpo" in made


def test_what_is_of_training_alone_refuses_such_a_file(tmp_path: Path) -> None:
    place = tmp_path / "a.yaml"
    place.write_text(FACTORY)
    found = typed(f"plan {place} --gpu h100-sxm5-80gb --gpus 8")
    assert (found.code, found.out) == (2, "")
    assert "--task" in found.err


def test_a_reference_of_llamafactory_is_not_widened(tmp_path: Path) -> None:
    """What is trained is made float32; the reference stays in bfloat16: 2 bytes of each of 8.03 billion parameters."""
    place = tmp_path / "a.yaml"
    place.write_text(FACTORY.replace("finetuning_type: lora", "finetuning_type: full"))
    found = document(f"estimate {place} --gpu b200-sxm-180gb")
    held = {
        one["role"]: one["bytes"] for phase in found["memory"] if phase["phase"] == "update" for one in phase["parts"]
        if one["part"] == "weights"
    }  # fmt: skip
    assert held["reference"] == 2 * 8_030_261_248
    assert held["policy"] == 4 * 8_030_261_248
