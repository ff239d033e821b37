"""Where the result of a command goes: text or JSON on standard output, files where asked."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import click
import msgspec

from farm.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from farm.store.view import RunView


def deliver(view: RunView, *, report: Path, html: Path | None, junitxml: Path | None, as_json: bool) -> None:
    """Print the run and write the files. Raises UsageError for a file that cannot be written."""
    if html is not None:
        write_file(html, report.read_text(encoding="utf-8"))
    if junitxml is not None:
        from farm.report.junit import render_junit

        write_file(junitxml, render_junit(view))
    if as_json:
        from farm.report.data import render_json

        click.echo(render_json(view))
        return
    from farm.report.text import render_summary

    width = shutil.get_terminal_size().columns
    click.echo(render_summary(view, width, color=sys.stdout.isatty()))
    click.echo(f"report: {html or report}")


def json_text(answer: Mapping[str, object]) -> str:
    """Return what a command answers as JSON, with the version of its layout."""
    return msgspec.json.format(msgspec.json.encode({"schema": 1, **answer})).decode()


def print_json(answer: Mapping[str, object]) -> None:
    """Print what a command answers as JSON, with the version of its layout."""
    click.echo(json_text(answer))


def write_file(path: Path, text: str) -> None:
    """Write a file that the user named, and its folder. Raises UsageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
