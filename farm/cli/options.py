"""Options that several commands have."""

from __future__ import annotations

import os
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from farm.base.errors import UnknownNameError, UsageError
from farm.base.forms import LONGEST_S, in_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from farm.base.config.settings import Config

    Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_JSON = "farm.cli.options.json"
_CONFIG = "farm.cli.options.config"

# A name must differ from the beginning of an id and from a path.
_RUN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]{0,79}")


class SuggestingGroup(click.Group):
    """Group that suggests the nearest command for an unknown name, or the text of `otherwise` for that name."""

    def __init__(self, *args: Any, otherwise: dict[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.otherwise = otherwise or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of their definition, in which a reader needs them."""
        del ctx
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the first word of `args`, its command and the other words. Raises UnknownNameError, UsageError."""
        if not args or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        name, *rest = args
        if (command := self.get_command(ctx, name)) is not None:
            return name, command, rest
        if otherwise := self.otherwise.get(name):
            raise UsageError(f"there is no '{ctx.command_path} {name}': {otherwise}")
        raise UnknownNameError("command", name, self.list_commands(ctx), f"({ctx.command_path} --help lists them)")


class ListingGroup(SuggestingGroup):
    """Group whose `list`, if present, runs without a command; with `takes_names`, also before names."""

    def __init__(self, *args: Any, takes_names: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._takes_names = takes_names

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `list` before options, and before names that are near no command."""
        # Completion of the first word offers commands; names come with the arguments of `list`.
        is_completed = ctx.resilient_parsing and not args and not self._takes_names
        if "list" in self.list_commands(ctx) and not is_completed and self._is_of_list(ctx, args):
            args = ["list", *args]
        return super().parse_args(ctx, args)

    def _is_of_list(self, ctx: click.Context, args: list[str]) -> bool:
        if not args or args[0].startswith("-"):
            return not args or args[0] not in self.get_help_option_names(ctx)
        import difflib

        known = [*self.list_commands(ctx), *self.otherwise]
        return self._takes_names and not difflib.get_close_matches(args[0], known, 1, 0.75)


class _OutputFile(click.Path):
    """Path of a file that a command writes at its end; an unwritable path is refused before the command begins."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. Raises BadParameter if it cannot be written."""
        path: Any = super().convert(value, param, ctx)
        folder = next((parent for parent in path.absolute().parents if parent.exists()), path)
        if not folder.is_dir():
            self.fail(f"{path}: {folder} is no folder", param, ctx)
        if not os.access(folder, os.W_OK):
            self.fail(f"{path}: you cannot write in {folder}", param, ctx)
        return path


FILE = click.Path(path_type=Path, dir_okay=False)
OUTPUT_FILE = _OutputFile(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
# The word of a help, in place of click's "directory".
FOLDER.name = "folder"


def together(*options: Decorator) -> Decorator:
    """Return the decorator that adds `options`, in their order in the help."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _configure(context: click.Context, _option: click.Parameter, value: Path | None) -> None:
    """Keep the file of `--config` for `configured`: the callback of the option."""
    context.meta[_CONFIG] = value


def configured() -> Config:
    """Return the configuration that `--config` names, else the default one."""
    from farm.base.config.settings import load_config

    return load_config(click.get_current_context().meta.get(_CONFIG))


config_option = click.option(
    "--config",
    "config_file",
    type=FILE,
    expose_value=False,
    callback=_configure,
    help="Configuration; otherwise $FARM_CONFIG, or the nearest farm.toml upwards that only you can write.",
)


def _be_json(context: click.Context, _option: click.Parameter, value: bool) -> None:
    """Print the answer of this command as JSON, if `value`: the callback of `--json`."""
    context.meta[_JSON] = value


def is_json() -> bool:
    """Return True when the user asked for JSON on standard output."""
    return bool(click.get_current_context().meta.get(_JSON))


def json_option(text: str = "Print JSON instead of text.") -> Decorator:
    """Return the options `--json` and `--config`: the last of most commands. `is_json` and `configured` read them."""
    as_json = click.option("--json", "as_json", is_flag=True, expose_value=False, callback=_be_json, help=text)
    return together(as_json, config_option)


yes_option = click.option("--yes", is_flag=True, help="Remove without asking; required without a terminal.")


def pull_request_option() -> Decorator:
    """Return the option `--pull-request`: the place of a commit status and a comment."""
    text = ("Set a commit status and write or replace one comment, with the token in GITHUB_TOKEN or GITLAB_TOKEN; "
            "ci: the pull request of the running CI job.")  # fmt: skip
    return click.option("--pull-request", default="", callback=named, metavar="URL|ci", help=text)


def is_given(context: click.Context, parameter: click.Parameter) -> bool:
    """Return True for an option on the command line, and False for a default."""
    source = context.get_parameter_source(parameter.name) if parameter.name else None
    return source is ParameterSource.COMMANDLINE


def require_for_server(taken: Collection[str]) -> None:
    """Raise UsageError for a given option that the server of $FARM_SERVER would ignore."""
    others = [one.name for one in click.get_current_context().command.params if one.name and one.name not in taken]
    refuse_given("{} is not for the server of $FARM_SERVER: leave it out", *others)


def limit_option(text: str, default: int = 20) -> Decorator:
    """Return the option `--limit`: the number of shown entries of a kind."""
    return click.option("--limit", type=click.IntRange(min=1), default=default, show_default=True, help=text)


def duration(context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    """Return `90s`, `10m`, `1.5h`, `1h30m` or `2d` in seconds: the callback of an option."""
    if value is None:
        return None
    seconds = in_seconds(value)
    if seconds is None:
        problem = f"{value!r}: expected a time of at most 30 days, such as 90s, 10m, 1h30m or 2d"
        raise click.BadParameter(problem, context, option)
    return seconds


class _Time(click.ParamType[float]):
    """Time in the format of `duration`; a number alone is in seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return seconds. Raises BadParameter."""
        try:
            seconds: float | None = float(value)
        except ValueError:
            seconds = in_seconds(value)
        if seconds is None:
            self.fail(f"{value!r}: expected a time such as 90s, 10m or 1h30m, or seconds", param, ctx)
        if not 1 <= seconds <= LONGEST_S:
            self.fail(f"{value!r} is not in the range from 1 to {LONGEST_S:g} s", param, ctx)
        return seconds


def timeout_option(text: str, default: float = 300.0) -> Decorator:
    """Return the option `--timeout` as `timeout_s`, in seconds."""
    return click.option(
        "--timeout", "timeout_s", type=_Time(), default=f"{default:g}s", metavar="TIME",
        show_default=True, help=text,
    )  # fmt: skip


def virtual_option(text: str, *, one: bool = False) -> Decorator:
    """Return the option `--virtual [N]`: 1 without a number; with `one` a truth value, and 1 is the most.

    `with_numbers` adds the number to a `--virtual` without one.
    """
    most, metavar = (1, "[1]") if one else (None, "[N]")

    def checked(context: click.Context, option: click.Parameter, value: int) -> int | bool:
        if not value and context.get_parameter_source(option.name or "") is not ParameterSource.DEFAULT:
            raise click.BadParameter("0 is no number of virtual devices: leave --virtual out for attached ones")
        return bool(value) if one else value

    return click.option(
        "--virtual", type=click.IntRange(0, most), default=0, metavar=metavar, help=text, callback=checked
    )


def with_numbers(arguments: Sequence[str]) -> list[str]:
    """Return a command line in which every `--virtual` has a number, since a job may follow it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    following = [*arguments[1:], ""]
    return [
        "--virtual=1" if at < end and word == "--virtual" and not following[at].isdecimal() else word
        for at, word in enumerate(arguments)
    ]


def metrics_option(text: str) -> Decorator:
    """Return the repeatable option `--metric`, as `metrics`."""
    return click.option("--metric", "metrics", metavar="METRIC", multiple=True, help=text)


def soc_option(text: str) -> Decorator:
    """Return the option `--soc`."""
    return click.option("--soc", metavar="SOC", help=text)


def named(context: click.Context, option: click.Parameter, value: Any) -> Any:
    """Return a name from the command line; raises BadParameter for an empty text, as of a variable that is not set.

    The callback of options and arguments; a default value is not checked.
    """
    values = value if isinstance(value, tuple) else (value,)
    source = context.get_parameter_source(option.name or "")
    if "" in values and source is not ParameterSource.DEFAULT:
        raise click.BadParameter("is empty, and names nothing: is a variable not set?", context, option)
    return value


_TOOLCHAINS = "a [toolchain.NAME] of farm.toml, a path, or a version of ExecuTorch"
COMPILING_TOOLCHAIN = f"Toolchain that compiles: {_TOOLCHAINS}"
"""Beginning of a help."""


def toolchain_option(text: str = "Toolchain that compiles") -> Decorator:
    """Return the option `--toolchain`; `text` names its use."""
    return click.option(
        "--toolchain", default="", callback=named, metavar="NAME|PATH|VERSION", help=f"{text}: {_TOOLCHAINS}."
    )


def branch_option() -> Decorator:
    """Return the option `--branch`: the branch whose runs a command reads."""
    values = "a toolchain of farm.toml, a version, or default"
    missing = "otherwise default, or the branch of the newest run if default has none"
    return click.option("--branch", "branch", metavar="BRANCH", help=f"Only runs of this branch: {values}; {missing}.")


def given(*names: str) -> list[str]:
    """Return the options on the command line among the parameters `names`, in the order of `names`."""
    context = click.get_current_context()
    options = {one.name: one for one in context.command.params}
    return [options[name].opts[-1] for name in names if name in options and is_given(context, options[name])]


def refuse_given(because: str, *names: str) -> None:
    """Raise UsageError for the first of `names` on the command line; `{}` in `because` stands for its option."""
    if found := given(*names):
        raise UsageError(because.format(found[0]))


def require_separator(pytest_arguments: tuple[str, ...]) -> None:
    """Raise UsageError for arguments that do not stand behind `--`."""
    if pytest_arguments and "--" not in sys.argv:
        raise UsageError(f"{_not_understood(pytest_arguments[0])}; arguments for pytest stand behind --")


def require_no_words(words: tuple[str, ...]) -> None:
    """Raise UsageError for an argument that a command does not take."""
    if words:
        raise UsageError(_not_understood(words[0]))


def _not_understood(word: str) -> str:
    if ("--virtual", word) in pairwise(sys.argv):
        return f"--virtual takes a number, not {word!r}"
    return f"{word!r} is not understood"


ATTACHED = ("device", "devices", "labels", "most_devices")
"""Parameters that choose attached devices."""


def refuse_attached(*, virtual: int | None) -> None:
    """Raise UsageError for an option that chooses attached devices beside `--virtual`."""
    if virtual:
        refuse_given("{} is for attached devices: leave it, or --virtual, out", *ATTACHED)


def _run_name(context: click.Context, option: click.Parameter, value: str) -> str:
    """Return the name of a run, which is usable in place of its id; raises BadParameter for an invalid name."""
    if value and (not _RUN_NAME.fullmatch(value) or value.startswith("latest")):
        problem = f"{value!r}: expected a letter, then letters, digits and _ . + -, 80 at most, and not latest"
        raise click.BadParameter(problem, context, option)
    return value


purpose_options = together(
    click.option("--name", default="", callback=_run_name, metavar="NAME",
                 help="Name of the run, shown in lists and usable in place of its id."),
    click.option("--purpose", type=click.Choice(["local", "nightly"]),
                 help="nightly: the numbers continue the series of the branch, with status and alerts; local, the "
                 "default: compared with the branch only."),
)  # fmt: skip

one_off_options = together(
    virtual_option("Run it on a virtual device.", one=True),
    click.option("--iterations", type=click.IntRange(1, 100_000),
                 help="Timed executions of each inference; 3 by default, 1 on virtual devices."),
    click.option("--warm-up", type=click.IntRange(0, 100_000),
                 help="Executions before them, not timed; 1 by default."),
    timeout_option("Time limit on the device."),
)  # fmt: skip


def executions(iterations: int | None, warm_up: int | None) -> dict[str, Any]:
    """Return the executions of a sample from `--iterations` and `--warm-up`; `reducible` if neither is given."""
    return {
        "iterations": 3 if iterations is None else iterations,
        "warm_up": 1 if warm_up is None else warm_up,
        "reducible": iterations is None and warm_up is None,
    }


devices_options = together(
    virtual_option("Run on N virtual devices per SoC, with an HTP simulator, not on attached ones; 1 without N."),
    click.option("--device", "devices", multiple=True, metavar="NAME",
                 help="Only attached devices of this name or serial; repeatable."),
    click.option("--label", "labels", multiple=True, metavar="LABEL",
                 help="Only attached devices with this label; repeatable: with all."),
    click.option("--max-devices", "most_devices", type=click.IntRange(min=1), metavar="N",
                 help="At most N attached devices per SoC; otherwise all that are free."),
)  # fmt: skip

interleaved_options = together(
    click.option("--pairs", type=click.IntRange(5, 1000), default=10, show_default=True, metavar="N",
                 help="Number of pairs; in a pair both run, one after the other."),
    click.option("--inferences", type=click.IntRange(1, 10_000), metavar="N",
                 help="Inferences of each side in a pair, 5 by default; up to 20 of short programs for "
                      "farm perf confirm without JOB."),
    click.option("--device", default="", metavar="NAME",
                 help="This attached device; otherwise the device of the newer run, or a similar one."),
    virtual_option("Start a virtual device; the default for virtual results.", one=True),
)  # fmt: skip
