"""`farm data mcp`."""

from __future__ import annotations

from pathlib import Path

import click

from farm.base.config.settings import load_config
from farm.cli.options import config_option


@click.command("mcp")
@config_option
def command(config_file: Path | None) -> None:
    """Answer requests of the Model Context Protocol on standard input, read only.

    An assistant starts this command and gets a tool for each page of farm serve:
    status, runs, history, diff, devices and others, with the same filters and
    the same JSON. It ends with its standard input.

    \b
    {"mcpServers": {"farm": {"command": "farm", "args": ["data", "mcp"]}}}
    """
    from farm.serve.mcp_server import serve_mcp

    serve_mcp(load_config(config_file))
