"""`farm`: the command line. Every command is imported only when it is called."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from farm import __version__
from farm.base.errors import ExitCode, FarmError, InfraError, UnknownNameError
from farm.cli.options import ListingGroup, with_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.shell_completion import CompletionItem

# Group -> command -> (`module:attribute` below farm.cli, line in the help).
_IN_GROUPS = {
    "runs": {
        "list": ("looking.runs:list_command", "List runs, newest first."),
        "show": ("looking.runs:report_command", "Write the HTML report of a run and print its summary."),
        "watch": ("looking.runs:watch_command", "Follow a submitted run on a shared farm."),
        "cancel": ("looking.runs:cancel_command", "Cancel a submitted run on a shared farm."),
        "remove": ("looking.runs:remove_command", "Remove one run."),
        "prune": ("looking.runs:prune_command", "Remove old runs; without --yes only list them."),
    },
    "jobs": {
        "show": ("looking.jobs:show_command", "Show a job: attempts, logs, numbers, commands to repeat it."),
        "history": ("looking.status:history_command", "Show a job's numbers, run by run."),
        "profile": ("looking.jobs:profile_command", "Show a job's time node by node, or compare two runs."),
        "debug": ("running.debug:command", "Compare a job layer by layer; name the first wrong one."),
        "rerun": ("running.exec:rerun_command", "Run a stored result again from its bundle."),
        "bundle": ("looking.jobs:bundle_command", "Copy a job's bundle: .pte, inputs, references."),
        "coverage": ("looking.jobs:coverage_command", "Show operators by precision with the state of their cases."),
    },
    "perf": {
        "compare": ("running.perf:compare_command", "Compare two toolchains, SDKs or option sets."),
        "confirm": ("running.perf:confirm_command", "Measure suspected regressions again, in interleaved pairs."),
        "bisect": ("running.perf:bisect_command", "Find the first bad run or commit of a job."),
        "diff": ("looking.runs:diff_command", "Compare two runs: new failures, fixed, slower, faster."),
        "baseline": ("looking.status:baseline_command", "Show the level that the next run is compared with."),
    },
    "alerts": {
        "list": ("looking.status:list_command", "List open regressions and failing jobs."),
        "assign": ("looking.status:assign_command", "Record owner, state and note of a regression or failing job."),
        "accept": ("looking.status:accept_command", "Accept the new level of a job's numbers."),
    },
    "devices": {
        "list": ("devices.devices:list_command", "List attached devices: identity, health, users."),
        "show": ("devices.devices:show_command", "Show a device and the events of its health."),
        "lease": ("devices.lease:lease_command", "Reserve a device for your commands."),
        "release": ("devices.lease:release_command", "Give a leased device back."),
        "shell": ("devices.hold:shell_command", "Open a shell on a device."),
        "connect": ("devices.hold:connect_command", "Connect a device to your adb: scrcpy, Android Studio."),
        "check": ("devices.devices:check_command", "Check the properties of devices now."),
        "enable": ("devices.devices:enable_command", "Put a device into service again."),
        "disable": ("devices.devices:disable_command", "Take a device out of service."),
        "unquarantine": ("devices.devices:unquarantine_command", "End the quarantine of a device."),
        "name": ("devices.devices:name_command", "Give a device a name."),
        "label": ("devices.devices:label_command", "Replace the labels of a device."),
        "host": ("devices.host:command", "Use devices that are rented for a session."),
        "remove": ("devices.devices:remove_command", "Remove an absent device from every list."),
        "socs": ("setup.suites:socs_command", "List the SoCs that farm supports."),
    },
    "lab": {
        "agent": ("setup.lab:agent_command", "Run this host's devices and compilers for a shared farm."),
        "accounts": ("setup.lab:accounts_command", "List, make and remove accounts of farm serve."),
        "audit": ("setup.lab:audit_command", "Show the actions of accounts on farm serve."),
        "queue": ("setup.lab:queue_command", "Show waiting runs and commands, with reason and estimate."),
        "quota": ("setup.lab:quota_command", "Show or set the most devices of a user or label."),
        "notify": ("setup.lab:notify_command", "Show or test the receivers of quarantine notices."),
        "roles": ("setup.lab:roles_command", "Print or apply the SQL of PostgreSQL roles."),
    },
    "setup": {
        "doctor": ("setup.doctor:command", "Check this machine for compiling, staging and running."),
        "toolchain": ("setup.toolchain:command", "List and show toolchains."),
        "sdk": ("setup.toolchain:sdk_command", "Show and fetch QNN SDKs."),
        "runtime": ("setup.runtime:command", "Show, build and check runner, libraries and skels."),
        "sign": ("setup.runtime:sign_command", "Sign the skels of LPAI and direct mode."),
        "cache": ("setup.cache:command", "Show or prune compiled bundles."),
        "completion": ("completion:command", "Print the completion script of a shell."),
    },
    "data": {
        "export": ("looking.transfer:export_command", "Write runs for other tools or another store."),
        "import": ("looking.transfer:import_command", "Read runs that 'farm data export' wrote."),
        "mcp": ("looking.data:mcp_command", "Answer the tools of an AI assistant (MCP)."),
    },
}
# The group "" is the top level.
_COMMANDS = {
    "": {
        "doctor": _IN_GROUPS["setup"]["doctor"],
        "suites": ("setup.suites:suites_command", "List suites and their cases; suggest limits."),
        "run": ("running.run:command", "Compile suites, run them on devices, judge and report."),
        "show": _IN_GROUPS["jobs"]["show"],
        "report": _IN_GROUPS["runs"]["show"],
        "status": ("looking.status:status_command", "Show new failures, regressions and infra trouble."),
        "diff": _IN_GROUPS["perf"]["diff"],
        "serve": ("looking.runs:serve_command", "Serve status, runs, devices and history to browsers."),
        "exec": ("running.exec:exec_command", "Run a .pte file on a device: outputs, latency, profile."),
        "history": _IN_GROUPS["jobs"]["history"],
        "lease": _IN_GROUPS["devices"]["lease"],
        "debug": _IN_GROUPS["jobs"]["debug"],
        "nightly": ("running.nightly:command", "Run a matrix of suites and SoCs within a time budget."),
        "pytest": ("running.pytest:command", "Run pytest tests, also ExecuTorch's, with a device per worker."),
        "shell": _IN_GROUPS["devices"]["shell"],
        "virtual": ("devices.virtual:command", "Start virtual devices on the HTP simulator."),
    },
    **_IN_GROUPS,
}
_GROUPS = {
    "runs": "Runs of the store: list, show, watch, cancel, remove, prune.",
    "jobs": "Jobs: show, history, profile, debug, rerun, bundle, coverage.",
    "perf": "Numbers: compare, confirm, bisect, diff, baseline.",
    "alerts": "Regressions and failing jobs: list, assign, accept.",
    "devices": "Devices: list, show, lease, release, shell, check, enable, disable.",
    "lab": "Shared farm: agents, accounts, audit, queue, quotas, notices, roles.",
    "setup": "This machine: toolchains, SDKs, runtimes, signing, cache.",
    "data": "Store: export, import, MCP.",
}
_FIRST = ("doctor", "suites", "run", "show", "report", "status", "diff", "serve", "devices", "exec", "history", "lease")
_OTHERWISE = {
    **{
        name: f"it is in the group {group!r}"
        for group, commands in _IN_GROUPS.items()
        for name in commands
        if name not in _COMMANDS[""]
    },
    **dict.fromkeys(("ls", "list"), "the groups runs, devices and suites list their members"),
    "help": "the option --help of a command or a group explains it",
    "version": "the option --version prints it",
}


@contextmanager
def _broken_pipes() -> Iterator[None]:
    """Raise InfraError for a broken pipe: click would exit with 1, the exit code for a failed job."""
    try:
        yield
    except BrokenPipeError as error:
        if {"-h", "--help", "-V", "--version"}.isdisjoint(sys.argv):
            raise InfraError(f"the system: {error.strerror}") from error
        # click printed the text of --help or --version itself.
        from farm.cli.output import discard

        discard(sys.stdout)


_VERBOSE, _QUIET = ("-v", "--verbose"), ("-q", "--quiet")


class _LazyGroup(ListingGroup):
    """Group of `_COMMANDS` by its name: a command is imported when it is called."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _broken_pipes():
            return super().make_context(*args, **kwargs)
        raise click.exceptions.Exit(0)

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.parent is None:
            # Not in `main`: --help needs no logging.
            from farm.cli.output import begin_log

            begin_log()
        with _broken_pipes():
            return super().invoke(ctx)
        return 0

    @property
    def _texts(self) -> dict[str, str]:
        """Return the lines of the help by command; the top level has the groups as well."""
        mine = {name: text for name, (_, text) in _COMMANDS[self._key].items()}
        return mine if self._key else {**mine, **_GROUPS}

    @property
    def _key(self) -> str:
        return self.name if self.name in _GROUPS else ""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self._texts)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if not self._key and cmd_name in _GROUPS:
            return _group(cmd_name)
        if cmd_name not in _COMMANDS[self._key]:
            return None
        module, _, name = _COMMANDS[self._key][cmd_name][0].partition(":")
        command = getattr(importlib.import_module(f"farm.cli.{module}"), name)
        assert isinstance(command, click.Command)  # noqa: S101 - a wrong entry of _COMMANDS
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        from click.shell_completion import CompletionItem

        # Complete names from the table, without importing the commands.
        found = [CompletionItem(name, help=text) for name, text in self._texts.items()]
        names = [one for one in found if one.value.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        if self._key:
            sections = {"Commands": self._texts}
        else:
            texts = self._texts
            first = {name: texts.pop(name) for name in _FIRST}
            groups = {name: texts.pop(name) for name in _GROUPS if name in texts}
            sections = {"First commands": first, "Groups": groups, "More commands": texts}
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(list(rows.items()))


def _group_help(name: str) -> str:
    """Return the help of a group: its line, the effect of a call without a command, and the short forms."""
    commands = _COMMANDS[name]
    short = {place: word for word, (place, _) in _COMMANDS[""].items()}
    forms = [(short[place], word) for word, (place, _) in commands.items() if place in short]
    texts = [_GROUPS[name]]
    if "list" in commands:
        texts.append(f"Without a command the {name} are listed.")
    if forms:
        named = (f"farm {form}" if form == word else f"farm {form} for {word}" for form, word in forms)
        texts.append(f"Short form{'s' * (len(forms) > 1)}: {', '.join(named)}.")
    return "\n\n".join(texts)


def _group(name: str) -> click.Command:
    """Return a group of commands; without a subcommand it runs its list."""
    # The nearest command to `quarantine` by spelling is its opposite, `unquarantine`.
    otherwise = {"quarantine": "'farm devices disable DEVICE' lets no run use it, until 'farm devices enable DEVICE'"}
    return _LazyGroup(
        name, help=_group_help(name), no_args_is_help="list" not in _COMMANDS[name], takes_names=name == "devices",
        otherwise=otherwise if name == "devices" else {}, context_settings=_SETTINGS,
    )  # fmt: skip


_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=_LazyGroup, otherwise=_OTHERWISE, context_settings=_SETTINGS)
@click.version_option(__version__, "-V", "--version", prog_name="farm")
@click.option("-v", "--verbose", is_flag=True, expose_value=False,
              help="Print configuration, times and the origin of errors; also after COMMAND.")  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, expose_value=False,
              help="Print errors, warnings and the last line or the verdict alone; also after COMMAND.")  # fmt: skip
