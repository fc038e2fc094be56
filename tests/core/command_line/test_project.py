"""A question that decides is asked on a terminal alone, and its answer is kept in a file of the project."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import document, typed

JOB = "estimate olmo-3-7b --gpu h200 --gpus 8"
FILE = ".loadgauge.toml"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def on_a_terminal(line: str, key: str) -> tuple[int, str]:
    """The exit code and the text of a command on a terminal, where one key is pressed when it is asked for."""
    mine, its = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    words = [sys.executable, "-m", "loadgauge", *line.split()]
    done = subprocess.Popen(words, stdin=its, stdout=its, stderr=its, env=environment, close_fds=True)
    os.close(its)
    text = b""
    while True:
        if not select.select([mine], [], [], 0.2)[0]:
            if b"leave it open" in text:  # pressed again: what comes before the terminal listens is dropped
                os.write(mine, key.encode())
            continue
        try:
            read = os.read(mine, 4096)
        except OSError:  # Linux: the other end is closed
            break
        if not read:
            break
        text += read
    os.close(mine)
    return done.wait(), text.decode()


@pytest.mark.slow
def test_one_key_answers_and_is_remembered(tmp_path: Path) -> None:
    code, text = on_a_terminal(f"{JOB} --brief", "2")
    assert "Which is it, --weights?  [1] bfloat16  [2] float32" in text
    assert str(tmp_path / FILE) in text.replace("\r\n", "")
    # The answer that follows is that of the job that says so.
    said = typed(f"{JOB} --weights float32 --brief")
    assert said.out.splitlines()[0].partition("  ")[2] in text
    assert code == said.code == 1
    # From now on it is taken, and said, in pipes too.
    assert document(JOB)["assumed"]["--weights"] == f"float32 ({FILE})"
    assert document(JOB)["memory"] == document(f"{JOB} --weights float32")["memory"]
    assert document(f"{JOB} --weights bfloat16")["memory"]["verdict"] == "fits"
    # Nothing is asked again.
    assert "Which is it" not in on_a_terminal(f"{JOB} --brief", "1")[1]


def test_another_key_leaves_it_open() -> None:
    code, text = on_a_terminal(f"{JOB} --brief", "x")
    assert "Which is it" in text
    assert code == 1
    assert not Path(FILE).exists()


def test_nothing_is_asked_in_a_pipe() -> None:
    found = typed(JOB)
    assert found.out.startswith("DEPENDS")
    assert "Which is it" not in found.out
    assert not Path(FILE).exists()


def test_an_answer_to_what_is_not_open_changes_nothing() -> None:
    Path(FILE).write_text('weights = "float32"\n')
    assert (
        document("estimate llama-3.1-8b --gpu h100 --gpus 8 --zero 1 --framework megatron")["assumed"].get("--weights")
        is None
    )


def test_a_plan_takes_the_answer_too() -> None:
    line = "plan olmo-3-7b --gpu b200 --gpus 8 --framework huggingface --global-batch 8 --seq-len 2048 --zero 0 --micro-batch 1"
    before = document(line)["layouts"][0]["memory"]
    Path(FILE).write_text('weights = "float32"\n')
    after, said = (document(each)["layouts"][0]["memory"] for each in (line, f"{line} --weights float32"))
    assert before["verdict"] == "depends"
    assert after == said != before


@pytest.mark.parametrize("text", ["weights = 4\n", 'gpu = "h100"\n', "weights\n"])
def test_another_file_of_that_name_is_refused(text: str) -> None:
    Path(FILE).write_text(text)
    found = typed(JOB)
    assert found.code == 2
    assert FILE in found.err
