"""The page beside other tools: each is a file that can be asked, and what it prints is read."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from peers import run

PRINTED = """
│ total                 │         94.738 │
total              81.24 GB
total 125.51 GiB
Total: 100.41 GB
allocated shows 62.7 GiB (61.0 to 68.0)
"""


@pytest.mark.parametrize("file", sorted(run.HERE.glob("*.toml")), ids=lambda file: file.stem)
def test_a_tool_is_one_file_that_says_all(file: Path) -> None:
    tool = tomllib.loads(file.read_text(encoding="utf-8"))
    assert tool["install"]
    assert tool["holds"]
    assert ("command" in tool) != ("python" in tool)
    assert run.read(tool, PRINTED)[0].isdigit()


def test_what_cannot_be_asked_is_listed_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    (tmp_path / ".peers/pip/bin").mkdir(parents=True)
    (tmp_path / ".peers/pip/bin/python").symlink_to(sys.executable)
    text = "install = ['pip']\nmodule = 'json'\nanswer = '([0-9.]+ GiB)'\nholds = 'all'\n"
    (tmp_path / "pip.toml").write_text(f"{text}python = \"print('12.345 GiB')\"\n", encoding="utf-8")
    answer, holds, disk, imported, took = run.ask("pip", tmp_path)[2:]
    assert (answer, holds) == ("12.3 GiB", "all")
    assert (disk.split()[1], imported.split()[1], took.split()[1]) == ("MB", "s", "s")
    (tmp_path / "pip.toml").write_text(f"{text}python = 'raise SystemExit(3)'\n", encoding="utf-8")
    rows = [run.ask("pip", tmp_path)]
    assert "| no answer: CalledProcessError | all |" in run.table(rows)
