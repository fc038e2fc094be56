"""docs/measure.md: what it shows is what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from command_line import typed
from loadgauge.core.command_line.main import COMMANDS, commands

PAGE = (Path(__file__).parents[3] / "docs" / "measure.md").read_text(encoding="utf-8")
SHOWN = [block.strip("\n") for block in re.findall(r"```\n(\$ .*?)```", PAGE, re.DOTALL)]
LINES = [line[2:] for block in SHOWN for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("line", LINES)
def test_commands_and_their_flags_exist(line: str) -> None:
    words = shlex.split(line)
    words = words[words.index("loadgauge") + 1 :]
    assert words[0] in COMMANDS
    command = commands.get_command(None, words[0])  # type: ignore[arg-type]
    assert command is not None
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= known


@pytest.mark.parametrize("command", ["saved", "compare"])
@pytest.mark.long
def test_outputs_are_real(command: str) -> None:
    """Every line shown, in order; dots stand for lines that are left out."""
    block = next(block for block in SHOWN if block.startswith(f"$ loadgauge {command}"))
    line, *shown = block.splitlines()
    printed = [one.rstrip() for one in typed(line.removeprefix("$ loadgauge ")).out.splitlines()]
    place = 0
    for one in shown:
        if one != "...":
            assert one.rstrip() in printed[place:], one
            place = printed.index(one.rstrip(), place) + 1
