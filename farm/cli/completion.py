"""Completion in bash, zsh and fish: commands, options and known values; `farm setup completion`.

Every Tab starts this module, so it imports little and waits for no other process. Errors yield no completions.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import click
from click import shell_completion

from farm.cli.options import configured, is_given

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from farm.base.config.settings import Config

VARIABLE = "_FARM_COMPLETE"
"""Variable with which the functions of the shells call `farm`."""
SHELLS = ("bash", "zsh", "fish")
_SQLITE = "sqlite:///"
# Seconds to wait for a locked or unreachable store.
_WAIT_S = 0.1
_WAIT_MS = 150

QUERIES = {
    "runs": "SELECT id FROM run ORDER BY started_ms DESC LIMIT 100",
    "run_names": "SELECT run_name FROM run WHERE run_name <> '' GROUP BY 1 ORDER BY max(started_ms) DESC LIMIT 50",
    "jobs": "SELECT name FROM job ORDER BY name LIMIT 5000",
    "cases": "SELECT DISTINCT suite || '/' || case_name FROM job ORDER BY 1 LIMIT 5000",
    "devices": "SELECT DISTINCT name FROM device_state WHERE name <> '' ORDER BY 1 LIMIT 500",
    "serials": "SELECT serial FROM device_state ORDER BY last_seen_ms DESC LIMIT 500",
    "labels": "SELECT DISTINCT labels FROM device_state LIMIT 500",
    "metrics": "SELECT DISTINCT metric FROM series ORDER BY 1 LIMIT 500",
    "branches": "SELECT DISTINCT run_branch FROM run WHERE run_branch <> '' ORDER BY 1 LIMIT 100",
}
"""Queries of names in the store."""

# Names are inserted into the command line unquoted, so only names without special characters are offered.
_WORD = re.compile(r"[A-Za-z0-9_./@~+:=,\[\]-]{1,250}")
_of_click = click.Parameter.shell_complete
_OR_PATHS = ("--suite", "--toolchain", "--qnn")


class _Bash(shell_completion.BashComplete):
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
        shell_completion.add_completion_class(_Bash)
        click.Parameter.shell_complete = complete_parameter  # type: ignore[assignment, method-assign]
        shell_completion.shell_complete(cli, {}, "farm", VARIABLE, os.environ[VARIABLE])
        sys.stdout.flush()
    return 0


def script(cli: click.Command, shell: str) -> str:
    """Return the completion script of `farm` for a shell."""
    shell_completion.add_completion_class(_Bash)
    kind = shell_completion.get_completion_class(shell)
    assert kind is not None  # noqa: S101 - one of SHELLS
    return kind(cli, {}, "farm", VARIABLE).source()


def complete_parameter(
    param: click.Parameter, context: click.Context, incomplete: str
) -> list[shell_completion.CompletionItem[Any]]:
    """Return the known values of an option or argument, else click's completions."""
    values = _OPTIONS.get(param.opts[-1])
    if isinstance(param, click.Argument):
        name = param.name or ""
        values = _ARGUMENTS.get((context.command.name or "", name)) or _ARGUMENTS.get(("", name))
    if values is None:
        return _of_click(param, context, incomplete)
    if param.opts[-1] in _OR_PATHS and incomplete.startswith((".", "/", "~")):
        return [shell_completion.CompletionItem(incomplete, type="file")]
    folded = incomplete.casefold()
    found: dict[str, None] = {}
    with contextlib.suppress(Exception):
        for value in values(_Asked(context, incomplete)):
            if _WORD.fullmatch(value) and value.casefold().startswith(folded):
                found[value] = None
    return [shell_completion.CompletionItem(value) for value in found]


class _Asked(NamedTuple):
    context: click.Context
    incomplete: str

    @property
    def is_later(self) -> bool:
        """Return True when the command line already has an argument or option."""
        empty = {name for name, value in self.context.params.items() if not value}
        return any(is_given(self.context, one) for one in self.context.command.params if one.name not in empty)

    @property
    def config(self) -> Config:
        with self.context.scope(cleanup=False):
            return configured()

    def stored(self, *names: str) -> list[str]:
        found: list[str] = []
        for name in names:
            # The store may be unreachable or of another version of farm: offer no names.
            with contextlib.suppress(Exception), contextlib.closing(_connected(self.config.store_url)) as connection:
                found += [str(row[0]) for row in connection.cursor().execute(QUERIES[name]) if row[0]]
        return found


