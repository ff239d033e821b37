"""Rules for every command: JSON, consent to removals, one verb for them, and one meaning for each option's name."""

from __future__ import annotations

import io
import sys
from collections import defaultdict
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from farm.base.errors import UsageError
from farm.cli.main import cli
from farm.cli.output import require_consent

WITHOUT_JSON = {
    "shell": "the device's shell has standard output",
    "devices shell": "the device's shell has standard output",
    "devices adb": "adb has standard output",
    "devices connect": "the command on the device has standard output",
    "setup completion": "prints a script for a shell",
    "data mcp": "answers a client in a protocol of its own",
}
REMOVING = {"remove", "prune", "clear"}
REMOVING_WITHOUT_A_VALUE = {"devices name", "devices label"}


def _below(command: click.Command, path: str = "") -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if (found := command.get_command(context, name)) is not None:
                yield from _below(found, f"{path} {name}".strip())


# Options whose value differs between commands, and the reason.
EXCEPTIONS = {
    "--output": "exec writes a folder of outputs, data export one file",
    "--resume": "run names the run; nightly continues the last one of its file",
    "--state": "exec: connection of outputs to inputs; alerts: state of an alert",
    "--checkout": "compare takes sources with suffixes, bisect a folder",
    "--profile": "exec has fewer levels",
    "--purpose": "runs list also finds runs of older farms",
    "--until": "alerts assign takes a day; a rented host a time from now",
    "--remove": "lab accounts names the account; lab quota is given the user already",
    "--config": "before the command its file is not checked yet",
}

COMMANDS = dict(_below(cli))
LEAVES = {name: command for name, command in COMMANDS.items() if not isinstance(command, click.Group)}
_COLUMNS = 80


def _options(command: click.Command) -> set[str]:
    return {name for param in command.params for name in param.opts}


def test_a_command_answers_programs() -> None:
    assert {name for name, command in LEAVES.items() if "--json" not in _options(command)} == WITHOUT_JSON.keys()


def test_a_command_that_removes_has_yes() -> None:
    for name, command in LEAVES.items():
        options = _options(command)
        removes = name.rsplit(maxsplit=1)[-1] in REMOVING or "--remove" in options or name in REMOVING_WITHOUT_A_VALUE
        assert ("--yes" in options) == removes, name
        assert {"delete", "forget", "drop", "erase", "rm"}.isdisjoint(name.split())


def test_a_help_fits_80_columns_and_cuts_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(_COLUMNS))
    for name in COMMANDS:
        result = CliRunner().invoke(cli, [*name.split(), "--help"], prog_name="farm")
        assert result.exit_code == 0
        assert [line for line in result.output.splitlines() if len(line) > _COLUMNS] == [], name
        listed = result.output.rpartition("ommands:\n")[2] if name not in LEAVES else ""
        assert [line for line in listed.splitlines() if line.endswith("...")] == [], name


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_asked_before_a_removal_and_elsewhere_yes_is_required(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", _Terminal("y\nn\n\n"))
    require_consent("run 1", ["its command"], yes=False)
    shown = capsys.readouterr()
    assert shown.err.startswith("its command\n")
    assert "Remove run 1? [y/N]" in shown.out + shown.err
    for _ in range(2):
        with pytest.raises(click.Abort):
            require_consent("run 1", ["its command"], yes=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(UsageError, match="^run 1 would be removed: --yes does it$"):
        require_consent("run 1", yes=False)
    require_consent("run 1", yes=True)


def test_an_option_takes_the_same_kind_of_value_in_every_command() -> None:
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path, command in COMMANDS.items():
        for option in command.params:
            if isinstance(option, click.Option):
                kind = "switch" if option.is_flag else type(option.type).__name__
                if isinstance(option.type, click.Choice):
                    kind = f"one of {', '.join(map(str, option.type.choices))}"
                for name in option.opts:
                    found[name][kind].append(path)
    differing = {name: dict(kinds) for name, kinds in found.items() if len(kinds) > 1}
    assert {name: kinds for name, kinds in differing.items() if name not in EXCEPTIONS} == {}
    assert EXCEPTIONS.keys() <= differing.keys(), "an exception without a difference"
