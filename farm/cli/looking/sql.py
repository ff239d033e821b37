"""`farm sql`."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.cli.options import config_option
from farm.cli.output import echo, print_json
from farm.config.settings import load_config
from farm.errors import UsageError
from farm.system.text import one_line, spelled

if TYPE_CHECKING:
    from collections.abc import Sequence

_CELL = 60


@click.command("sql")
@click.argument("query")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(1, 86_400),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Longest that the query may take; then it is ended, on the server too.",
)
@click.option("--limit", type=click.IntRange(min=1), default=1000, show_default=True, help="Most rows.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with a header instead of a table.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@config_option
def command(query: str, limit: int, timeout_s: float, config_file: Path | None, *, as_csv: bool, as_json: bool) -> None:
    """Ask the store one question in SQL, read only; a QUERY of - is read from standard input.

    \b
    farm sql "SELECT verdict, count(*) FROM attempt GROUP BY verdict"

    QUERY is one SELECT, with or without WITH, or VALUES. docs/store.md has the tables. It is the SQL of the database
    that the store is in, SQLite or PostgreSQL. Samples are shown as hexadecimal digits, and characters that a terminal
    would obey or not show are spelled out.
    """
    if as_csv and as_json:
        raise UsageError("--csv or --json, one of the two")
    from farm.store.store import open_store

    text = sys.stdin.read() if query == "-" else query
    if not text.strip():
        raise UsageError("an empty query: give it as an argument, or with - on standard input")
    with open_store(load_config(config_file).store_url, readonly=True) as store:
        columns, rows = store.ask(text, limit + 1, timeout_s)
    more, rows = len(rows) > limit, rows[:limit]
    plain = [[_plain(value) for value in row] for row in rows]
    if as_json:
        print_json({"columns": columns, "rows": plain, "more": more})
    elif as_csv:
        stream = io.StringIO()
        lines: list[Sequence[object]] = [columns, *plain]
        visible = ([spelled(cell) if isinstance(cell, str) else cell for cell in line] for line in lines)
        csv.writer(stream, lineterminator="\n").writerows(visible)
        echo(stream.getvalue(), nl=False)
    else:
        echo("\n".join(_table(columns, plain)))
    if more:
        echo(f"farm: there are more than {limit} rows: --limit", err=True)


def _plain(value: object) -> object:
    """Return a value of a database as what JSON and CSV have: types that they lack become text."""
    if isinstance(value, (bytes, memoryview)):
        return bytes(value).hex()
    return value if value is None or isinstance(value, (str, int, float, list, dict)) else str(value)


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    right = [any(isinstance(row[n], int | float) for row in rows) for n in range(len(columns))]
    table = [[one_line(name) for name in columns], *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if at_right else cell.ljust(width)
            for cell, width, at_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in table
    ]


def _cell(value: object) -> str:
    return "" if value is None else one_line(str(value), _CELL)
