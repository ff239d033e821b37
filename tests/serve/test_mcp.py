"""`farm data mcp`: an assistant's client of the official SDK over standard input and output."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine
from typing import Any

import pytest
from farm_home import FarmHome
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from farm.serve import mcp_server
from farm.serve.actions import ACTIONS
from farm.serve.mcp_server import name_of, schema_of, serve_mcp
from farm.serve.pages.all import PAGES
from farm.store.accounts import Role

from .conftest import Filled, Server


def talk(home: FarmHome, calls: dict[str, tuple[str, dict[str, Any]]], **env: str) -> dict[str, Any]:
    """Return the tools, and the results of calls by their keys."""

    async def talking() -> dict[str, Any]:
        command = StdioServerParameters(
            command=sys.executable, args=["-m", "farm.cli.main", "data", "mcp"], env=home.env | env, cwd=str(home.cwd)
        )
        async with stdio_client(command) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            listed = (await session.list_tools()).tools
            return {"tools": listed} | {key: await session.call_tool(*call) for key, call in calls.items()}

    return asyncio.run(talking())


def test_an_assistant_reads_what_the_pages_have(home: FarmHome, filled: Filled, server: Server) -> None:
    calls = {
        "runs": ("runs", {"limit": 2}),
        "status": ("status", {}),
        "unknown": ("devices", {"soc": 7}),
        "nothing": ("history", {"job": "no/such"}),
        "none": ("rm", {}),
    }
    found = talk(home, calls)
    assert {tool.name for tool in found["tools"]} == {name_of(page) for page in PAGES}
    assert all(tool.description and tool.annotations.read_only_hint for tool in found["tools"])
    runs = json.loads(found["runs"].content[0].text)
    assert [one["run_id"] for one in runs["runs"]] == [filled.live, filled.runs[-1]]
    assert json.loads(found["status"].content[0].text)["status"] == server.json("/")["status"]
    assert found["unknown"].is_error
    assert "soc" in found["unknown"].content[0].text
    assert "no tool is called 'rm'" in found["none"].content[0].text


def test_an_assistant_acts_as_the_account_of_its_token_may(home: FarmHome, filled: Filled, server: Server) -> None:
    token = filled.store.accounts.add("ada", Role.DEVELOPER)
    calls = {
        "lease": ("action_lease", {"device": "pixel-left", "seconds": 600}),
        "disable": ("action_disable", {"device": "pixel-left"}),
        "runs": ("runs", {"limit": 2}),
    }
    there = {"FARM_SERVER": server.url, "FARM_STATE_DIR": str(home.cwd / "elsewhere")}
    found = talk(home, calls, **there, FARM_TOKEN=token)
    acts = {tool.name for tool in found["tools"] if not tool.annotations.read_only_hint}
    allowed = {action.name for action in ACTIONS if Role.DEVELOPER.may(action.role)} - {"upload"}
    assert acts == {f"action_{name}" for name in allowed}
    assert json.loads(found["runs"].content[0].text)["runs"][0]["run_id"] == filled.live
    assert not found["lease"].is_error
    assert "no tool is called 'action_disable'" in found["disable"].content[0].text
    assert [one.reserved_for for one in filled.store.leases.all()] == ["ada"]


def test_each_page_is_a_tool_with_the_limits_of_its_query() -> None:
    schemas = {name_of(page): schema_of(page.query) for page in PAGES}
    assert schemas["runs"]["properties"]["limit"]["maximum"] == 100
    assert schemas["device"]["required"] == ["device"]
    assert all(schema["type"] == "object" for schema in schemas.values())


def test_the_types_of_answers_are_ready_before_threads_decode_them(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def serve(served: Coroutine[Any, Any, None]) -> None:
        served.close()
        done.append("served")

    monkeypatch.setattr(mcp_server, "prepare_decoders", lambda: done.append("prepared"))
    monkeypatch.setattr(asyncio, "run", serve)
    serve_mcp(lambda: pytest.fail("nothing is read"), None)
    assert done == ["prepared", "served"]