def _connected(url: str) -> Any:
    """Connect by the database's driver: SQLAlchemy takes too long to import. Raises the driver's errors."""
    if "://" not in url or url.startswith(_SQLITE):
        import sqlite3

        path = Path(url.removeprefix(_SQLITE)).absolute()
        return sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=_WAIT_S)
    import psycopg

    scheme, _, rest = url.partition("://")
    address = f"{scheme.partition('+')[0]}://{rest}"
    return psycopg.connect(address, connect_timeout=1, options=f"-c statement_timeout={_WAIT_MS}")


def _socs(_asked: _Asked) -> Iterable[str]:
    from farm.base.paths import data_folder

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
    return [*asked.config.toolchains, "default", *_environments(asked)]


def _environments(asked: _Asked) -> Iterable[str]:
    from farm.builds.toolchains.environments import about, environments_folder

    for folder in environments_folder(asked.config.cache_dir).glob("*"):
        if (made := about(folder)) is not None:
            yield made.executorch


def _sdks(asked: _Asked) -> Iterable[str]:
    return (path.name for path in (asked.config.cache_dir / "sdks").glob("*"))


def _constant(module: str, name: str) -> Callable[[_Asked], Iterable[str]]:
    """Return the function that returns the texts of a constant, whose module is imported only then."""
    return lambda _asked: getattr(importlib.import_module(module), name)


def _commands_beside(asked: _Asked) -> Iterable[str]:
    group = asked.context.parent
    if asked.is_later or group is None or not isinstance(group.command, click.Group):
        return ()
    return group.command.list_commands(group)


_OPTIONS = {
    "--soc": _socs,
    "--suite": _suites,
    "--device": _devices,
    "--label": _labels,
    "--toolchain": _toolchains,
    "--qnn": _sdks,
    "--branch": lambda asked: ["default", *asked.config.toolchains, *asked.stored("branches")],
    "--backend": _constant("farm.base.backends.registry", "BACKENDS"),
    "--precision": _constant("farm.base.socs", "PRECISIONS"),
    "--metric": lambda asked: asked.stored("metrics"),
    "--target": _constant("farm.builds.runtime.native", "TARGETS"),
    **dict.fromkeys(("--run", "--resume", "--changed-since", "--good", "--bad", "--diff"), _runs),
}
_ARGUMENTS = {
    **dict.fromkeys((("", name) for name in ("job", "jobs", "subject")), _jobs),
    **dict.fromkeys((("", name) for name in ("run", "runs", "before", "after")), _runs),
    ("", "device"): _devices,
    ("", "labels"): _labels,
    ("", "wanted"): lambda asked: [*_socs(asked), *_devices(asked)],
    ("", "sdk"): _sdks,
    ("", "shell"): lambda _asked: SHELLS,
    ("list", "names"): lambda asked: [*_devices(asked), *_commands_beside(asked)],
    ("", "names"): _devices,
    # Commands that take a subcommand in place of an argument.
    ("list", "suite_names"): lambda asked: [*_suites(asked), *_commands_beside(asked)],
    ("tune", "case"): _jobs,
    ("show", "name"): _toolchains,
    ("fault", "kind"): _constant("farm.devices.virtual.faults", "FaultKind"),
}
"""Functions by command and argument; an empty command stands for any."""


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS), metavar="bash|zsh|fish")
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script with which a shell completes farm's commands, options and values.

    \b
    farm setup completion bash > ~/.local/share/bash-completion/completions/farm
    farm setup completion zsh > ~/.zfunc/_farm     (a folder of $fpath)
    farm setup completion fish > ~/.config/fish/completions/farm.fish

    Tab then offers suites, cases, SoCs, devices, runs, toolchains and more,
    from farm.toml, the store and the cache.
    """
    from farm.cli.output import echo

    echo(script(context.find_root().command, shell), nl=False, whole=True)
