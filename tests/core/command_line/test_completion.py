"""What a shell completes, and what greets whoever types no command."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

import loadgauge
from command_line import typed
from loadgauge.core.command_line.main import COMMANDS, COMPLETE_VARIABLE, FIRST, commands, with_verb
from loadgauge.core.command_line.options.completion import SHELLS
from loadgauge.core.command_line.options.options import parse


def completed(line: str, incomplete: str) -> list[str]:
    """What is offered for a last word, after the words of a line."""
    found = ShellComplete(commands, {}, "loadgauge", COMPLETE_VARIABLE).get_completions(shlex.split(line), incomplete)
    return [item.value for item in found]


@pytest.mark.parametrize(
    ("line", "incomplete", "offered"),
    [
        ("", "es", "estimate"),
        ("", "--ver", "--version"),
        ("estimate", "llama-3.1-4", "llama-3.1-405b"),
        ("plan", "gpt2-x", "gpt2-xl"),
        ("estimate gpt2", "--zer", "--zero"),
        ("estimate gpt2 --gpu", "h100-sxm5-8", "h100-sxm5-80gb"),
        ("network gpt2 --framework", "megatron-d", "megatron-deepspeed"),
        ("estimate gpt2 --optimizer", "lio", "lion"),
        ("estimate gpt2 --schedule", "gp", "gpipe"),
        ("completion", "z", "zsh"),
    ],
)
def test_words_are_completed(line: str, incomplete: str, offered: str) -> None:
    found = completed(line, incomplete)
    assert offered in found
    assert all(word.startswith(incomplete) for word in found)


def test_a_model_that_no_catalogue_has_is_a_file() -> None:
    (item,) = ShellComplete(commands, {}, "loadgauge", COMPLETE_VARIABLE).get_completions(["estimate"], "conf")
    assert (item.value, item.type) == ("conf", "file")


def test_every_command_is_completed() -> None:
    assert completed("", "") == list(COMMANDS)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell: str) -> None:
    found = typed(f"completion {shell}")
    assert found.code == 0
    assert f"{COMPLETE_VARIABLE}={shell}_complete" in found.out
    other = typed("completion tcsh")
    assert other.code == 2
    assert "'bash', 'zsh', 'fish'" in other.err


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    """As a user's shell does: source the script, ask for what may follow."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    program = tmp_path / "loadgauge"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m loadgauge "$@"\n')
    program.chmod(0o755)
    (tmp_path / "script").write_text(typed("completion bash").out)
    asked = """
. ./script
COMP_WORDS=(loadgauge estimate llama-3.1-4) COMP_CWORD=2
_loadgauge_completion loadgauge
echo "${COMPREPLY[@]}"
"""
    place = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([bash, "-c", asked], cwd=tmp_path, env=place, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["llama-3.1-405b"], done.stderr


def test_nothing_is_greeted_with_three_commands() -> None:
    found = typed("")
    assert (found.code, found.err) == (0, "")
    assert loadgauge.__version__ in found.out
    assert [
        line.removeprefix("  loadgauge ") for line in found.out.splitlines() if line.startswith("  loadgauge ")
    ] == [*FIRST]
    for line in FIRST:
        name, *words = with_verb(shlex.split(line))
        assert name in COMMANDS
        if name == "estimate":
            assert parse(words).gpus == 8
            assert typed(line).code == 0
