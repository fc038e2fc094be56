"""What a file says that its tool lets pass, or that stands for something else, is answered and said, and stops nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import document, typed

NEMO = """\
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 8}
loss_fn: {reference_policy_kl_penalty: 0.0}
policy:
  model_name: Qwen/Qwen2.5-1.5B-Instruct
  train_global_batch_size: 64
  train_micro_batch_size: 1
  max_total_sequence_length: 4096
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1}
  generation: {backend: vllm, vllm_cfg: {tensor_parallel_size: 1, gpu_memory_utilization: 0.6}}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


def nemo(tmp_path: Path, old: str = "", new: str = "", name: str = "grpo.yaml") -> tuple[float, str]:
    """The memory and the whole text of a file of NeMo-RL, changed in a place."""
    assert old in NEMO
    place = tmp_path / name
    place.write_text(NEMO.replace(old, new), encoding="utf-8")
    line = f"estimate {place} --gpu h100-sxm5-80gb"
    return document(line)["memory"]["total"], typed(f"{line} --full").out


def test_parameters_off_the_card_do_nothing_below_zero_3(tmp_path: Path) -> None:
    totals = []
    for param in ({}, {"offload_param": {"device": "cpu"}}):
        place = tmp_path / f"{len(param)}.json"
        stage = {"stage": 2, "offload_optimizer": {"device": "cpu"}, **param}
        place.write_text(
            json.dumps({"zero_optimization": stage, "train_micro_batch_size_per_gpu": 1}), encoding="utf-8"
        )
        found = typed(f"estimate {place} --model llama-3.1-8b --gpus 8 --gpu h100-sxm5-80gb --json")
        totals.append(json.loads(found.out)["memory"]["total"])
    assert totals[0] == totals[1]
    assert "does nothing below ZeRO 3" in found.out


def test_a_text_in_place_of_a_model_gives_way_to_the_name_in_the_file_s(tmp_path: Path) -> None:
    named, _ = nemo(tmp_path, "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct")
    guessed, text = nemo(
        tmp_path, "Qwen/Qwen2.5-1.5B-Instruct", '"Follow the guide on the web"', "grpo-qwen2.5-7b-8g.yaml"
    )
    assert guessed == named
    assert "qwen2.5-7b, as its words say, is taken" in " ".join(text.split())
    place = tmp_path / "none.yaml"
    place.write_text(NEMO.replace("Qwen/Qwen2.5-1.5B-Instruct", '"Follow the guide"'), encoding="utf-8")
    assert typed(f"estimate {place} --gpu h100-sxm5-80gb").code == 2


def test_answers_may_reach_beyond_the_positions_where_a_file_asks_for_it(tmp_path: Path) -> None:
    _, text = nemo(tmp_path, "max_total_sequence_length: 4096", "max_total_sequence_length: 262144")
    assert "up to 262,144, as the file asks; qwen2.5-1.5b has 131,072" in " ".join(text.split())
    asked = typed("estimate qwen2.5-1.5b --gpu h100 --gpus 8 --task grpo --answers exp:2000,262144")
    assert (asked.code, "262,144 of an answer are more" in asked.err) == (2, True)


@pytest.mark.parametrize(("tokens", "rows"), [(3000, 1), (10000, 2), (8192, 2)])
def test_packs_are_counted_in_the_nearest_whole_number_of_sequences(tmp_path: Path, tokens: int, rows: int) -> None:
    packed = f"sequence_packing: {{enabled: true, train_mb_tokens: {tokens}}}\n  max_total"
    place = tmp_path / "packed.yaml"
    place.write_text(NEMO.replace("max_total", packed), encoding="utf-8")
    flags = typed(f"convert {place} --to flags")
    assert f"--micro-batch {rows} " in f"{flags.out} "
    assert ("no whole number of sequences" in flags.err) == (tokens % 4096 != 0)


def test_teachers_of_advantages_are_named(tmp_path: Path) -> None:
    plain, _ = nemo(tmp_path)
    taught, text = nemo(
        tmp_path, "num_generations_per_prompt: 8}", "num_generations_per_prompt: 8, adv_estimator: {name: opd}}"
    )
    assert taught == plain
    assert "those of teachers" in " ".join(text.split())
