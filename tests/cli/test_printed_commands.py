"""Every command that the product prints: collected from its code, then parsed as printed, or run in its situation.

A new printed command fails the first test until it is in a table; a new function that builds one, the second.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import pytest
from command_words import called_command, fault
from farm_home import FarmHome
from report_context import alert

import farm
from farm.base.errors import FIRST_RUN, UsageError
from farm.base.user import user_name
from farm.cli.devices.hold import purpose_of
from farm.cli.looking import bundle, coverage
from farm.cli.main import cli
from farm.cli.options import with_numbers
from farm.cli.running import debug as debug_command
from farm.cli.running import debug_failures
from farm.devices.device import AdbAddress, Device
from farm.devices.health import HealthEvent
from farm.devices.virtual.faults import FaultKind
from farm.dispatch.nightly.plan import command_of
from farm.dispatch.pool.fleet import Choice
from farm.dispatch.pytest_plugin.upstream_command import UpstreamCommand
from farm.dispatch.request.request import RunRequest
from farm.replay.debug import DebugOutcome
from farm.replay.stored_result import find_job
from farm.report.formats.review import rerun_commands
from farm.report.model.rerun import fetch_command, rerun_command, ways_again
from farm.results.attempt import Attempt, Cause, OperatorProfile, Stage, Verdict
from farm.results.layers import Diagnosis
from farm.serve.pages import alerts as alert_page
from farm.store.leases.registry import Seen
from farm.store.records import RunRecord
from farm.store.store import open_store
from farm.store.view import JobView
from farm.suites.suite import Case, InputSpec, Job, Target

PACKAGE = Path(farm.__file__).parent
NAMES = cli.list_commands(click.Context(cli))
COMMAND = re.compile(rf"(?<![\w/.-])farm (?:(?:{'|'.join(NAMES)})(?![\w-])|\{{\}})[^\n]*")
CASE = Case("s", "conv", module="torch.nn:ReLU", inputs=(InputSpec(shape=(1, 3)),))
JOB = Job(CASE, Target("SM8650", "htp", "8a8w"))
PHONE = Device(serial="phone-1", soc="SM8650", kind="hardware", build="b", address=AdbAddress(5037), product="phone")
# Punctuation of a sentence behind a command.
_AFTER = ",;:.)'`"
# Most texts of one literal with alternatives.
_MOST_TEXTS = 64

# Name of a command in another text than a hint -> kind of that text.
NAMED = {
    "farm devices adb": "purpose of a lease",
    "farm perf bisect": "subject of an error",
    "farm jobs bundle --compiled": "subject of an error",
    "farm jobs bundle --as-suite programs": "comment in a manifest that the command wrote",
    "farm devices connect": "purpose of a lease",
    "farm debug": "subject of an error",
    "farm devices check": "purpose of a lease",
    "farm exec": "subject of an error",
    "farm exec --option direct_mode=true": "command beside which a program stands",
    "farm data export": "origin of a file, in a help text",
    "farm data import": "reader of a file, in a help text",
    "farm lease": "purpose of a lease",
    "farm nightly": "purpose of a lease",
    "farm nightly {}": "name of a commit status",
    "farm perf compare": "name of a commit status",
    "farm run --soc {} --suite demo_operators --profile detailed": "command of a run of demo data",
    "farm run --soc {} --suite demo_operators --suite demo_models": "command of a run of demo data",
    "farm jobs profile": "page of help that another help text names",
    "farm jobs rerun": "command whose runs enter no history",
    "farm pytest": "subject of an error",
    "farm run": "subject of an error or of a help text",
    "farm run --compile-only": "origin of a bundle",
    "farm run {}": "title of an exported run",
    "farm shell": "purpose of a lease",
    "farm {}": "version, or the subject of an error",
}
# Complete call as printed, `{}` for each inserted value -> an example of the values.
PARSED: dict[str, tuple[str, ...]] = {
    "farm devices adb DEVICE -- shell getprop": (),
    "farm devices adb {} -- COMMAND": ("phone-1",),
    "farm lab accounts": (),
    "farm lab accounts --add NAME --role operator": (),
    "farm lab accounts --remove NAME --yes": (),
    "farm lab agent": (),
    "farm runs watch": (),
    "farm runs watch {}": ("1",),
    "farm runs cancel {}": ("1",),
    "farm perf compare --options {}=false --options {}=true": ("direct_mode", "direct_mode"),
    "farm devices connect {}": ("phone-1",),
    "farm devices enable DEVICE": (),
    "farm devices disable DEVICE": (),
    "farm nightly {} --check": ("nightly.toml",),
    "farm devices host remove {} --yes": ("qdc",),
    "farm devices release": (),
    "farm run --resume {}": ("1",),
    "farm run --soc {}": ("SM8650",),
    "farm setup runtime build": (),
    "farm setup runtime build --target android-arm64": (),
    "farm setup runtime build --target {}": ("oe-linux-aarch64",),
    "farm setup runtime check --direct --soc SOC": (),
    "farm setup runtime check --soc SOC": (),
    "farm setup sdk fetch --source maven": (),
    "farm setup sdk fetch {}": ("2.37",),
    "farm serve": (),
    "farm shell {}": ("phone-1",),
    "farm shell {} -- COMMAND": ("phone-1",),
    "farm setup sign": (),
    "farm setup sign --lpai v{}": ("5",),
    "farm setup sign --lpai v{} --direct --htp v{}": ("5", "75"),
    "farm setup toolchain make {}": ("1.5.1",),
    "farm setup toolchain remove VERSION": (),
    "farm virtual clear {} --yes": ("virtual-SM8650-0",),
    "farm virtual fault {} reboot": ("virtual-SM8650-0",),
    "farm virtual up --soc SM8650": (),
}
# Complete call that needs no device -> inserted values, exit code and a part of the output.
RUN = {
    "farm perf baseline {}": (("s/conv",), 0, "s/conv"),
    "farm setup cache prune --all --yes": ((), 0, ""),
    "farm setup cache prune --older 30d --yes": ((), 0, ""),
    "farm perf confirm": ((), 0, ""),
    "farm perf confirm --run {}": (("RUN_ID",), 0, ""),
    "farm devices enable {}": (("phone-1",), 0, "phone-1 is in service"),
    "farm devices show {}": (("phone-1",), 0, "it was gone"),
    "farm devices unquarantine {}": (("phone-1",), 0, "phone-1 is suspect"),
    "farm devices": ((), 0, "phone-1"),
    "farm diff {} {}": (("RUN_ID", "RUN_ID"), 0, ""),
    "farm data export --format jsonl": ((), 0, ""),
    "farm history {}": (("s/conv",), 0, "s/conv"),
    "farm devices release {}": (("phone-1",), 0, "phone-1 is given back"),
    "farm report {}": (("RUN_ID",), 0, ""),
    "farm runs list": ((), 0, ""),
    "farm setup runtime --help": ((), 0, "Usage"),
    "farm setup sdk list": ((), 0, ""),
    "farm show {}": (("s/conv[SM8650-htp-8a8w]",), 0, "too far"),
    "farm devices socs": ((), 0, "SM8650"),
    "farm status": ((), 0, ""),
    "farm suites": ((), 0, "smoke"),
    "farm suites tune {}/{}": (("s", "conv"), 2, "unknown suite 's'"),
    "farm setup toolchain list": ((), 0, ""),
    "farm alerts list": ((), 0, ""),
    "farm virtual faults": ((), 0, "reboot"),
}
# Commands of a shared farm: its store has no run yet.
SHARED = {
    "farm lab agent list": ((), 0, "no agent"),
    "farm lab queue": ((), 0, ""),
    "farm lab quota": ((), 0, ""),
}


def parts_of(node: ast.AST) -> list[ast.expr]:
    """Return the expressions whose texts make up the text of `node`."""
    if isinstance(node, ast.JoinedStr):
        return node.values
    if isinstance(node, ast.FormattedValue):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    return [node.left, node.right] if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) else []


def texts(node: ast.expr) -> list[str]:
    """Return the texts that an expression can be; `{}` stands for a value that is known at run time alone."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        # Messages of `logging` have %s for a value.
        return [node.value.replace("%s", "{}")]
    parts = [texts(part) for part in parts_of(node)]
    if isinstance(node, ast.IfExp):
        return [text for part in parts for text in part]
    return ["".join(part) for part in itertools.islice(itertools.product(*parts), _MOST_TEXTS)] if parts else ["{}"]


