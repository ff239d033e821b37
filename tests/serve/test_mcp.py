"""`farm data mcp`: an assistant's client of the official SDK over standard input and output."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from farm_home import FarmHome
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from farm.serve.mcp_server import name_of, schema_of
from farm.serve.pages.all import PAGES

if TYPE_CHECKING:
    from conftest import Filled, Server


def test_an_assistant_reads_what_the_pages_have(home: FarmHome, filled: Filled, server: Server) -> None:
    async def talk() -> dict[str, Any]:
        command = StdioServerParameters(
            command=sys.executable, args=["-m", "farm.cli.main", "data", "mcp"], env=home.env, cwd=str(home.cwd)
        )
        async with stdio_client(command) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            calls = {
                "runs": ("runs", {"limit": 2}),
                "status": ("status", {}),
                "unknown": ("devices", {"soc": 7}),
                "nothing": ("history", {"job": "no/such"}),
                "none": ("rm", {}),
            }
            listed = (await session.list_tools()).tools
            return {"tools": listed} | {key: await session.call_tool(*call) for key, call in calls.items()}

    found = asyncio.run(talk())
    assert {tool.name for tool in found["tools"]} == {name_of(page) for page in PAGES}
    assert all(tool.description for tool in found["tools"])
    runs = json.loads(found["runs"].content[0].text)
    assert [one["run_id"] for one in runs["runs"]] == [filled.live, filled.runs[-1]]
    assert json.loads(found["status"].content[0].text)["status"] == server.json("/")["status"]
    assert found["unknown"].is_error
    assert "soc" in found["unknown"].content[0].text
    assert "no tool is called 'rm'" in found["none"].content[0].text


def test_each_page_is_a_tool_with_the_limits_of_its_query() -> None:
    schemas = {name_of(page): schema_of(page) for page in PAGES}
    assert schemas["runs"]["properties"]["limit"]["maximum"] == 100
    assert schemas["device"]["required"] == ["device"]
    assert all(schema["type"] == "object" for schema in schemas.values())
