"""Variables and arithmetic of a shell script are what bash makes of them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from loadgauge.job_files.reading.shell import variables_of, words_of

SCRIPT = """
NAME=plain
QUOTED="two words"
export DIR=${DIR:-"${HOMES:-/data}/verl"}
MODEL=${MODEL:-${DIR}/Qwen3-32B}
N=${N:-$((1024 * 8))}
M=$((N / 3 + 2 * (N - 1) % 7))
NEGATIVE=${NEGATIVE:--1}
SUM=$((
    N + M
))
CHAIN=${FIRST:-${SECOND:-${NAME}-x}}
HALF=$(expr 32 / 4 / 2)
EMPTY=
"""
NAMES = ("NAME", "QUOTED", "DIR", "MODEL", "N", "M", "NEGATIVE", "SUM", "CHAIN", "HALF")


@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
def test_variables_are_those_of_bash() -> None:
    lines = "".join(f'echo "${name}"\n' for name in NAMES)
    done = subprocess.run(
        ["bash", "-c", SCRIPT + lines], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"}
    )
    ours = variables_of(SCRIPT)
    assert [ours[name] for name in NAMES] == done.stdout.splitlines()
    assert ours["SUM"] == str(int(ours["N"]) + int(ours["M"]))


def test_what_is_only_known_where_it_runs_keeps_its_dollar_sign() -> None:
    script = (
        "A=$SLURM_NNODES\nB=${TP}\nC=$((A * 2))\nD=$(date)\nE=$((1 / 0))\nF=$((9 ** 9))\nG=$((10 * 999999999999))\n"
        "if x; then H=1; else H=2; fi\n"
    )
    assert variables_of(script) == {}
    words = [word.text for word in words_of("run --nodes $SLURM_NNODES --tp ${TP} --x $((A * 2))", {})]
    assert words == ["run", "--nodes", "$SLURM_NNODES", "--tp", "${TP}", "--x", "$((A * 2))"]


def test_a_quote_within_a_default_opens_no_string() -> None:
    """`${A:-"${B}/c"}` is one word, and so is what follows it."""
    script = (
        'FILE=${FILE:-"${HOME}/x.parquet"}\npython -m verl.trainer.main_ppo data.train_batch_size=8 "data.x=${FILE}"\n'
    )
    texts = [word.text for word in words_of(script, variables_of(script))]
    assert "data.train_batch_size=8" in texts
    assert texts[-1] == "data.x=${FILE}"