def literals(tree: ast.Module) -> Iterator[str]:
    """Yield the texts in a module, whole, without docstrings."""
    parts: set[int] = set()
    for node in ast.walk(tree):
        is_part = id(node) in parts
        if isinstance(node, ast.Expr):
            parts.add(id(node.value))
        if is_part or isinstance(node, ast.JoinedStr | ast.BinOp):
            parts.update(map(id, parts_of(node)))
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and not is_part:
            yield from texts(node)


def builders(tree: ast.Module) -> Iterator[str]:
    """Yield the functions that build a command as a list of words, `["farm", "run", ...]`."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            nodes = list(ast.walk(function))
            compared = {id(one) for node in nodes if isinstance(node, ast.Compare) for one in ast.walk(node)}
            for node in nodes:
                is_list = isinstance(node, ast.List) and id(node) not in compared and node.elts
                if is_list and isinstance(node.elts[0], ast.Constant) and node.elts[0].value == "farm":
                    yield function.name
                    break


def call_in(text: str, quote: str) -> str:
    """Return the call that `text` begins with: up to its closing quote, else as far as the command line takes words."""
    if quote in ("'", "`") and quote in text:
        return text.partition(quote)[0].strip()
    taken, words = ["farm"], text.split()[1:]
    command: click.Command = cli
    while words:
        word = words.pop(0).rstrip(_AFTER)
        below = command.get_command(click.Context(cli), word) if isinstance(command, click.Group) else None
        if below is not None:
            command = below
        elif word == "--":
            # The rest is for another program.
            return " ".join([*taken, word, *(one.rstrip(_AFTER) for one in words)])
        elif word.startswith("--") and len(taken) > 1:
            options = [one for one in command.params if isinstance(one, click.Option) and word in one.opts]
            if options and not options[0].is_flag and words:
                taken.append(word)
                word = words.pop(0).rstrip(_AFTER)
        elif not re.fullmatch(r"v?(\{\})+(/\{\})?|[A-Z]{3,}", word) and word not in set(FaultKind):
            break
        taken.append(word)
    return " ".join(taken)


@cache
def modules() -> dict[str, ast.Module]:
    """Return the modules that may print a command, by path."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "migrations" not in path.parts and ("farm " in source or '"farm"' in source):
            found[str(path.relative_to(PACKAGE))] = ast.parse(source)
    return found


