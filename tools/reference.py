"""Generates the reference pages of the documentation from the code; a hook of MkDocs (`hooks` in mkdocs.yml).

    python tools/reference.py FOLDER     write the same pages as files

Pages: commands.md, farm_toml.md, environment.md, exit_codes.md, json.md. The repository holds none of them, so that no
page is older than the code.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import typing
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from farm.base import errors
from farm.base.config.settings import QNN_PATHS, VARIABLES, Config, _FarmToml
from farm.base.config.toolchains import ToolchainTable
from farm.base.errors import ExitCode
from farm.cli.main import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

_ANSWERS = Path(__file__).parent.parent / "tests/golden/answers"
_ROWS = 40
"""Rows of an example on the page of JSON."""
_FOREIGN = {
    "ADB_SERVER_SOCKET": "address of the adb server, as adb reads it; the next two are its parts",
    "ANDROID_ADB_SERVER_ADDRESS": "host of the adb server",
    "ANDROID_ADB_SERVER_PORT": "port of the adb server",
    "ANDROID_SERIAL": "device of commands without `--device`",
    "NO_COLOR": "no colours in the terminal",
    "COLUMNS": "width of text in place of the terminal's",
    "PYTHON": "interpreter of `farmw`",
}
"""Variables of other programs that farm reads as they do."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to the site."""
    from mkdocs.structure.files import File

    for name, text in pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    return files


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {
        "commands.md": _commands_page(),
        "farm_toml.md": _farm_toml_page(),
        "environment.md": _environment_page(),
        "exit_codes.md": _exit_codes_page(),
        "json.md": _json_page(),
    }


def commands(command: click.Command = cli, path: str = "farm") -> Iterator[tuple[str, click.Command, click.Context]]:
    """Yield each command with its full name, groups before their members."""
    context = click.Context(command, info_name=path, max_content_width=100, terminal_width=100)
    yield path, command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            member = command.get_command(context, name)
            if member is not None and not member.hidden:
                yield from commands(member, f"{path} {name}")


def tables(kind: type[msgspec.Struct], name: str = "") -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Yield each table of farm.toml as it is written, with its type: `[build]`, `[[host]]`, `[soc.NAME]`."""
    yield name, kind
    key = name.strip("[]")
    for field in msgspec.structs.fields(kind):
        inner, is_list, is_map = _struct_in(field.type)
        if field.name == "toolchain":
            inner, is_map = ToolchainTable, True
        if inner is not None:
            path = ".".join(filter(None, (key, field.encode_name, "NAME" * is_map)))
            yield from tables(inner, f"[[{path}]]" if is_list else f"[{path}]")


def meanings(kind: type) -> dict[str, str]:
    """Return the docstring below each attribute of a class and of its bases."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if not one.__module__.startswith("farm."):
            continue
        [body] = [
            node.body
            for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(one) or one)))
            if isinstance(node, ast.ClassDef) and node.name == one.__name__
        ] or [[]]
        for statement, following in pairwise(body):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                found[statement.target.id] = " ".join(str(following.value.value).split())
    return found


def _commands_page() -> str:
    parts = ["# Commands and options", "", "The `--help` of every command."]
    for path, command, context in commands():
        level = min(path.count(" ") + 2, 4)
        text = command.get_help(context).replace("```", "'''")
        parts += ["", f"{'#' * level} {path}", "", "```text", text, "```"]
    return "\n".join([*parts, ""])


def _farm_toml_page() -> str:
    parts = [
        "# Keys of farm.toml",
        "",
        "The file is optional. [Configuration](configuration.md) has an example and the rules for paths and secrets.",
    ]
    of_config = meanings(Config)
    for name, kind in tables(_FarmToml):
        texts = {**of_config, **meanings(kind)} if name == "[qnn]" else meanings(kind)
        keys = [field for field in msgspec.structs.fields(kind) if _struct_in(field.type)[0] is None]
        rows = [
            (f"`{one.encode_name}`", _type_name(one.type), _default(one), texts.get(one.name, ""))
            for one in keys
            if one.name != "toolchain"
        ]
        if rows:
            parts += ["", f"## `{name}`" if name else "## Without a table", ""]
            parts += _table(("key", "type", "default", "meaning"), rows)
    return "\n".join([*parts, ""])


