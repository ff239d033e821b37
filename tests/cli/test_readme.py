"""The README's list of commands fits what `farm --help` has, and every page of the documentation is linked."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from farm.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


def listed() -> list[list[str]]:
    """The words of every command in the list, without what is said of it."""
    block = README.read_text(encoding="utf-8").split("## What it does", 1)[1].split("```")[1]
    lines = [re.split(r" {2,}", line)[0] for line in block.strip().splitlines()]
    return [command.split() for line in lines if line for command in line.split("; ")]


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that words begin with, and the words that are left."""
    command, context, rest = cli, click.Context(cli, info_name="farm"), words[1:]
    while isinstance(command, click.Group) and rest:
        found = command.get_command(context, rest[0])
        if found is None:
            break
        command, rest = found, rest[1:]
    return command, rest


@pytest.mark.parametrize("words", listed(), ids=" ".join)
def test_a_command_of_the_list_is_one_with_such_options(words: list[str]) -> None:
    assert words[0] == "farm"
    command, rest = command_of(words)
    assert command is not cli
    if words[1:3] in (["run", "list"], ["run", "delete"]):
        return
    is_a_command_as_well = isinstance(command, click.Group) and command.invoke_without_command
    assert is_a_command_as_well or not (isinstance(command, click.Group) and rest), "no such command in it"
    mine = rest[: rest.index("--")] if "--" in rest else rest
    options = {name for param in command.params for name in param.opts}
    assert {word for word in mine if re.match(r"-{1,2}[a-z]", word)} <= options


def test_the_list_has_every_command_of_the_help() -> None:
    in_help = set(cli.list_commands(click.Context(cli)))
    assert in_help == {words[1] for words in listed()}


def test_every_linked_page_of_the_documentation_is_there() -> None:
    linked = set(re.findall(r"\]\((docs/[\w./]+)", README.read_text(encoding="utf-8")))
    assert linked
    assert all((ROOT / page).is_file() for page in linked)
