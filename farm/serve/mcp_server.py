"""`farm data mcp`: the pages as tools of the Model Context Protocol, over standard input and output.

A tool is a page: its arguments are the fields of the page's query, its answer is the page's JSON.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from farm import __version__
from farm.base.errors import FarmError, MissingToolError
from farm.serve.pages.all import PAGES
from farm.store.store import open_store

if TYPE_CHECKING:
    from farm.base.config.settings import Config
    from farm.serve.page import Page

_INSTRUCTIONS = (
    "Results of ExecuTorch suites on Snapdragon devices. `infra` is trouble of the farm or a device, never a fault of "
    "the code under test. Numbers of virtual devices are those of a simulator, and not times of a phone."
)
# A model reads the answer: longer ones name the arguments that shorten them.
_MOST_CHARS = 200_000


def serve_mcp(config: Config) -> None:
    """Answer requests on standard input until its end. Raises MissingToolError without the extra `mcp`."""
    try:
        import mcp.server  # noqa: F401 - says whether it is there
    except ModuleNotFoundError:
        from farm.builds.runtime.packages import install_hint

        raise MissingToolError(f"farm data mcp needs another package: {install_hint('mcp')}") from None
    asyncio.run(_serve(config))


async def _serve(config: Config) -> None:
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server
    from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

    pages = {name_of(page): page for page in PAGES}

    async def list_tools(*_: Any) -> ListToolsResult:
        return ListToolsResult(tools=[
            Tool(name=name, description=page.make.__doc__, input_schema=schema_of(page)) for name, page in pages.items()
        ])  # fmt: skip

    async def call_tool(_: Any, params: Any) -> CallToolResult:
        try:
            text = await asyncio.to_thread(answer, config, pages, params.name, params.arguments or {})
        except (FarmError, msgspec.ValidationError) as error:
            return CallToolResult(content=[TextContent(type="text", text=str(error))], is_error=True)
        return CallToolResult(content=[TextContent(type="text", text=text)])

    server = Server("farm", version=__version__, instructions=_INSTRUCTIONS, on_list_tools=list_tools,
                    on_call_tool=call_tool)  # fmt: skip
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def answer(config: Config, pages: dict[str, Page], name: str, arguments: dict[str, Any]) -> str:
    """Return the JSON of a page. Raises FarmError, ValidationError."""
    page = pages.get(name)
    if page is None:
        raise FarmError(f"no tool is called {name[:40]!r}: there are {', '.join(pages)}")
    query = msgspec.convert(arguments, page.query)
    with open_store(config.store_url, readonly=True) as store:
        facts = page.make(store, query)
    text = msgspec.json.encode(facts).decode()
    if len(text) > _MOST_CHARS:
        fields = ", ".join(page.query.__struct_fields__)
        raise FarmError(f"{name}: the answer has {len(text):,} characters, over {_MOST_CHARS:,}: narrow it by {fields}")
    return text


def name_of(page: Page) -> str:
    """Return the name of a page's tool: `runs` for `runs_page`."""
    return page.make.__name__.removesuffix("_page")


def schema_of(page: Page) -> dict[str, Any]:
    """Return the JSON schema of a page's query."""
    schema = msgspec.json.schema(page.query)
    found: dict[str, Any] = schema["$defs"][schema["$ref"].rpartition("/")[2]]
    return found
