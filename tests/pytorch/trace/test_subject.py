"""`trace` and `capture` of a model with towers say in their first lines what it ran on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from command_line import typed
from in_process import in_process

TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "intermediate_size": 48, "vocab_size": 320}  # fmt: skip
EYES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48, "patch_size": 14,
        "image_size": 56}  # fmt: skip


def first_lines(command: str) -> list[str]:
    """What a command prints before its first table."""
    told = typed(command)
    assert told.code == 0, told.err
    return told.out.partition("What is alive")[0].splitlines()


@pytest.mark.long
def test_both_say_what_they_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    seeing = CONFIG_MAPPING["gemma3"](
        text_config=TEXT, vision_config=EYES, mm_tokens_per_image=4, image_token_index=300
    )
    blind = CONFIG_MAPPING["gemma3_text"](**TEXT)
    for config, name in ((seeing, "seeing"), (blind, "blind")):
        (tmp_path / f"{name}.json").write_text(json.dumps(json.loads(config.to_json_string(use_diff=False))))
    asked = "--seq-len 64 --optimizer sgd"
    assert "Run on text alone" in first_lines(f"trace {tmp_path}/seeing.json {asked}")
    assert "Run on text with one picture" in first_lines(f"capture {tmp_path}/seeing.json {asked} --no-cache")
    for command in (f"trace {tmp_path}/blind.json {asked}", f"capture {tmp_path}/blind.json {asked} --no-cache"):
        assert not any(line.startswith("Run on") for line in first_lines(command))


def test_several_pictures_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    config = CONFIG_MAPPING["gemma3"](
        text_config=TEXT, vision_config=EYES, mm_tokens_per_image=4, image_token_index=300
    )
    file = tmp_path / "seeing.json"
    file.write_text(json.dumps(json.loads(config.to_json_string(use_diff=False))))
    told = first_lines(f"capture {file} --seq-len 64 --optimizer sgd --no-cache --picture 56x56,56x56")
    assert "Run on text with 2 pictures" in told
