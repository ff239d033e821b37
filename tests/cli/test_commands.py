"""Rules for every command, and commands that the product and its documentation print: parsed as printed, or run."""

from __future__ import annotations

import ast
import io
import itertools
import os
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner
from command_words import called_command, fault
from farm_home import FarmHome
from made_runs import PHONE, attempt_of, made_job, record_run
from report_pages import alert

import farm
from farm.base.errors import FIRST_RUN, UsageError
from farm.base.machine import user_name
from farm.cli.devices.hold import purpose_of
from farm.cli.looking import jobs
from farm.cli.main import cli
from farm.cli.options import with_numbers
from farm.cli.output import require_consent
from farm.cli.running import cell_steps
from farm.cli.running import debug as debug_command
from farm.devices.device import HealthEvent
from farm.devices.virtual.faults import FaultKind
from farm.dispatch.nightly.plan import command_of
from farm.dispatch.pool.fleet import Choice
from farm.dispatch.pytest_plugin.upstream import UpstreamCommand
from farm.dispatch.request.request import RunRequest
from farm.replay.debug import DebugOutcome
from farm.replay.stored_result import find_job
from farm.report.formats.review import rerun_commands
from farm.report.model.summary import fetch_command, rerun_command, ways_again
from farm.results.attempt import Cause, OperatorProfile, Verdict
from farm.results.layers import Diagnosis
from farm.serve.pages import alerts as alert_page
from farm.store.leases.registry import Seen
from farm.store.records import JobView
from farm.store.store import open_store
from farm.suites.suite import Job, Target

# Rules for every command: JSON, consent to removals, one verb for them, and one meaning for each option's name.


