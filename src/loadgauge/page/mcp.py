"""`loadgauge mcp`: the same answers for assistants, by the Model Context Protocol over standard input and output."""

import json
import shlex
import subprocess
import sys
from typing import Any

import click

from loadgauge._version import __version__
from loadgauge.core.base import ConfigError, needs_mcp, refuse

Flags = dict[str, Any] | list[str] | str
"""Flags by name, or as words of a command line, or those as text."""
LONGEST = 300
"""Seconds after which an answer is given up."""
WRITES = {"html", "out", "output", "timeline", "export"}
"""Flags that write files, which an assistant is not given."""
TOLD = ("estimate", "plan", "network", "convert")
"""Commands whose flags an assistant may ask for; `brief` has those of `estimate`."""
ABOUT = (
    "Memory, time, cost and parallel layout of training, fine-tuning and serving large language models, before a GPU is rented."
    " Figures are predictions with ranges; say both. Flags are named as on the command line, without dashes:"
    ' {"gpu": "h100", "gpus": 8, "zero": 3, "seq-len": 4096, "qlora": true}, or in one text, "--gpu h100 --qlora".'
    " `help` lists those of a command."
)


def words_of(subject: str, flags: Flags) -> list[str]:
    """Return a subject and its flags as words of a command line. Raises `ConfigError` for what would run or write a file.

    >>> words_of("qwen3-8b", {"qlora": True, "seq_len": 4096, "compile": False, "tp": [1, 2], "gpu": None})
    ['qwen3-8b', '--qlora', '--seq-len', '4096', '--no-compile', '--tp', '1,2']
    >>> words_of("qwen3-8b --qlora", "--seq-len 4096 --price 'a=1, b=2'")
    ['qwen3-8b', '--qlora', '--seq-len', '4096', '--price', 'a=1, b=2']
    """
    try:
        words = shlex.split(subject) if " -" in subject else [subject]
        more = shlex.split(flags) if isinstance(flags, str) else flags
    except ValueError as error:
        raise ConfigError(f"cannot be read as words of a command line: {error}", key="flags") from None
    words += (
        [word for key, value in more.items() for word in _words(key, value)]
        if isinstance(more, dict)
        else map(str, more)
    )
    refuse(
        any(".py:" in word for word in words) or (words[0].startswith("-") and words[0] not in ("-", "--help-all")),
        f"{subject!r} is not a model, a configuration or a job file; functions of a program are not run here",
    )
    for word in words[1:]:
        name = word.partition("=")[0].replace("_", "-").lstrip("-")
        refuse(word.startswith("--") and name in WRITES, "writes a file; ask for it on the command line", key=name)
    return words


def _words(key: str, value: Any) -> list[str]:
    """Return a flag and its value as words; several values have commas between them, and one that is null is not given."""
    name = key.replace("_", "-").lstrip("-")
    if value is None or isinstance(value, bool):
        return [] if value is None else [f"--{name}" if value else f"--no-{name}"]
    refuse(isinstance(value, dict), f'has one value, such as {{"{name}": 8}}', key=name)
    return [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]


def answer(command: str, subject: str, flags: Flags | None, text: str = "", shape: str = "--json") -> dict[str, Any]:
    """Return what a command answers: its exit code (0 yes, 1 no, 2 cannot tell), and its document, text or error.

    text: what it reads from standard input; shape: the flag that chooses the form of the output; empty: text
    """
    try:
        words = words_of(subject, flags or {})
    except ConfigError as error:
        return {"code": 2, "error": str(error)}
    line = [sys.executable, "-m", "loadgauge", command, *words, *([shape] if shape else [])]
    try:
        done = subprocess.run(line, input=text, capture_output=True, text=True, timeout=LONGEST, check=False)
    except subprocess.TimeoutExpired:
        return {"code": 2, "error": f"no answer in {LONGEST} s; narrow the question, such as a plan by its axes"}
    result: dict[str, Any] = {"code": done.returncode}
    if done.stderr.strip():
        result["error"] = done.stderr.strip()
    if done.stdout.strip():
        result["answer"] = json.loads(done.stdout) if shape == "--json" else done.stdout
    return result


def estimate(model: str, flags: Flags | None = None) -> dict[str, Any]:
    """Estimate a job: does it fit, where does every byte go, how long does it take.

    model: a name, a config.json, or a job file of a tool. With the flag task: post-training ("dpo", "grpo", ...) or serving
    ("generate").
    """
    return answer("estimate", model, flags)


def brief(model: str, flags: Flags | None = None) -> dict[str, Any]:
    """The same in ten lines of text: verdict, bars, a step, and the change that makes it fit."""
    return answer("estimate", model, flags, shape="--brief")


def plan(model: str, flags: Flags | None = None) -> dict[str, Any]:
    """Rank the parallel layouts on these GPUs; with the flag find: the longest sequence, the fewest GPUs, the days, ..."""
    return answer("plan", model, flags)


def network(model: str, flags: Flags | None = None) -> dict[str, Any]:
    """Bytes that the links must carry in a step on each axis of a layout, how fast, and whether they can."""
    return answer("network", model, flags)


def why(error: str) -> dict[str, Any]:
    """Explain an out-of-memory error, and what to change. error: the text of the error or its traceback."""
    return answer("why", "-", None, error)


def convert(file: str, to: str) -> dict[str, Any]:
    """A job file in another tool's words. file: its path; to: "trl", "axolotl", "megatron", "deepspeed", "flags", ..."""
    return answer("convert", file, {"to": to}, shape="")


def help(command: str) -> dict[str, Any]:
    """All flags of a command: "estimate", "plan", "network", "convert"."""
    if command not in TOLD:
        return {"code": 2, "error": f"command: must be one of {', '.join(TOLD)}, got {command[:40]!r}"}
    return answer(command, "--help-all", None, shape="")


@click.command("mcp")
def command() -> None:
    """Serve assistants by the Model Context Protocol, over standard input and output; their program starts it.

    Its tools: estimate, brief, plan, network, why, convert, help. No program of a user's is run and no file written. Nothing leaves
    this machine but the answers.

    \b
    loadgauge mcp
    """
    needs_mcp("mcp")
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("loadgauge", instructions=ABOUT, version=__version__)
    for tool in (estimate, brief, plan, network, why, convert, help):
        server.tool()(tool)
    server.run("stdio")
