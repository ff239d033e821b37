"""`farm data sql` and `farm data mcp`: the store for queries and for assistants."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import click

from farm.base.errors import UsageError
from farm.base.text import one_line, spelled
from farm.cli.options import config_option, is_json, json_option, limit_option, timeout_option
from farm.cli.output import asked_server, echo, notice, opened, print_json, reading
from farm.report.terminal.layout import columns

if TYPE_CHECKING:
    from farm.serve.client import Reader


# `farm data sql`.


_CELL = 60


@click.command("sql")
@click.argument("query")
@timeout_option("Time limit of the query, which then ends on the server as well.", 60.0, 86_400)
@limit_option("Most rows.", 1000)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with a header instead of a table.")
@json_option("Print JSON instead of a table.")
def sql_command(query: str, limit: int, timeout_s: float, *, as_csv: bool) -> None:
    """Query the store in SQL, read-only; a QUERY of - is read from standard input.

    \b
    farm data sql "SELECT verdict, count(*) FROM attempt GROUP BY verdict"

    QUERY is one SELECT, with or without WITH, or VALUES. Tables: docs/reference/store.md. The SQL dialect is SQLite's
    or PostgreSQL's, depending on the store. Samples are shown as hexadecimal digits; control characters and invisible
    characters are spelled out.
    """
    if as_csv and is_json():
        raise UsageError("--csv or --json, one of the two")
    text = sys.stdin.read() if query == "-" else query
    if not text.strip():
        raise UsageError("an empty query: give it as an argument, or with - on standard input")
    with opened(readonly=True) as (_, store):
        names, rows = store.ask(text, limit + 1, timeout_s)
    more, rows = len(rows) > limit, rows[:limit]
    plain = [[_plain(value) for value in row] for row in rows]
    if is_json():
        print_json({"columns": names, "rows": plain, "more": more})
    elif as_csv:
        stream = io.StringIO()
        lines: list[Sequence[object]] = [names, *plain]
        visible = ([spelled(cell) if isinstance(cell, str) else cell for cell in line] for line in lines)
        csv.writer(stream, lineterminator="\n").writerows(visible)
        echo(stream.getvalue(), nl=False)
    else:
        right = {n for n in range(len(names)) if any(isinstance(row[n], int | float) for row in plain)}
        table = [list(map(one_line, names)), *([_cell(value) for value in row] for row in plain)]
        echo("\n".join(columns(table, right)))
    if more:
        notice(f"there are more than {limit} rows: --limit")


def _plain(value: object) -> object:
    """Return a value of a database as JSON and CSV have it: other types become text."""
    if isinstance(value, (bytes, memoryview)):
        return bytes(value).hex()
    return value if value is None or isinstance(value, (str, int, float, list, dict)) else str(value)


def _cell(value: object) -> str:
    return "" if value is None else one_line(str(value), _CELL)


# `farm data mcp`.


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