@cache
def printed() -> dict[str, str]:
    """Return the first place of each command that a text of the product has; titles, `farm diff: ...`, are none."""
    found: dict[str, str] = {}
    for place, tree in modules().items():
        for text in literals(tree):
            start = 0 if "farm " in text else len(text)
            while match := COMMAND.search(text, start):
                if not re.match(r"farm [a-z ]+: ", match[0]):
                    call = call_in(match[0], text[match.start() - 1 : match.start()])
                    found.setdefault(call, place)
                start = match.start() + len("farm ")
    return found


def test_every_printed_command_is_in_a_table() -> None:
    known = NAMED.keys() | PARSED.keys() | RUN.keys() | SHARED.keys() | {FIRST_RUN}
    new = {call: place for call, place in printed().items() if call not in known}
    assert new == {}, "a printed command without a test: add it to RUN, or to PARSED where it needs a device"
    assert known - printed().keys() == set(), "in a table, and not printed"


def words_of(call: str, values: tuple[str, ...]) -> list[str]:
    return shlex.split(call.format(*map(shlex.quote, values)))[1:]


def assert_parsed(words: list[str]) -> None:
    """Parse `words` as the command line does. Raises click's errors."""
    command: click.Command = cli
    context, words = click.Context(cli, info_name="farm"), with_numbers(words)
    while isinstance(command, click.Group) and words:
        below = command.get_command(context, words[0])
        if below is None:
            break
        command, words = below, words[1:]
        context = click.Context(command, parent=context, info_name=command.name)
    assert command is not cli
    if words != ["--help"]:
        command.make_context(command.name, words, parent=context.parent)


@pytest.mark.parametrize("call", sorted({**PARSED, **RUN, **SHARED}))
def test_a_printed_command_is_parsed_by_the_command_line(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PACKAGE.parent)
    others = RUN | SHARED
    assert_parsed(words_of(call, others[call][0] if call in others else PARSED[call]))


@pytest.mark.parametrize("call", sorted(name for name in NAMED if " " in name and "{}" not in name))
def test_a_command_that_is_named_exists_with_its_options(call: str) -> None:
    words = call.split()
    assert called_command(words[1:])[0] is not cli
    assert fault(words) == ""


def failed(**changes: Any) -> JobView:
    attempt = Attempt(
        JOB.id, Verdict.FAILED, Stage.NUMERICS, "too far", device="virtual-SM8650-0", bundle_key="a" * 64,
        cause=Cause.NUMERICS,
    )  # fmt: skip
    names = {"id": JOB.id, "suite": "s", "case": "conv", "soc": "SM8650", "backend": "htp", "precision": "8a8w"}
    view = JobView(**names, attempts=(attempt,), decisive_attempt=1)
    return msgspec.structs.replace(view, **changes)


