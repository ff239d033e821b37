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
from farm.base.errors import FarmError, InfraError
from farm.cli.options import SuggestingGroup, with_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.shell_completion import CompletionItem

# Name -> module below farm.cli, and text for `farm --help`. The module has a `NAME_command`, or one called `command`.
_COMMANDS = {
    "run": ("running.run", "Compile suites for SoCs, run them on devices, judge and report."),
    "attach": ("cluster.attach", "Follow a run on a shared farm that was handed in."),
    "cancel": ("cluster.attach", "Cancel a run on a shared farm."),
    "queue": ("cluster.queue", "Show who waits for what on a shared farm, why, and about how long."),
    "quota": ("cluster.quota", "Show or set how many devices a user has at most at once."),
    "agent": ("cluster.agent", "Let this host's devices and compilers work for a shared farm, or list hosts."),
    "nightly": ("running.nightly", "Run a matrix of runs within a budget, report, export, notify."),
    "pytest": ("running.pytest", "Run your own pytest tests, or ExecuTorch's, one worker a device."),
    "devices": ("devices.devices", "Show the attached devices: what they are, how they are, who has them."),
    "device": ("devices.device", "Name a device, put it in or out of service, show its health."),
    "lease": ("devices.lease", "Reserve a device for yourself."),
    "release": ("devices.lease", "Give a device back."),
    "shell": ("devices.shell", "Open a shell on a device."),
    "adb": ("devices.adb", "Run your own adb on a device."),
    "connect": ("devices.connect", "Bring a device under your own adb: scrcpy, Android Studio, scripts."),
    "virtual": ("devices.virtual", "Start virtual devices that stay, and let them misbehave."),
    "report": ("looking.report", "Write and show the report of a run."),
    "show": ("looking.show", "Show all there is of a job: attempts, logs, numbers, how to run it again."),
    "coverage": ("looking.coverage", "Show every operator in every precision, and how its cases do."),
    "status": ("looking.status", "Show the status: newly red, regressions, infra trouble."),
    "serve": ("looking.report", "Show the same in a browser: status, runs, devices, history, live."),
    "triage": ("looking.status", "Say what becomes of a regression or a red job, or list them."),
    "baseline": ("looking.history", "Show what numbers are compared with, or say that a new level is right."),
    "history": ("looking.history", "Show what a job's numbers were, run by run."),
    "diff": ("looking.report", "Compare two runs: newly red, fixed, slower, faster, missing."),
    "confirm": ("running.confirm", "Measure candidates again, or one job: interleaved A/B of old and new."),
    "compare": ("running.compare", "Compare two toolchains, SDKs or option sets: is B worse than A?"),
    "bisect": ("running.bisect", "Find the run or the commit since which a job is worse."),
    "profile": ("running.profile", "Show where a job's time goes, node by node, or compare two runs."),
    "debug": ("running.debug", "Compare a job's numbers layer by layer and name the first that goes wrong."),
    "bundle": ("looking.bundle", "Copy what a job was compiled to into a folder: .pte, inputs, references."),
    "exec": ("running.exec", "Run a ready .pte file on a device: outputs, latency, profile."),
    "export": ("looking.transfer", "Write what runs hold for other tools, or for another store."),
    "import": ("looking.transfer", "Read runs that 'farm export' wrote into this store."),
    "repro": ("running.exec", "Run a past result again from its exact bundle, or write a script that does."),
    "sql": ("looking.sql", "Ask the store a question in SQL, read only."),
    "suites": ("setup.suites", "List suites, or the cases of some; suggest limits for a case."),
    "socs": ("setup.suites", "List the SoCs that farm knows."),
    "doctor": ("setup.doctor", "Say what can be compiled, staged and run here, and how to repair what cannot."),
    "toolchain": ("setup.toolchain", "List, show, check and make toolchains: what compiles."),
    "sign": ("setup.sign", "Sign the skels that LPAI and direct mode need, with the Hexagon SDK."),
    "sdk": ("setup.sdk", "Show, fetch and choose QNN SDKs."),
    "runtime": ("setup.runtime", "Show, build and check what devices need: runner, libraries, skels."),
    "notify": ("setup.notify", "Show who hears of a quarantined device, or try it."),
    "completion": ("setup.completion", "Print what lets a shell complete commands, options and values."),
    "prune": ("setup.prune", "Delete old runs: a dry run first."),
    "store": ("setup.store", "Say who may do what in the store of a shared farm."),
    "cache": ("setup.cache", "Show or prune compiled bundles."),
}


