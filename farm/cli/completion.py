"""Completion in bash, zsh and fish: commands, options and known values.

Every Tab starts this module, so it imports little and waits for no other process. Errors yield no completions.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    shell_complete,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farm.base.config.settings import Config

VARIABLE = "_FARM_COMPLETE"
"""Variable with which the functions of the shells call `farm`."""
SHELLS = ("bash", "zsh", "fish")

# Names are inserted into the command line unquoted, so only names without special characters are offered.
_WORD = re.compile(r"[A-Za-z0-9_./@~+:=,\[\]-]{1,250}")


class _Bash(BashComplete):
    # click's template expands patterns such as ids of jobs, and prints errors of a `farm` that was removed.
    source_template = """\
%(complete_func)s() {
    local kind value
    COMPREPLY=()
    while IFS=',' read -r kind value; do
        case $kind in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                COMPREPLY+=("$value")
                [[ $value != */ ]] || compopt -o nospace ;;
        esac
    done < <(IFS=$'\n'; env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \
        %(complete_var)s=bash_complete "$1" 2>/dev/null)
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    @staticmethod
    def _check_version() -> None:
        """Skip click's check of the bash version, which would start bash."""


def answer(cli: click.Command) -> int:
    """Print the completions for the shell and return 0, also after an error."""
    with contextlib.suppress(BaseException):
        # Error messages would appear in the command line that the user types.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        add_completion_class(_Bash)
        click.Parameter.shell_complete = complete_parameter  # type: ignore[assignment, method-assign]
        shell_complete(cli, {}, "farm", VARIABLE, os.environ[VARIABLE])
        sys.stdout.flush()
    return 0


def script(cli: click.Command, shell: str) -> str:
    """Return the completion script of `farm` for a shell."""
    add_completion_class(_Bash)
    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - one of SHELLS
    return kind(cli, {}, "farm", VARIABLE).source()


def complete_parameter(param: click.Parameter, context: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
    """Return the known values of an option or argument, else click's completions."""
    values = _OPTIONS.get(param.opts[-1])
    if isinstance(param, click.Argument):
        name = param.name or ""
        values = _ARGUMENTS.get((context.command.name or "", name)) or _ARGUMENTS.get(("", name))
    if values is None:
        return _of_click(param, context, incomplete)
    if param.opts[-1] in _OR_PATHS and incomplete.startswith((".", "/", "~")):
        return [CompletionItem(incomplete, type="file")]
    folded = incomplete.casefold()
    found: dict[str, None] = {}
    with contextlib.suppress(Exception):
        for value in values(_Asked(context, incomplete)):
            if _WORD.fullmatch(value) and value.casefold().startswith(folded):
                found[value] = None
    return [CompletionItem(value) for value in found]


_of_click = click.Parameter.shell_complete


class _Asked(NamedTuple):
    context: click.Context
    incomplete: str

    @property
    def is_later(self) -> bool:
        """Return True when the command line already has an argument or option."""
        given = [name for name, value in self.context.params.items() if value]
        return any(self.context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in given)

    @property
    def config(self) -> Config:
        from farm.base.config.settings import load_config

        return load_config(self.context.params.get("config_file"))

    def stored(self, *names: str) -> list[str]:
        from farm.cli.stored_names import stored

        found: list[str] = []
        for name in names:
            # The store may be unreachable or of another version of farm: offer no names.
            with contextlib.suppress(Exception):
                found += stored(self.config.store_url, name)
        return found


def _socs(_asked: _Asked) -> Iterable[str]:
    from farm.base.resources import data_folder

    return sorted(path.stem for path in data_folder("device_profiles").glob("*.toml"))


def _suites(asked: _Asked) -> Iterable[str]:
    from farm.suites.manifests import find_suites

    return find_suites(asked.config.suite_folders)


def _jobs(asked: _Asked) -> Iterable[str]:
    suite, slash, _ = asked.incomplete.partition("/")
    if "[" in asked.incomplete:
        yield from asked.stored("jobs")
    elif slash:
        yield from asked.stored("cases")
        from farm.suites.manifests import find_suites, load_suite

        manifest = find_suites(asked.config.suite_folders).get(suite)
        if manifest is not None:
            yield from (f"{suite}/{case.name}" for case in load_suite(manifest).cases)
    else:
        yield from asked.stored("cases")
        yield from (f"{name}/" for name in _suites(asked))


def _runs(asked: _Asked) -> Iterable[str]:
    return ["latest", "latest~1", *asked.stored("run_names", "runs")]


def _devices(asked: _Asked) -> Iterable[str]:
    yield from (device.name or device.serial for device in asked.config.devices)
    yield from asked.stored("devices", "serials")


def _labels(asked: _Asked) -> Iterable[str]:
    yield from (label for device in asked.config.devices for label in device.labels)
    for labels in asked.stored("labels"):
        yield from re.findall(r'"([^"]+)"', labels)


def _toolchains(asked: _Asked) -> Iterable[str]:
    config = asked.config
    yield from [*config.toolchains, "default"]
    yield from _environments(asked)


def _environments(asked: _Asked) -> Iterable[str]:
    from farm.builds.toolchains.environments import about, environments_folder

    for folder in environments_folder(asked.config.cache_dir).glob("*"):
        if (made := about(folder)) is not None:
            yield made.executorch


def _sdks(asked: _Asked) -> Iterable[str]:
    return (path.name for path in (asked.config.cache_dir / "sdks").glob("*"))


def _lines(asked: _Asked) -> Iterable[str]:
    return ["default", *asked.config.toolchains, *asked.stored("branches")]


def _backends(_asked: _Asked) -> Iterable[str]:
    from farm.base.backends.registry import BACKENDS

    return BACKENDS


def _precisions(_asked: _Asked) -> Iterable[str]:
    from farm.base.socs import PRECISIONS

    return PRECISIONS


def _targets(_asked: _Asked) -> Iterable[str]:
    from farm.builds.runtime.native.targets import TARGETS

    return TARGETS


def _fault_kinds(_asked: _Asked) -> Iterable[str]:
    from farm.devices.virtual.faults import FaultKind

    return FaultKind


def _metrics(asked: _Asked) -> Iterable[str]:
    return asked.stored("metrics")


def _commands_beside(asked: _Asked) -> Iterable[str]:
    group = asked.context.parent
    if asked.is_later or group is None or not isinstance(group.command, click.Group):
        return ()
    return group.command.list_commands(group)


def _shells(_asked: _Asked) -> Iterable[str]:
    return SHELLS


_OPTIONS = {
    "--soc": _socs,
    "--suite": _suites,
    "--device": _devices,
    "--label": _labels,
    "--toolchain": _toolchains,
    "--qnn": _sdks,
    "--branch": _lines,
    "--backend": _backends,
    "--precision": _precisions,
    "--metric": _metrics,
    "--target": _targets,
    **dict.fromkeys(("--run", "--resume", "--changed-since", "--good", "--bad", "--diff"), _runs),
}
_OR_PATHS = ("--suite", "--toolchain", "--qnn")
_ARGUMENTS = {
    **dict.fromkeys((("", name) for name in ("job", "jobs", "subject")), _jobs),
    **dict.fromkeys((("", name) for name in ("run", "runs", "before", "after")), _runs),
    ("", "device"): _devices,
    ("", "labels"): _labels,
    ("", "wanted"): lambda asked: [*_socs(asked), *_devices(asked)],
    ("", "sdk"): _sdks,
    ("", "shell"): _shells,
    ("list", "names"): lambda asked: [*_devices(asked), *_commands_beside(asked)],
    ("", "names"): _devices,
    # Commands that take a subcommand in place of an argument.
    ("list", "suite_names"): lambda asked: [*_suites(asked), *_commands_beside(asked)],
    ("tune", "case"): _jobs,
    ("show", "name"): _toolchains,
    ("check", "name"): _toolchains,
    ("remove", "version"): _environments,
    ("fault", "kind"): _fault_kinds,
}
"""Functions by command and argument; an empty command stands for any."""
