"""Rules for every command: JSON of lists and actions, consent to removals, one verb for them."""

from __future__ import annotations

import io
import sys
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


def _leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield " ".join(path), command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from _leaves(found, (*path, name))


LEAVES = dict(_leaves(cli))
GROUPS = sorted({" ".join(name.split()[:depth]) for name in LEAVES for depth in range(len(name.split()))})
_COLUMNS = 80


def _options(command: click.Command) -> set[str]:
    return {name for param in command.params for name in param.opts}


@pytest.mark.parametrize("name", LEAVES)
def test_a_command_answers_programs(name: str) -> None:
    assert ("--json" in _options(LEAVES[name])) != (name in WITHOUT_JSON), WITHOUT_JSON.get(name)


def test_an_exception_without_a_command_is_not_listed() -> None:
    assert set(WITHOUT_JSON) <= set(LEAVES)


@pytest.mark.parametrize("name", LEAVES)
def test_a_command_that_removes_has_yes(name: str) -> None:
    options = _options(LEAVES[name])
    removes = name.rsplit(maxsplit=1)[-1] in REMOVING or "--remove" in options
    assert ("--yes" in options) == removes
    assert {"delete", "forget", "drop", "erase", "rm"}.isdisjoint(name.split())


@pytest.mark.parametrize("name", [*GROUPS, *LEAVES])
def test_a_help_fits_80_columns_and_cuts_no_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(_COLUMNS))
    result = CliRunner().invoke(cli, [*name.split(), "--help"])
    assert result.exit_code == 0
    usage, _, text = result.output.partition("\n\n")
    assert [line for line in f"{usage}\n{text}".splitlines() if len(line) > _COLUMNS] == []
    listed = text.rpartition("ommands:\n")[2] if name in GROUPS else ""
    assert [line for line in listed.splitlines() if line.endswith("...")] == []


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "is_refused"), [("y\n", False), ("n\n", True), ("\n", True)])
def test_a_terminal_is_asked_before_a_removal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str, *, is_refused: bool
) -> None:
    monkeypatch.setattr(sys, "stdin", _Terminal(answer))
    if is_refused:
        with pytest.raises(click.Abort):
            require_consent("run 1", ["its command"], yes=False)
    else:
        require_consent("run 1", ["its command"], yes=False)
    shown = capsys.readouterr()
    assert shown.err.startswith("its command\n")
    assert "Remove run 1? [y/N]" in shown.out + shown.err


def test_without_a_terminal_yes_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(UsageError, match="^run 1 would be removed: --yes does it$"):
        require_consent("run 1", yes=False)
    require_consent("run 1", yes=True)