def _environment_page() -> str:
    named = {variable: f"`qnn.{key}` of farm.toml" for key, variable in QNN_PATHS.items() if variable}
    rows = [(f"`{name}`", meaning) for name, meaning in {**VARIABLES, **named, **_FOREIGN}.items()]
    parts = ["# Environment variables", "", "A variable takes precedence over its key of farm.toml.", ""]
    return "\n".join([*parts, *_table(("variable", "meaning"), rows), ""])


def _exit_codes_page() -> str:
    by_code: dict[int, list[str]] = {}
    for one in vars(errors).values():
        if isinstance(one, type) and issubclass(one, errors.FarmError) and one is not errors.FarmError:
            summary = (one.__doc__ or "").strip().partition("\n")[0]
            by_code.setdefault(one.exit_code, []).append(f"`{one.__name__}`: {summary}")
    parts = [
        "# Exit codes",
        "",
        "2 is for usage and configuration alone; 4 and 10 are worth another try.",
        "",
    ]
    rows = [(f"**{one:d}**", one.meaning) for one in ExitCode]
    parts += _table(("code", "meaning"), rows)
    for code, texts in sorted(by_code.items()):
        parts += ["", f"## Errors with exit code {code:d}", "", *(f"* {text}" for text in texts)]
    return "\n".join([*parts, ""])


def _json_page() -> str:
    with_json = [path for path, command, _ in commands() if any("--json" in one.opts for one in command.params)]
    parts = [
        "# JSON",
        "",
        "A command with `--json` prints one JSON document to standard output. `schema` is the version of its layout: a",
        "renamed or removed member raises it, a new member does not. Messages go to standard error.",
        "",
        "Commands with `--json`: " + ", ".join(f"`{path}`" for path in with_json) + ".",
        "",
        "The examples are answers that the tests compare. `...` stands before an item of a list, which has only the",
        "members that differ from the item before it.",
    ]
    shown = set()
    for file in sorted(_ANSWERS.glob("*.txt")):
        for answer in re.split(r"^\$ ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            asked, _, text = answer.partition("\n")
            command = asked.partition("  #")[0]
            name = next((one for one in reversed(with_json) if f"{command} ".startswith(f"{one} ")), "")
            if not name or "--json" not in command or name in shown or not text.startswith(("{", "[")):
                continue
            shown.add(name)
            rows = text.rstrip().splitlines()
            more = [f"... and {len(rows) - _ROWS} rows"] if len(rows) > _ROWS else []
            parts += ["", f"## {name}", "", f"`{command}`", "", "```text", *rows[:_ROWS], *more, "```"]
    return "\n".join([*parts, ""])


def _struct_in(kind: Any) -> tuple[type[msgspec.Struct] | None, bool, bool]:
    """Return the table that a key holds, None for a plain value, and whether it is a list or a map of tables."""
    origin = typing.get_origin(kind)
    for one in (kind, *typing.get_args(kind)):
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            return one, origin is tuple, origin is dict
    return None, False, False


def _type_name(kind: Any) -> str:
    plain = {str: "text", int: "integer", float: "number", bool: "boolean", Any: "any"}
    if kind in plain:
        return plain[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "table"
    if origin is typing.Literal:
        return " or ".join(f"`{one}`" for one in arguments)
    return " or ".join(_type_name(one) for one in arguments if one is not type(None))


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()  # type: ignore[operator]
    if value is None or value in ("", (), {}):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines]


def main(folder: Path) -> None:
    """Write the pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
