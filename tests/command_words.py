"""Words of a command line of farm -> its command and its unknown words."""

from __future__ import annotations

import re

import click

from farm.cli.main import cli


def called_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that `words` begin with, and the other words."""
    command: click.Command = cli
    while isinstance(command, click.Group) and words and (found := command.get_command(click.Context(cli), words[0])):
        command, words = found, words[1:]
    return command, words


def fault(words: list[str]) -> str:
    """Return the first of `words`, which begin with `farm`, that the command line does not have; empty for none."""
    command, rest = called_command(words[1:])
    if isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        return rest[0]
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help", "-h"}
    mine = rest[: rest.index("--")] if "--" in rest else rest
    return next((word for word in mine if re.match(r"-{1,2}[A-Za-z]", word) and word.split("=")[0] not in options), "")