def cli() -> None:
    """Run ExecuTorch suites on Snapdragon devices and store every number.

    \b
    farm run --soc SM8650 --suite smoke              devices on USB or network
    farm run --soc SM8650 --suite smoke --virtual 2  Qualcomm's HTP simulator
    farm history quantized_ops/conv2d --soc SM8650
    farm report latest

    'farm COMMAND --help' explains a command, 'farm GROUP --help' lists its commands.
    """


def main() -> None:
    """Run the command line: errors become one line on standard error and their exit code."""
    if "_FARM_COMPLETE" in os.environ:
        from farm.cli.completion import answer

        sys.exit(answer(cli))
    # Imports create 100,000 objects that stay, with SQLAlchemy: repeated garbage collections over them would take a
    # twentieth of a short command.
    gc.set_threshold(150_000)
    try:
        code = cli(_click_words(sys.argv[1:]), prog_name="farm", standalone_mode=False)
    except FarmError as error:
        _explain(error)
        code = _fail(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        _print_error(error.format_message())
        code = error.exit_code
    except click.ClickException as error:
        code = _fail(_refusal(error), error.exit_code)
    except click.Abort:
        code = ExitCode.INTERRUPTED
    except OSError as error:
        _explain(error)
        code = _fail(f"{error.filename or 'the system'}: {error.strerror or error}", ExitCode.INFRA)
    except ModuleNotFoundError as error:
        code = _fail_without(error)
    except Exception:  # noqa: BLE001 - a bug of farm; exit code 1 would mean a failed job
        code = _fail_by_bug()
    if "farm.cli.output" in sys.modules:
        from farm.cli.output import end_quiet

        end_quiet()
    # The two collections at exit would take a sixth of a short command.
    gc.freeze()
    sys.exit(code if isinstance(code, int) else 0)


def _fail_without(error: ModuleNotFoundError) -> int:
    """Return the exit code of a command whose Python package is missing, as after an update of farm's sources."""
    name = (error.name or "").partition(".")[0]
    if name in ("", "farm"):
        return _fail_by_bug()
    return _fail(f"the Python package {name} is missing: install farm again, or call ./farmw", ExitCode.MISSING_TOOL)


def _fail_by_bug() -> int:
    """Return the exit code of a command that ended in the current exception, a bug of farm."""
    _print_error(traceback.format_exc().rstrip())
    return _fail("this is a bug in farm: please report it with the lines above", ExitCode.INFRA)


def _click_words(arguments: list[str]) -> list[str]:
    """Return the command line for click: `--virtual` gets its default number, -v and -q before -- are taken out."""
    words = with_numbers(arguments)
    end = words.index("--") if "--" in words else len(words)
    if not set(_VERBOSE).isdisjoint(words[:end]):
        from farm.cli.output import be_verbose

        be_verbose()
    if not set(_QUIET).isdisjoint(words[:end]):
        from farm.cli.output import be_quiet

        be_quiet()
    return [word for at, word in enumerate(words) if at >= end or word not in (*_VERBOSE, *_QUIET)]


def _explain(error: BaseException) -> None:
    """With -v, print the place in farm where an error was raised, and the errors before it."""
    if "farm.cli.output" not in sys.modules:
        return
    from farm.cli.output import is_verbose, notice

    if not is_verbose():
        return
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None:
        _explain(before)
    frames = traceback.extract_tb(error.__traceback__)
    ours = next((frame for frame in reversed(frames) if "/farm/" in frame.filename), frames[-1])
    place = f"{ours.filename.rpartition('/farm/')[2]}:{ours.lineno}, {ours.name}"
    notice(f"{type(error).__name__} in farm/{place}: {error}")


def _fail(message: str, code: int) -> int:
    _print_error(f"farm: {message}")
    return code


def _print_error(text: str) -> None:
    from farm.cli.output import echo

    echo(text, err=True)


def _refusal(error: click.ClickException) -> str:
    """Return one line with the error of a command line, and the command that prints the correct usage."""
    context = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption):
        options = context.command.get_params(context) if context is not None else []
        known = [name for one in options if isinstance(one, click.Option) for name in one.opts if name.startswith("--")]
        # A short option has one letter, so a suggestion would be arbitrary.
        near = known if error.option_name.startswith("--") else ()
        return f"{UnknownNameError('option', error.option_name, near)} {_see(context)}".rstrip()
    problem = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.MissingParameter) and error.param is not None:
        kind = "argument" if isinstance(error.param, click.Argument) else "option"
        problem = f"{_name(error.param)} is missing, an {kind} that is needed"
    elif isinstance(error, click.BadParameter) and error.param is not None:
        problem = f"{_name(error.param)}: {' '.join(error.message.split()).rstrip('.')}"
    else:
        problem = problem[:1].lower() + problem[1:]
    return f"{problem} {_see(context)}".rstrip()


def _name(param: click.Parameter) -> str:
    return param.opts[-1] if isinstance(param, click.Option) else param.human_readable_name.upper()


def _see(context: click.Context | None) -> str:
    return f"({context.command_path} --help)" if context is not None else ""


if __name__ == "__main__":
    main()
