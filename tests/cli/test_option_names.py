"""Option names have one meaning: a name of the command tree takes the same kind of value in every command."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import click

from farm.cli.main import cli

# Options whose value differs between commands, and the reason.
EXCEPTIONS = {
    "--output": "exec writes a folder of outputs, data export one file",
    "--resume": "run names the run; nightly continues the last one of its file",
    "--seconds": "time under load in whole seconds; a fault of a virtual device also takes fractions and offsets",
    "--state": "exec: connection of outputs to inputs; alerts: state of an alert",
    "--checkout": "compare takes sources with suffixes, bisect a folder",
    "--profile": "exec has fewer levels",
    "--purpose": "runs list also finds runs of older farms",
    "--until": "alerts assign takes a day; a rented host a time from now",
    "--remove": "lab accounts names the account; lab quota is given the user already",
    "--config": "before the command its file is not checked yet",
}


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        for name in command.list_commands(context):
            if (found := command.get_command(context, name)) is not None:
                yield from _commands(found, f"{path} {name}".strip())


def _options() -> dict[str, dict[str, list[str]]]:
    """Return kinds of values and their commands, by the name of an option."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path, command in _commands(cli, ""):
        for option in command.params:
            if isinstance(option, click.Option):
                kind = "switch" if option.is_flag else type(option.type).__name__
                if isinstance(option.type, click.Choice):
                    kind = f"one of {', '.join(map(str, option.type.choices))}"
                for name in option.opts:
                    found[name][kind].append(path)
    return found


def test_an_option_takes_the_same_kind_of_value_in_every_command() -> None:
    differing = {name: dict(kinds) for name, kinds in _options().items() if len(kinds) > 1}
    assert {name: kinds for name, kinds in differing.items() if name not in EXCEPTIONS} == {}


def test_an_exception_without_a_difference_is_not_listed() -> None:
    assert [name for name in EXCEPTIONS if len(_options()[name]) < 2] == []