def refused(function: Callable[[], object]) -> list[str]:
    """Return the commands in the error that `function` raises."""
    with pytest.raises(UsageError) as error:
        function()
    return commands_in(str(error.value))


def commands_in(text: str) -> list[str]:
    """Return the commands in printed text: those in quotes, else the rest of their line."""
    found = []
    for match in COMMAND.finditer(text):
        quote = text[match.start() - 1 : match.start()]
        found.append(match[0].partition(quote)[0] if quote == "'" else match[0])
    return found


def built() -> dict[str, list[str]]:
    """Return what functions that build commands return, by module and function."""
    again = rerun_command(failed(), virtual=True, run_command="farm run --soc SM8650 --suite 's' --virtual 2 --heap")
    target = Target("SM8650", "htp", "8a8w", options=(("htp_performance_mode", "burst"),))
    request = RunRequest(
        socs=("SM8650",), suites=("a suite",), precisions=("8a8w",), options=("htp_performance_mode=burst",),
        choice=Choice(("phone-1",), ("lab",)), keyword="conv and 3", most_devices=2, seconds=9, timeout_s=7,
    )  # fmt: skip
    outcome = DebugOutcome(JOB.id, "1", 1, None, (), Diagnosis("", ""), {}, {}, Path("report.html"), {"csv": "0" * 64})
    generated: Any = SimpleNamespace(view=failed(suite="qnn_llama_runner"))
    config: Any = None
    return {
        "cli/devices/hold.py:purpose_of": [purpose_of("shell", ["getprop", "x"])],
        "cli/looking/bundle.py:_compile_command": [
            bundle._compile_command(Job(CASE, target), "./my suites/s", "1.5.1"),
        ],
        "cli/looking/bundle.py:_run_command": [bundle._run_command(Path("a b"), failed(), virtual=True)],
        "cli/looking/coverage.py:_command": [
            coverage._command("SM8650", "gpu", ["s"], ["latest"], "main", Path("coverage.md")),
        ],
        "cli/running/debug.py:_text": commands_in("\n".join(debug_command._text(outcome, 0))),
        "cli/running/debug_failures.py:_command": [debug_failures._command(JOB.id, virtual=True)],
        "dispatch/nightly/plan.py:command_of": [command_of(request)],
        "replay/stored_result.py:find_job": refused(lambda: find_job(config, generated)),
        "dispatch/pytest_plugin/upstream_command.py:shown": [
            UpstreamCommand("SM8650", "phone-1", "htp", True, ("t.py", "-k", "a b"), {}, ())
            .shown()[0]
            .partition(": ")[2]
        ],
        "serve/pages/alerts.py:_commands": [
            command for _, command in alert_page._commands(alert(SimpleNamespace(id="1", started_ms=1), JOB.id))
        ],
        "report/formats/review.py:rerun_commands": list(rerun_commands("1", [JOB.id])),
        "report/model/rerun.py:fetch_command": [fetch_command(failed(), "1")],
        "report/model/rerun.py:rerun_command": [
            again,
            rerun_command(failed(options={"profile_level": "optrace"}), virtual=False, toolchain="1.5.1"),
            rerun_command(failed(), virtual=True, run_command=f"farm jobs rerun '{JOB.id}' --virtual"),
            rerun_command(failed(case="tests/a.py::test_x[1-2]"), virtual=True, run_command="farm pytest --virtual 1"),
        ],
        "report/model/rerun.py:ways_again": [command for _, command in ways_again(failed(), again, "1")],
    }


# Function that builds a command from a command line or a store -> test below that runs the command.
IN_SITUATIONS = {
    "cli/output.py:as_called": "show",
    "cli/setup/prune.py:command": "prune",
    "report/terminal/job.py:_attempt": "show",
    "dispatch/request/tuning.py:tune": "tune",
}


def test_every_function_that_builds_a_command_is_called_and_its_commands_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(PACKAGE.parent)
    known = built()
    found = {f"{place}:{name}" for place, tree in modules().items() for name in builders(tree)}
    assert found == known.keys() | IN_SITUATIONS.keys(), "a function that builds a command without a test"
    for place, commands in known.items():
        assert commands, place
        for command in commands:
            assert_parsed(shlex.split(command)[1:])


