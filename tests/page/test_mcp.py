"""Assistants: a client of the protocol gets what the command line answers, and nothing that runs or writes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import document
from loadgauge.page.mcp import answer

ROOT = Path(__file__).parents[2]


def test_a_client_gets_what_the_command_line_answers() -> None:
    pytest.importorskip("mcp.server.mcpserver")
    from mcp import ClientSession
    from mcp.client.stdio import StdioServerParameters, stdio_client

    async def asked() -> tuple[set[str], Any]:
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "loadgauge", "mcp"], env={"PYTHONPATH": str(ROOT / "src")}
        )
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            tools = await session.list_tools()
            flags = {"gpu": "h100-sxm5-80gb", "gpus": 8, "zero": 3, "qlora": False}
            found = await session.call_tool("estimate", {"model": "gpt2", "flags": flags})
            return {tool.name for tool in tools.tools}, found.structured_content

    tools, found = asyncio.run(asked())
    assert tools == {"estimate", "brief", "plan", "why", "convert", "help"}
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
    ],
)
def test_what_cannot_be_answered_is_an_error_of_one_line(subject: str, flags: dict[str, Any], error: str) -> None:
    found = answer("estimate", subject, flags)
    assert found["code"] == 2
    assert error in found["error"]
    assert "\n" not in found["error"]
