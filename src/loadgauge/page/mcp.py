"""`loadgauge mcp`: the same answers for assistants, by the Model Context Protocol over standard input and output."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import click

from loadgauge._version import __version__
from loadgauge.core.base import ConfigError, needs_mcp

Flags = dict[str, str | int | float | bool]
LONGEST = 300
"""Seconds after which an answer is given up."""
WRITES = {"html", "out", "output", "timeline", "export"}
"""Flags that write files, which an assistant is not given."""
ABOUT = (
    "Memory, time, cost and parallel layout of training, fine-tuning and serving large language models, before a GPU is rented."
    " Figures are predictions with ranges; say both. Flags are named as on the command line, without dashes:"
    ' {"gpu": "h100", "gpus": 8, "zero": 3, "seq-len": 4096, "qlora": true}. `help` lists those of a command.'
)


def words_of(subject: str, flags: Flags) -> list[str]:
    """Return a subject and its flags as words of a command line. Raises `ConfigError` for what would run or write a file.

    >>> words_of("qwen3-8b", {"qlora": True, "seq_len": 4096, "compile": False})
    ['qwen3-8b', '--qlora', '--seq-len', '4096', '--no-compile']
    """
    if ".py:" in subject or (subject.startswith("-") and subject not in ("-", "--help-all")):
        raise ConfigError(
            f"{subject!r} is not a model, a configuration or a job file; functions of a program are not run here"
        )
    words = [subject]
    for key, value in flags.items():
        name = key.replace("_", "-").lstrip("-")
        if name in WRITES:
            raise ConfigError("writes a file; ask for it on the command line", key=name)
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", str(value)]
    return words


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


def why(error: str) -> dict[str, Any]:
    """Explain an out-of-memory error, and what to change. error: the text of the error or its traceback."""
    return answer("why", "-", None, error)


def convert(file: str, to: str) -> dict[str, Any]:
    """A job file in another tool's words. file: its path; to: "trl", "axolotl", "megatron", "deepspeed", "flags", ..."""
    return answer("convert", file, {"to": to}, shape="")


def help(command: str) -> dict[str, Any]:
    """All flags of a command: "estimate", "plan", "convert"."""
    return answer(command if command in ("estimate", "plan", "convert") else "estimate", "--help-all", None, shape="")


@click.command("mcp")
def command() -> None:
    """Serve assistants by the Model Context Protocol, over standard input and output; their program starts it.

    Its tools: estimate, brief, plan, why, convert, help. No program of a user's is run and no file written. Nothing leaves
    this machine but the answers.

    \b
    loadgauge mcp
    """
    needs_mcp("mcp")
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("loadgauge", instructions=ABOUT, version=__version__)
    for tool in (estimate, brief, plan, why, convert, help):
        server.tool()(tool)
    server.run("stdio")
