"""Assistants: a client of the protocol gets what the command line answers, and nothing that runs or writes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import document
from loadgauge.page.mcp import answer, help as answer_of_help

ROOT = Path(__file__).parents[2]


def test_a_client_gets_what_the_command_line_answers() -> None:
    pytest.importorskip("mcp.server.mcpserver")
    from mcp import ClientSession
    from mcp.client.stdio import StdioServerParameters, stdio_client

    async def asked() -> tuple[set[str], Any, list[Any], Any]:
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "loadgauge", "mcp"], env={"PYTHONPATH": str(ROOT / "src")}
        )
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            tools = await session.list_tools()
            flags = {"gpu": "h100-sxm5-80gb", "gpus": 8, "zero": 3, "qlora": False}
            found = await session.call_tool("estimate", {"model": "gpt2", "flags": flags})
            line = "--gpu h100-sxm5-80gb --gpus 8 --zero 3 --no-qlora"
            ways = [("gpt2", line), ("gpt2", line.split()), (f"gpt2 {line}", None), ("gpt2", flags | {"price": None})]
            same = [await session.call_tool("estimate", {"model": name, "flags": way}) for name, way in ways]
            links = await session.call_tool("network", {"model": "gpt2", "flags": line})
            names = {tool.name for tool in tools.tools}
            return names, found.structured_content, [each.structured_content for each in same], links.structured_content

    tools, found, same, links = asyncio.run(asked())
    assert tools == {"estimate", "brief", "plan", "network", "why", "convert", "help"}
    assert same == [found] * 4
    assert links["answer"]["needs"]
    typed = document("estimate gpt2 --gpu h100-sxm5-80gb --gpus 8 --zero 3 --no-qlora")
    assert found["code"] == 0
    assert found["answer"]["memory"] == typed["memory"]


@pytest.mark.parametrize(
    ("subject", "flags", "error"),
    [
        ("train.py:main", {}, "are not run here"),
        ("--html=x", {}, "are not run here"),
        ("gpt2", {"html": "x.html"}, "writes a file"),
        ("gpt2", {"gpu": "h1000"}, "h1000"),
        ("gpt2", "--gpu h100 --html=x.html", "writes a file"),
        ("gpt2 --out x", {}, "writes a file"),
        ("gpt2", ["--model", "train.py:main"], "are not run here"),
        ("gpt2", "--gpu 'h100", "No closing quotation"),
        ("gpt2", {"gpu": {"name": "h100"}}, "one value"),
    ],
)
def test_what_cannot_be_answered_is_an_error_of_one_line(subject: str, flags: Any, error: str) -> None:
    found = answer("estimate", subject, flags)
    assert found["code"] == 2
    assert error in found["error"]
    assert "\n" not in found["error"]


def test_the_flags_of_another_command_are_not_those_of_estimate() -> None:
    assert "loadgauge network" in answer_of_help("network")["answer"]
    assert "must be one of" in answer_of_help("serve")["error"]