@contextmanager
def _broken_pipes() -> Iterator[None]:
    """Raise InfraError for a broken pipe: click would exit with 1, the exit code for a failed job."""
    try:
        yield
    except BrokenPipeError as error:
        if {"-h", "--help", "--version"}.isdisjoint(sys.argv):
            raise InfraError(f"the system: {error.strerror}") from error
        # click printed the text of --help or --version itself.
        from farm.cli.output import discard

        discard(sys.stdout)


_VERBOSE = ("-v", "--verbose")


class _LazyGroup(SuggestingGroup):
    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _broken_pipes():
            return super().make_context(*args, **kwargs)
        raise click.exceptions.Exit(0)

    def invoke(self, ctx: click.Context) -> Any:
        with _broken_pipes():
            return super().invoke(ctx)
        return 0

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"farm.cli.{_COMMANDS[cmd_name][0]}")
        command = getattr(module, f"{cmd_name}_command", None) or module.command
        assert isinstance(command, click.Command)  # noqa: S101 - a slip of ours, not of the user
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        from click.shell_completion import CompletionItem

        # Completion needs names and texts of the commands alone, so no command is imported.
        found = [CompletionItem(name, help=text) for name, (_, text) in _COMMANDS.items()]
        names = [one for one in found if one.value.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="farm")
@click.option("-v", "--verbose", is_flag=True, expose_value=False,
              help="Say with what a command works, and where an error came from. Also behind COMMAND.")  # fmt: skip
def cli() -> None:
    """Run ExecuTorch suites on Snapdragon devices and remember every number.

    \b
    farm run --soc SM8650 --suite smoke              devices on USB or network
    farm run --soc SM8650 --suite smoke --virtual 2  Qualcomm's HTP simulator
    farm history quantized_ops/conv2d --soc SM8650
    farm report latest
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
        code = cli(_spoken(sys.argv[1:]), prog_name="farm", standalone_mode=False)
    except FarmError as error:
        _explain(error)
        code = _fail(str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        _say(error.format_message())
        code = error.exit_code
    except click.ClickException as error:
        from farm.cli.usage import refusal

        code = _fail(refusal(error), error.exit_code)
    except click.Abort:
        code = 130
    except OSError as error:
        _explain(error)
        code = _fail(f"{error.filename or 'the system'}: {error.strerror or error}", InfraError.exit_code)
    except Exception:  # noqa: BLE001 - ours to fix; and not exit code 1, which says that a job failed
        _say(traceback.format_exc().rstrip())
        code = _fail("this is a bug in farm: please report it with the lines above", InfraError.exit_code)
    # The two collections at exit would take a sixth of a short command.
    gc.freeze()
    sys.exit(code if isinstance(code, int) else 0)


def _spoken(arguments: list[str]) -> list[str]:
    """Return the command line for click, as `with_numbers` does; -v may stand anywhere before --."""
    words = with_numbers(arguments)
    end = words.index("--") if "--" in words else len(words)
    if not set(_VERBOSE).isdisjoint(words[:end]):
        from farm.cli.output import be_verbose

        be_verbose()
    return [word for at, word in enumerate(words) if at >= end or word not in _VERBOSE]


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
    _say(f"farm: {message}")
    return code


def _say(text: str) -> None:
    from farm.cli.output import echo

    echo(text, err=True)


if __name__ == "__main__":
    main()