def plant(home: FarmHome) -> str:
    """Fill a store: a run with a failed job that was profiled, a device in quarantine that is reserved."""
    home.state.mkdir()
    with open_store(home.state / "farm.db") as store:
        run = store.begin_run(RunRecord("farm run --suite s", user_name(), "bench", {"executorch": "1.5.1"}, 1))
        store.plan_jobs(run, [JOB])
        store.record_device(run, PHONE)
        row = OperatorProfile("aten_relu", "", "us", 1, 1.0, 1.0, 1.0, 1.0)
        store.record_attempt(
            run,
            Attempt(
                JOB.id, Verdict.FAILED, Stage.NUMERICS, "too far", "phone-1", 1, 0.5, cause=Cause.NUMERICS,
                operators=(row,),
            ),
        )  # fmt: skip
        store.finish_run(run, 1)
        store.devices.see([Seen(PHONE, "device", None)])
        store.devices.record_health(HealthEvent(PHONE.id, "gave_up", "quarantined", "it was gone"))
        store.leases.reserve(PHONE.id, user_name(), 3600)
    return run


class Planted(FarmHome):
    """Home with a planted store, and a cache of its own, which some commands empty."""

    run_id = ""

    def call(self, call: str, values: tuple[str, ...] = ()) -> Any:
        return self.farm(*words_of(call, tuple(value.replace("RUN_ID", self.run_id) for value in values)))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    folder = tmp_path_factory.mktemp("planted")
    (folder / "cwd").mkdir()
    home = Planted(folder / "cache", folder / "state", folder / "cwd", owns_cache=True)
    object.__setattr__(home, "run_id", plant(home))
    return home


@pytest.mark.parametrize("call", sorted(RUN))
def test_a_printed_command_runs_in_its_situation(call: str, planted: Planted) -> None:
    values, code, text = RUN[call]
    done = planted.call(call, values)
    assert done.returncode == code, done.stderr
    assert text in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_commands_of_a_shared_farm_run_in_their_situation(home: FarmHome, new_store: Callable[[str], str]) -> None:
    shared = {"FARM_STORE": new_store("printed_commands"), "FARM_ARTIFACTS": f"file://{home.state}/files"}
    for call, (values, code, text) in SHARED.items():
        done = home.farm(*words_of(call, values), env=shared)
        assert done.returncode == code, (call, done.stderr)
        assert text in done.stdout + done.stderr


def test_a_hint_for_an_empty_store_names_a_run_that_can_be_made(home: FarmHome) -> None:
    [command] = commands_in(home.farm("status").stderr)
    assert command == FIRST_RUN
    listed = home.farm(*shlex.split(command)[1:], "--collect-only", code=0)
    assert "smoke/" in listed.stdout


def test_what_farm_show_prints_of_a_failed_job_runs(planted: Planted) -> None:
    shown = planted.call("farm show {}", ("s/conv",))
    commands = {" ".join(command.split()[1:3]): command for command in commands_in(shown.stdout)}
    named = [name for name in commands if name == "jobs profile" or name.startswith("history ")]
    assert len(named) == 2
    for name in named:
        done = planted.farm(*shlex.split(commands[name])[1:])
        assert done.returncode == 0, done.stderr
        assert "conv" in done.stdout
    for command in commands.values():
        assert_parsed(shlex.split(command)[1:])


def test_what_ends_the_quarantine_of_a_removed_device_runs(home: FarmHome) -> None:
    plant(home)
    assert home.farm("devices", "release", "phone-1").returncode == 0
    shown, ends = commands_in(home.farm("devices", "remove", "phone-1", "--yes").stdout)
    assert "phone-1 is suspect" in home.farm(*shlex.split(ends)[1:], code=0).stdout
    assert "it was gone" in home.farm(*shlex.split(shown)[1:], code=0).stdout


def test_what_prune_prints_removes_what_it_listed(planted: Planted) -> None:
    left = planted.cache / "bundles" / "aa" / f"{'a' * 64}.xyz.partial"
    orphan = planted.state / "runs" / "20260101-000000-abcdef"
    for folder in (left, orphan):
        folder.mkdir(parents=True)
    # A new folder may belong to a run that begins.
    os.utime(orphan, (0, 0))
    for words in (
        ("runs", "prune", "--keep-runs", "1", "--orphans"),
        ("setup", "cache", "prune", "--older", "30d"),
    ):
        [*_, command] = commands_in(planted.farm(*words).stdout)
        done = planted.farm(*shlex.split(command)[1:])
        assert done.returncode == 0, done.stderr
    assert not left.exists()
    assert not orphan.exists()


def test_what_a_case_without_results_prints_is_a_run_of_it(home: FarmHome) -> None:
    plant(home)
    [command] = commands_in(home.farm("suites", "tune", "quantized_ops/conv2d").stderr)
    listed = home.farm(*shlex.split(command.replace("SOC", "SM8650"))[1:], "--collect-only", code=0)
    assert "quantized_ops/conv2d[SM8650-htp-" in listed.stdout
