"""Answers and errors in Chinese, where it is asked for."""

from __future__ import annotations

import json
import re

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
        assert len(re.findall(r"\{\d?\}", form)) == text.count("{}"), text