WITHOUT_JSON = {
    "shell": "the device's shell has standard output",
    "devices shell": "the device's shell has standard output",
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


# Each command in the documentation exists and has the options that stand there.


ROOT = Path(__file__).resolve().parents[2]


def commands(page: str) -> list[str]:
    """Return the farm commands in the code blocks and the code of the text of a page."""
    page = re.sub(r"^(\./farmw|\.venv/bin/farm) (?!test\b)", "farm ", page, flags=re.MULTILINE)
    blocks = "".join(re.findall(r"```[a-z]*\n(.*?)```", page, re.DOTALL)).replace("\\\n", " ")
    lines = [part for line in blocks.splitlines() for part in re.split(r"; ", re.sub(r"^\$ ", "", line.strip()))]
    lines += re.findall(r"`(farm [^`]+)`", page)
    # Two blanks begin a remark, as do "#", and "|" and ">" other programs.
    return [re.split(r"\s{2,}|\s[#|>]", line)[0].replace("...", "") for line in lines if line.startswith("farm ")]


def test_every_command_of_the_documentation_is_one_with_such_options() -> None:
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    found = [(page.name, line) for page in pages for line in commands(page.read_text())]
    assert len(found) > 300
    assert len([line for name, line in found if name == "README.md"]) > 5
    wrong = [(name, line, word) for name, line in found if (word := fault(line.split()))]
    assert wrong == []


# Every command that the product prints: collected from its code and parsed as printed, or run in its situation.


PACKAGE = Path(farm.__file__).parent
NAMES = cli.list_commands(click.Context(cli))
COMMAND = re.compile(rf"(?<![\w/.-])farm (?:(?:{'|'.join(NAMES)})(?![\w-])|\{{\}})[^\n]*")
JOB = made_job("conv")
# Punctuation of a sentence behind a command.
_AFTER = ",;:.)'`"
# Most texts of one literal with alternatives.
_MOST_TEXTS = 64

# Text that names a command with some of its options, and is no call.
NAMED = {
    "farm jobs bundle --compiled",
    "farm exec --option direct_mode=true",
}
# Complete call that needs no device -> inserted values, exit code and a part of the output.
RUN = {
    "farm perf baseline {}": (("s/conv",), 0, "s/conv"),
    "farm setup cache prune --all --yes": ((), 0, ""),
    "farm perf confirm --run {}": (("RUN_ID",), 0, ""),
    "farm devices enable {}": (("phone-1",), 0, "phone-1 is in service"),
    "farm devices show {}": (("phone-1",), 0, "it was gone"),
    "farm devices unquarantine {}": (("phone-1",), 0, "phone-1 is suspect"),
    "farm diff {} {}": (("RUN_ID", "RUN_ID"), 0, ""),
    "farm data export --format jsonl": ((), 0, ""),
    "farm history {}": (("s/conv",), 0, "s/conv"),
    "farm devices release {}": (("phone-1",), 0, "phone-1 is given back"),
    "farm report {}": (("RUN_ID",), 0, ""),
    "farm show {}": (("s/conv[SM8650-htp-8a8w]",), 0, "too far"),
    "farm suites tune {}/{}": (("s", "conv"), 2, "unknown suite 's'"),
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


def test_every_printed_command_is_one_with_such_options_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PACKAGE.parent)
    assert len(printed()) > 80
    assert printed().keys() >= NAMED | RUN.keys() | {FIRST_RUN}, "in a table, and not printed"
    for call, place in printed().items():
        if call == "farm {}":
            # Version of farm, or the subject of an error.
            continue
        words = shlex.split(call.replace("{}", "1"))
        assert called_command(words[1:])[0] is not cli, (call, place)
        assert fault(words) == "", (call, place)
        # A call without words of its own is the name of a command.
        if call not in NAMED and called_command(words[1:])[1]:
            try:
                assert_parsed(words[1:])
            except click.MissingParameter:
                raise
            except click.BadParameter:
                # The inserted value is an example of no kind.
                assert "{}" in call or re.search(r"[A-Z]{3}", call), (call, place)


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


def failed(**changes: Any) -> JobView:
    attempt = attempt_of(JOB, Verdict.FAILED, device="virtual-SM8650-0", bundle_key="a" * 64, cause=Cause.NUMERICS)
    names = {"id": JOB.id, "suite": "s", "case": "conv", "soc": "SM8650", "backend": "htp", "precision": "8a8w"}
    return msgspec.structs.replace(JobView(**names, attempts=(attempt,), decisive_attempt=1), **changes)


def commands_in(text: str) -> list[str]:
    """Return the commands in printed text: those in quotes, else the rest of their line."""
    found = []
    for match in COMMAND.finditer(text):
        quote = text[match.start() - 1 : match.start()]
        found.append(match[0].partition(quote)[0] if quote == "'" else match[0])
    return found


def built() -> list[str]:
    """Return commands of functions that build them as lists of words."""
    again = rerun_command(failed(), virtual=True, run_command="farm run --soc SM8650 --suite 's' --virtual 2 --heap")
    target = Target("SM8650", "htp", "8a8w", options=(("htp_performance_mode", "burst"),))
    request = RunRequest(
        socs=("SM8650",), suites=("a suite",), precisions=("8a8w",), options=("htp_performance_mode=burst",),
        choice=Choice(("phone-1",), ("lab",)), keyword="conv and 3", most_devices=2, seconds=9, timeout_s=7,
    )  # fmt: skip
    outcome = DebugOutcome(JOB.id, "1", 1, None, (), Diagnosis("", ""), {}, {}, Path("report.html"), {"csv": "0" * 64})
    upstream = UpstreamCommand("SM8650", "phone-1", "htp", True, ("t.py", "-k", "a b"), {}, ())
    generated: Any = SimpleNamespace(view=failed(suite="qnn_llama_runner"))
    with pytest.raises(UsageError) as error:
        find_job(None, generated)  # type: ignore[arg-type]
    alerted = alert_page._commands(alert(SimpleNamespace(id="1", started_ms=1), JOB.id))  # type: ignore[arg-type]
    return [
        purpose_of("shell", ["getprop", "x"]),
        jobs._compile_command(Job(JOB.case, target), "./my s/s", "1.5.1"),
        *commands_in("\n".join(debug_command._text(outcome, 0))),
        cell_steps._command(JOB.id, virtual=True),
        command_of(request),
        *commands_in(str(error.value)),
        upstream.shown()[0].partition(": ")[2],
        *(command for _, command in alerted),
        *rerun_commands("1", [JOB.id]),
        fetch_command(failed(), "1"),
        again,
        rerun_command(failed(options={"profile_level": "optrace"}), virtual=False, toolchain="1.5.1"),
        rerun_command(failed(), virtual=True, run_command=f"farm jobs rerun '{JOB.id}' --virtual"),
        rerun_command(failed(case="tests/a.py::test_x[1-2]"), virtual=True, run_command="farm pytest --virtual 1"),
        *(command for _, command in ways_again(failed(), again, "1")),
    ]


def test_a_command_that_is_built_of_words_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PACKAGE.parent)
    commands = built()
    assert len(commands) >= 20
    for command in commands:
        assert_parsed(shlex.split(command)[1:])


def plant(home: FarmHome) -> str:
    """Fill a store: a run with a failed job that was profiled, a device in quarantine that is reserved."""
    home.state.mkdir()
    row = OperatorProfile("aten_relu", "", "us", 1, 1.0, 1.0, 1.0, 1.0)
    failed_for = {"reason": "too far", "cause": Cause.NUMERICS, "operators": (row,), "seconds": 0.5}
    with open_store(home.state / "farm.db") as store:
        run = record_run(store, [JOB], [Verdict.FAILED], attempt=failed_for, command="farm run --suite s", exit_code=1)
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


def test_a_printed_command_runs_in_its_situation(planted: Planted) -> None:
    for call, (values, code, text) in RUN.items():
        done = planted.call(call, values)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), (call, done.stderr)
        assert text in done.stdout + done.stderr


def test_hints_without_results_name_runs_that_can_be_made(home: FarmHome) -> None:
    [first] = commands_in(home.farm("status").stderr)
    assert first == FIRST_RUN
    plant(home)
    [tuning] = commands_in(home.farm("suites", "tune", "quantized_ops/conv2d").stderr)
    for command, job in ((first, "smoke/"), (tuning.replace("SOC", "SM8650"), "quantized_ops/conv2d[SM8650-htp-")):
        assert job in home.farm(*shlex.split(command)[1:], "--collect-only", code=0).stdout


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


def test_the_printed_end_of_a_removed_devices_quarantine_runs(home: FarmHome) -> None:
    plant(home)
    home.farm("devices", "release", "phone-1", code=0)
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
