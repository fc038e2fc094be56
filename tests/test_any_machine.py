"""The suite and the Makefile, as they are run on machines that are set up otherwise."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTEST"))}
    return subprocess.run(
        words, cwd=folder, env=environment | variables, capture_output=True, text=True, encoding="utf-8", check=False
    )


def test_bytecode_beside_what_tests_share_is_not_read(tmp_path: Path) -> None:
    support = tmp_path / "tests" / "support"
    (support / "__pycache__").mkdir(parents=True)
    (support / "__pycache__" / "example.pyc").write_bytes(b"\xff\xfe")
    (support / "data.txt").write_bytes(b"\xff\xfe >>>")
    (support / "example.py").write_text('"""Adds.\n\n>>> 1 + 1\n2\n"""\n', encoding="utf-8")
    (support / "plain.py").write_text("raise SystemExit\n", encoding="utf-8")
    for file in ("pyproject.toml", "tests/conftest.py", "tests/support/warm_children.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    done = run(tmp_path, sys.executable, "-m", "pytest", "-v", "tests/support")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    "target", ["docs", "planner", "operators", "serving", "rollout", "range", "accuracy", "runs", "bench"]
)
def test_what_builds_pages_installs_nothing_outside_its_own_environment(target: str) -> None:
    elsewhere = run(ROOT, "make", "--always-make", "--dry-run", target, VENV="/elsewhere").stdout
    assert "/elsewhere/bin/python" in elsewhere
    assert f"{ROOT}/src" in elsewhere
    assert "install" not in elsewhere
    assert "-m venv" not in elsewhere
    own = run(ROOT, "make", "--always-make", "--dry-run", target, VENV=".venv").stdout
    assert ".venv/bin/pip install" in own
