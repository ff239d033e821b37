"""`farm data mcp`: pages and actions as tools of the Model Context Protocol, over standard input and output.

A tool is a page: its arguments are the fields of the page's query, its answer is the page's JSON. With a server further
tools are the actions that the account of its token may perform.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from farm import __version__
from farm.base.errors import FarmError, MissingToolError
from farm.base.toml_tables import prepare_decoders
from farm.serve.pages.all import PAGES

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from farm.serve.client import Reader, Server
    from farm.serve.page import Facts, Page

    Reading = Callable[[], AbstractContextManager[Reader]]

_INSTRUCTIONS = (
    "Results of ExecuTorch suites on Snapdragon devices. `infra` is trouble of the farm or a device, never a fault of "
    "the code under test. Numbers of virtual devices come from a simulator, and are not times of a phone. Tools whose "
    "names begin with `action_` change the farm in the name of an account."
)
# A model reads the answer: longer ones name the arguments that shorten them.
_MOST_CHARS = 200_000
# Files are not for a model.
_NO_TOOLS = ("upload",)


class ToolSpec(NamedTuple):
    """Tool: its text, the type of its arguments, and the function that answers it."""

    about: str
    asked: type[msgspec.Struct]
    call: Callable[[Any], msgspec.Struct]
    only_reads: bool


def serve_mcp(reading: Reading, server: Server | None) -> None:
    """Answer requests on standard input until its end; `reading` yields the reader of one answer.

    Raises MissingToolError without the extra `mcp`, InfraError and UsageError for a server that refuses the token.
    """
    try:
        import mcp.server  # noqa: F401 - says whether it is there
    except ModuleNotFoundError:
        from farm.builds.runtime.packages import install_hint

        raise MissingToolError(f"farm data mcp needs another package: {install_hint('mcp')}") from None
    # Each request is answered in a thread of its own.
    prepare_decoders()
    asyncio.run(_serve(tools_of(reading, server)))


async def _serve(known: dict[str, ToolSpec]) -> None:
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server
    from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool, ToolAnnotations

    async def list_tools(*_: Any) -> ListToolsResult:
        return ListToolsResult(tools=[
            Tool(name=name, description=one.about, input_schema=schema_of(one.asked),
                 annotations=ToolAnnotations(read_only_hint=one.only_reads))
            for name, one in known.items()
        ])  # fmt: skip

    async def call_tool(_: Any, params: Any) -> CallToolResult:
        try:
            text = await asyncio.to_thread(answer, known, params.name, params.arguments or {})
        except (FarmError, msgspec.ValidationError) as error:
            return CallToolResult(content=[TextContent(type="text", text=str(error))], is_error=True)
        return CallToolResult(content=[TextContent(type="text", text=text)])

    server = Server("farm", version=__version__, instructions=_INSTRUCTIONS, on_list_tools=list_tools,
                    on_call_tool=call_tool)  # fmt: skip
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def tools_of(reading: Reading, server: Server | None) -> dict[str, ToolSpec]:
    """Return the tools by name. Raises InfraError, UsageError."""
    found = {
        name_of(page): ToolSpec(str(page.make.__doc__), page.query, partial(_read, reading, page), only_reads=True)
        for page in PAGES
    }
    if server is not None:
        from farm.serve.actions import ACTIONS

        account = server.account()
        for action in ACTIONS:
            if account.name and account.role.may(action.role) and action.name not in _NO_TOOLS:
                about, call = str(action.perform.__doc__), partial(_act, server, action.name)
                found[f"action_{action.name}"] = ToolSpec(about, action.asked, call, only_reads=False)
    return found


def answer(known: dict[str, ToolSpec], name: str, arguments: dict[str, Any]) -> str:
    """Return the JSON of a page or of an action. Raises FarmError, ValidationError."""
    one = known.get(name)
    if one is None:
        raise FarmError(f"no tool is called {name[:40]!r}: there are {', '.join(known)}")
    text = msgspec.json.encode(one.call(msgspec.convert(arguments, one.asked))).decode()
    if len(text) > _MOST_CHARS:
        fields = ", ".join(one.asked.__struct_fields__)
        raise FarmError(f"{name}: the answer has {len(text):,} characters, over {_MOST_CHARS:,}: narrow it by {fields}")
    return text


def _read(reading: Reading, page: Page, query: msgspec.Struct) -> Facts:
    with reading() as reader:
        return reader.read(page.make, query)


def _act(server: Server, action: str, asked: msgspec.Struct) -> msgspec.Struct:
    return server.act(action, **msgspec.to_builtins(asked))


def name_of(page: Page) -> str:
    """Return the name of a page's tool: `runs` for `runs_page`."""
    return page.make.__name__.removesuffix("_page")


def schema_of(asked: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments."""
    schema = msgspec.json.schema(asked)
    found: dict[str, Any] = schema["$defs"][schema["$ref"].rpartition("/")[2]]
    return found
