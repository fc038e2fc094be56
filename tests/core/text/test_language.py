"""Answers and errors in Chinese, where it is asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from loadgauge.core.command_line.main import run
from loadgauge.page.words import MESSAGES

CHINESE = re.compile(r"[\u4e00-\u9fff]")
SCREENS = (
    "qwen3-8b --gpu h100",
    "qwen3-8b --gpu 8xh100 --zero 3 --tokens 100B --price 2.5",
    "qwen3-8b --gpu 4090 --qlora",
    "kimi-k3 --gpu 8xh100",
    "qwen3.5-9b --task grpo --gpu 8xh100 --framework verl",
    "qwen3-8b --task ppo --gpu 8xh100",
    "qwen3-8b --task dpo --gpu h100 --host-memory 200GB",
    "qwen3-32b --task generate --gpu h100",
    "qwen3-32b --task generate --server vllm --gpu 2xh100 --tp 2 --batch 64 --answer 512",
)
WORDS = {
    *(
        "actor",
        "critic",
        "dpo",
        "grpo",
        "ppo",
        "logits",
        "token",
        "tokens",
        "graphs",
        "time",
        "bfloat",
        "float",
        "true",
        "false",
    ),
    *("generate", "reference", "vllm", "sglang"),
}
"""English words that are names in Chinese too, or values of flags."""


@pytest.mark.parametrize("line", SCREENS)
def test_every_line_of_a_first_screen_is_chinese(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("LOADGAUGE_LANG", "zh_CN.UTF-8")
    assert run([*line.split(), "--brief"]) in (0, 1)
    shown = capsys.readouterr().out.strip()
    assert [each for each in shown.splitlines() if not CHINESE.search(each) and "logits  " not in each] == []
    prose = re.sub(r"\S*[\d_=:/.-]\S*|\{.*?\}", " ", re.sub(r"--[a-z-]+( [^\s，：；（]+)?", " ", shown))
    assert set(re.findall(r"\b[a-z]{4,}\b", prose)) <= WORDS, shown


PLANS = (
    "plan gpt2 --gpu t4 --gpus 8 --global-batch 64",
    "plan qwen3-8b --gpu 4090 --qlora --find seq-len",
    "plan llama-3.1-8b --task generate --gpu h100 --gpus 2 --requests 5",
    "network llama-3.1-70b --gpu h100 --gpus 64 --tp 8 --pp 2",
    "fleet llama-3.1-70b --gpu h100 --gpus 512 --tp 8 --pp 4 --tokens 1T",
)


@pytest.mark.parametrize("line", PLANS)
def test_every_line_of_a_plan_is_chinese(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("LOADGAUGE_LANG", "zh_CN.UTF-8")
    assert run([*line.split(), "--brief"]) in (0, 1)
    lines = [each for each in capsys.readouterr().out.strip().splitlines() if "loadgauge estimate" not in each]
    assert [each for each in lines if not CHINESE.search(each) and "ZeRO" not in each] == []
    prose = re.sub(r"\S*[\d_=:/.-]\S*", " ", re.sub(r"--[a-z-]+( [^\s，：；（]+)?", " ", "\n".join(lines)))
    assert set(re.findall(r"\b[a-z]{4,}\b", prose)) <= WORDS, lines


WHOLE = (
    "qwen3-8b --gpu 8xh100 --zero 3 --tokens 100B --price 2.5 --full",
    "llama-3.1-70b --gpu h100 --gpus 64 --tp 8 --pp 2 --sequence-parallel --global-batch 512 --full",
    "qwen3-8b --task dpo --gpu h100 --full",
    "qwen3-32b --task generate --server vllm --gpu 2xh100 --tp 2 --batch 64 --answer 512 --full",
    "network llama-3.1-70b --gpu h100 --gpus 64 --tp 8 --pp 2 --full",
    "qwen3-8b --gpu h100 --explain activations",
    "lint JOB",
    "gpus h100",
    "equation activations",
    "plan --help",
)


@pytest.mark.parametrize("line", WHOLE)
def test_a_whole_answer_is_chinese(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of lines with four English words in a row none or few are left: titles of papers, and rows of rare assumptions."""
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("LOADGAUGE_LANG", "zh_CN.UTF-8")
    job = tmp_path / "job.yaml"
    job.write_text("base_model: NousResearch/Meta-Llama-3.1-8B\nadapter: qlora\nload_in_4bit: true\n", encoding="utf-8")
    assert run([str(job) if word == "JOB" else word for word in line.split()]) in (0, 1)
    lines = [each for each in capsys.readouterr().out.splitlines() if re.search("[a-zA-Z]{3}", each)]
    english = [each for each in lines if re.search(r"(\b[a-z]{3,},? ){3}[a-z]{3,}\b", each)]
    assert len(english) <= len(lines) // 12, english


def test_what_is_pasted_stays_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of trainers keep their colons, and values of flags their words."""
    monkeypatch.setenv("COLUMNS", "400")
    assert run(["qwen3-8b", "--gpu", "h100", "--brief", "--lang", "zh"]) == 1
    assert "optim: adamw_bnb_8bit; gradient_checkpointing: true" in capsys.readouterr().out
    assert run(["qwen3-8b", "--gpu", "4090", "--qlora", "--full", "--lang", "zh"]) in (0, 1)
    assert "--lora-targets all（" in capsys.readouterr().out


def test_an_error_is_chinese(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    for variable in ("LOADGAUGE_LANG", "LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(variable, raising=False)
    assert run(["qwn3-8b", "--gpu", "h100"]) == 2
    assert "既不是目录里的模型" in capsys.readouterr().err
    assert run(["qwen3-8b", "--gpu", "h100", "--micro-batch", "0"]) == 2
    assert "的值无效" in capsys.readouterr().err


def test_a_flag_goes_before_what_the_machine_speaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert run(["gpt2", "--lang=en", "--brief"]) == 0
    assert capsys.readouterr().out.startswith("NEEDS")
    assert run(["gpt2", "--brief", "--lang", "zh"]) == 0
    assert capsys.readouterr().out.startswith("需要")
    assert run(["gpt2", "--json", "--lang", "zh"]) == 0
    assert not CHINESE.search(capsys.readouterr().out)


def test_each_translation_has_what_its_text_names() -> None:
    for text, form in json.loads((MESSAGES / "lines.zh.json").read_text(encoding="utf-8")).items():
        places = re.findall(r"\{(\d?)\}", form)
        assert len(places) == text.count("{}"), text
        assert not any(places) or sorted(places) == [str(number) for number in range(len(places))], text
