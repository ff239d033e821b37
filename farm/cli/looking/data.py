"""`farm data mcp`: the store for assistants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import click

from farm.cli.options import config_option
from farm.cli.output import asked_server, reading

if TYPE_CHECKING:
    from farm.serve.client import Reader


@click.command("mcp")
@config_option
def mcp_command() -> None:
    """Answer requests of the Model Context Protocol on standard input.

    An assistant starts this command and gets a tool for each page of farm serve:
    status, runs, history, diff, devices and others, with the same filters and
    the same JSON. With FARM_SERVER and FARM_TOKEN it reads from the server, and
    gets a tool for each action of the account's role: lease, run, assign and
    others. It ends with its standard input.

    \b
    {"mcpServers": {"farm": {"command": "farm", "args": ["data", "mcp"]}}}
    """
    from farm.serve.mcp_server import serve_mcp

    serve_mcp(partial(_reading, click.get_current_context()), asked_server())


@contextmanager
def _reading(context: click.Context) -> Iterator[Reader]:
    """Yield the reader of one answer; click keeps the context of a command, with its configuration, per thread."""
    with context.scope(cleanup=False), reading() as reader:
        yield reader
